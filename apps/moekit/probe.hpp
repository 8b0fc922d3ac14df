// What the machine can do right now: probes that run between the samples of a benchmark.
#pragma once
#include <cstdint>
#include <vector>

#include <moekit/stream.hpp>

#include "cpu/arena.hpp"

namespace moekit::cli {

/// Reads fresh slices of a large buffer with all threads of an executor.
class ReadProbe {
 public:
  /// @param span_bytes  how much memory the slices rotate over; several times the last-level cache
  ReadProbe(Executor& executor, std::int64_t span_bytes, std::int64_t slice_bytes);
  double gbps();  ///< one slice
  /// One slice of `bytes` with all threads; microseconds.
  double together_us(std::int64_t bytes);
  /// One slice of `bytes` on the calling thread alone; microseconds.
  double alone_us(std::int64_t bytes);

 private:
  const std::byte* next(std::int64_t bytes);
  Executor& executor_;
  cpu::Arena memory_;
  std::int64_t slice_, at_ = 0;
};

/// f32 multiply-adds from registers on all threads of an executor: operations per second × 1e-9.
double fma_gflops(Executor& executor);

/// Binds each thread of an executor to a CPU of its own, if there are enough; the caller's own binding is restored when
/// the object goes.
class PinnedThreads {
 public:
  explicit PinnedThreads(Executor& executor);
  ~PinnedThreads();
  PinnedThreads(const PinnedThreads&) = delete;
  PinnedThreads& operator=(const PinnedThreads&) = delete;
  bool pinned() const { return pinned_; }

 private:
  std::vector<std::uint64_t> before_;  // the caller's cpu_set_t
  bool pinned_ = false;
};

}  // namespace moekit::cli
