// Scratch memory: who has how much of it, and a pool that layers share.
#pragma once
#include <cstddef>
#include <memory>

#include <moekit/stream.hpp>

namespace moekit::inline v0 {

/// Hands out 256-byte-aligned pieces of a given span, first to last. Running it over a null span of size 0 counts
/// the bytes that the same requests need.
class WorkspaceCursor {
 public:
  explicit WorkspaceCursor(Bytes memory) : memory_(memory) {}
  /// Null data if the span is too small (or counting); used() goes on counting either way.
  Bytes take(std::size_t bytes) {
    const std::size_t begin = used_;
    used_ += (bytes + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
    return used_ <= memory_.size ? Bytes{memory_.data + begin, bytes} : Bytes{nullptr, bytes};
  }
  std::size_t used() const { return used_; }
  bool fits() const { return used_ <= memory_.size; }

 private:
  Bytes memory_;
  std::size_t used_ = 0;
};

/// Grow-only scratch shared by layers: one buffer per (ubatch, lane), lane = one in-order stream of work within a
/// micro-batch. Two calls on the same (ubatch, lane) must not overlap. Growth frees the old buffer.
class MOEKIT_API WorkspacePool {
 public:
  static constexpr int kMaxUbatches = 8;
  static constexpr int kMaxLanes = 2;
  explicit WorkspacePool(Device device = {});
  ~WorkspacePool();
  /// At least `bytes`, 256-byte aligned. A locked pool that would have to grow fails and stays as it is.
  Status get(int ubatch, int lane, std::size_t bytes, Bytes& out);
  /// Grows the buffers of every ubatch below `ubatches` (a slot that was never used during warm-up is ready too).
  Status reserve(int ubatches, std::size_t bytes);
  void lock();
  void unlock();
  bool locked() const;
  std::size_t bytes() const;  ///< held now, all buffers

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace moekit::inline v0
