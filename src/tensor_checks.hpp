// What every tensor from outside must pass before its memory is touched, and which bytes it covers.
#pragma once
#include <cstdint>
#include <optional>
#include <string_view>

#include <moekit/tensor.hpp>

namespace moekit::tensors {

/// Bytes of a tensor's elements, relative to `data`: begin ≤ 0 where a stride is negative.
struct ByteRange {
  std::int64_t begin = 0, end = 0;
};
/// Absent where an extent is negative or the rank, an offset or the number of elements does not fit. No elements:
/// empty.
std::optional<ByteRange> byte_range(const Tensor& tensor);

/// The element type has a name, the rank is one of 0 … kMaxRank, every address fits 63 bits, and the memory lies where
/// the work runs. An absent tensor passes. The failure names `field`.
/// @param stage  "layer": what stands in brackets in front of the message
Status check(const Tensor& tensor, const Device& where, std::string_view stage, std::string_view field);

/// Do two tensors that have passed check() share a byte? Exact for rows of one pitch (columns of one wide buffer that
/// lie side by side do not overlap), by the range of addresses otherwise.
bool overlap(const Tensor& a, const Tensor& b);
/// The same for a tensor and a piece of memory.
bool overlap(const Tensor& a, const std::byte* data, std::size_t size);

}  // namespace moekit::tensors
