// Memory for weights: zero-filled, on 2 MiB boundaries, in huge pages where the system grants them.
#pragma once
#include <cstddef>
#include <utility>

namespace moekit::cpu {

/// One mapping. Move-only.
class Arena {
 public:
  Arena() = default;
  /// Throws Error(out_of_memory) naming the bytes. 0 bytes = empty.
  explicit Arena(std::size_t bytes);
  ~Arena();
  Arena(Arena&& other) noexcept : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  Arena& operator=(Arena&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }
  std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }  ///< as asked for

 private:
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

/// Bytes of all arenas that live now.
std::size_t arena_bytes();

}  // namespace moekit::cpu
