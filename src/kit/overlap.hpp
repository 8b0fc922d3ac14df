// Do two views share an element?
#pragma once
#include <algorithm>
#include <cstdint>

#include <moekit/tensor.hpp>

namespace moekit::inline v0::kernel {

/// Rank-2 views with stride[1] = 1. Exact for views of one row pitch (halves of one wide buffer do not overlap),
/// conservative otherwise.
inline bool overlap(const Tensor& a, const Tensor& b) {
  if (a.numel() == 0 || b.numel() == 0 || a.data == nullptr || b.data == nullptr) return false;
  const auto begin = [](const Tensor& t) { return reinterpret_cast<std::uintptr_t>(t.data); };
  const auto row = [](const Tensor& t) { return static_cast<std::uintptr_t>(t.shape[1] * bytes(t.dtype)); };
  const auto pitch = [](const Tensor& t) { return static_cast<std::uintptr_t>(t.stride[0] * bytes(t.dtype)); };
  const auto end = [&](const Tensor& t) {
    return begin(t) + static_cast<std::uintptr_t>(t.shape[0] - 1) * pitch(t) + row(t);
  };
  if (end(a) <= begin(b) || end(b) <= begin(a)) return false;
  if (pitch(a) != pitch(b) || pitch(a) == 0) return true;
  const std::uintptr_t low = std::min(begin(a), begin(b)), p = pitch(a);
  const std::uintptr_t at_a = (begin(a) - low) % p, at_b = (begin(b) - low) % p;  // columns modulo the pitch
  const auto meets = [p](std::uintptr_t x, std::uintptr_t nx, std::uintptr_t y, std::uintptr_t ny) {
    return (x < y + ny && y < x + nx) || (x + p < y + ny && y < x + p + nx) || (x < y + p + ny && y + p < x + nx);
  };
  return meets(at_a, row(a), at_b, row(b));
}

}  // namespace moekit::inline v0::kernel
