// Where work runs and in what memory: executors, streams, byte spans, call contexts.
#pragma once
#include <cstddef>
#include <cstdint>

#include <moekit/export.hpp>
#include <moekit/tensor.hpp>

namespace moekit::inline v0 {

class UbatchContext;  // kit/ubatch.hpp

/// Fork-join over indices: the CPU backend's threads, or the caller's. Bits never depend on concurrency().
class Executor {
 public:
  virtual ~Executor() = default;
  /// How many indices may run at the same time, ≥ 1. Kernels cut their work into this many slabs.
  virtual int concurrency() const = 0;
  /// Calls body(arg, i) once for every i in [0, count), on any thread, in any order, and returns when all are done.
  /// Must not throw; may run everything on the calling thread. Writes made before are seen by the bodies, and theirs
  /// by the caller afterwards. Calls from several threads queue.
  virtual void run(std::int64_t count, void (*body)(void* arg, std::int64_t i), void* arg) = 0;
};

/// The built-in pool with `num_threads` threads, the caller being one of them (0 = as many as the CPU set and the
/// cgroup quota allow). Spins for 50–100 µs after a call, then sleeps. Shared by all callers in the process that ask
/// for the same number; usable after fork; lives as long as the process.
MOEKIT_API Executor& cpu_executor(int num_threads = 0);

/// In-order work queue of a device. On CPU a call is complete when it returns and the stream carries the executor.
struct Stream {
  Device device{};
  void* handle = nullptr;        ///< cudaStream_t on CUDA
  Executor* executor = nullptr;  ///< CPU; null = cpu_executor()
};

/// A piece of memory that somebody else owns.
struct Bytes {
  std::byte* data = nullptr;
  std::size_t size = 0;
};

inline constexpr std::size_t kWorkspaceAlignment = 256;

/// What a call runs with. `workspace`: at least workspace_bytes(M), 256-byte aligned; contents undefined before and
/// after. Concurrent calls need one each.
struct CallContext {
  Stream stream{};
  Bytes workspace{};
  UbatchContext* ubatch = nullptr;  ///< null = no overlap
};

}  // namespace moekit::inline v0
