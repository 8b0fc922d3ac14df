#include "tensor_checks.hpp"

#include <algorithm>
#include <cstddef>
#include <limits>

#include "enum_values.hpp"
#include "text.hpp"

namespace moekit::tensors {
using text::concat;

namespace {

std::string text_of(const std::array<std::int64_t, kMaxRank>& values, int rank) {
  std::string out = "[";
  for (int axis = 0; axis < rank; ++axis) out += concat(axis ? ", " : "", values[static_cast<std::size_t>(axis)]);
  out += "]";
  return out;
}

/// First and last byte + 1 as addresses; the tensor has passed check().
struct Addresses {
  std::uintptr_t begin = 0, end = 0;
  explicit Addresses(const Tensor& tensor) {
    const ByteRange range = byte_range(tensor).value_or(ByteRange{});
    const auto data = reinterpret_cast<std::uintptr_t>(tensor.data);
    begin = data + static_cast<std::uintptr_t>(range.begin), end = data + static_cast<std::uintptr_t>(range.end);
  }
  bool empty() const { return begin == end; }
  bool meets(const Addresses& other) const { return begin < other.end && other.begin < end; }
};

/// A tensor as dense rows that lie `pitch` bytes apart; pitch 0 = another form, or one row.
struct Rows {
  bool dense = false;
  std::uintptr_t pitch = 0, width = 0;
  explicit Rows(const Tensor& tensor) {
    if (tensor.rank != 1 && tensor.rank != 2) return;
    const auto last = static_cast<std::size_t>(tensor.rank) - 1;
    dense = tensor.stride[last] == 1 || tensor.shape[last] <= 1;
    width = static_cast<std::uintptr_t>(tensor.shape[last] * bits(tensor.dtype) / 8);
    if (tensor.rank == 1 || tensor.shape[0] <= 1) return;
    const std::int64_t step = tensor.stride[0] * bits(tensor.dtype) / 8;
    pitch = static_cast<std::uintptr_t>(step < 0 ? -step : step);
  }
};

}  // namespace

std::optional<ByteRange> byte_range(const Tensor& tensor) {
  if (tensor.rank < 0 || tensor.rank > kMaxRank) return std::nullopt;
  std::int64_t elements = 1, lowest = 0, highest = 0;
  bool empty = tensor.rank == 0;
  for (std::size_t axis = 0; axis < static_cast<std::size_t>(tensor.rank); ++axis) {
    if (tensor.shape[axis] < 0) return std::nullopt;
    empty = empty || tensor.shape[axis] == 0;
  }
  if (empty) return ByteRange{};
  for (std::size_t axis = 0; axis < static_cast<std::size_t>(tensor.rank); ++axis) {
    std::int64_t reach = 0;
    std::int64_t& side = tensor.stride[axis] < 0 ? lowest : highest;
    if (__builtin_mul_overflow(elements, tensor.shape[axis], &elements) ||
        __builtin_mul_overflow(tensor.shape[axis] - 1, tensor.stride[axis], &reach) ||
        __builtin_add_overflow(side, reach, &side))
      return std::nullopt;
  }
  const std::int64_t width = bits(tensor.dtype);
  std::int64_t first_bit = 0, end_bit = 0, all_bits = 0;
  if (__builtin_mul_overflow(lowest, width, &first_bit) || __builtin_add_overflow(highest, 1, &highest) ||
      __builtin_mul_overflow(highest, width, &end_bit) || end_bit > std::numeric_limits<std::int64_t>::max() - 7 ||
      __builtin_mul_overflow(elements, width, &all_bits))
    return std::nullopt;
  const ByteRange range{first_bit / 8, (end_bit + 7) / 8};
  std::uintptr_t address = reinterpret_cast<std::uintptr_t>(tensor.data);
  if (tensor.data == nullptr) return range;
  const bool wraps = __builtin_add_overflow(address, static_cast<std::uintptr_t>(range.end), &address) ||
                     static_cast<std::uintptr_t>(-range.begin) > reinterpret_cast<std::uintptr_t>(tensor.data);
  return wraps ? std::nullopt : std::optional(range);
}

Status check(const Tensor& tensor, const Device& where, std::string_view stage, std::string_view field) {
  if (tensor.rank < 0 || tensor.rank > kMaxRank)
    return Status(StatusCode::invalid_shape,
                  concat("[", stage, "] ", field, " has rank ", tensor.rank, ", tensors have 0 to ", kMaxRank), {},
                  std::string(field));
  if (!tensor.present()) return {};
  if (!values::is_named(tensor.dtype)) return values::check(stage, concat(field, ".dtype"), tensor.dtype);
  if (!values::is_named(tensor.device.type)) return values::check(stage, concat(field, ".device"), tensor.device.type);
  if (!(tensor.device == where))
    return Status(
        StatusCode::invalid_argument,
        concat("[", stage, "] ", field, " is on ", to_string(tensor.device), ", the work runs on ", to_string(where)),
        concat("copy it to ", to_string(where), " first"), std::string(field));
  if (byte_range(tensor)) return {};
  return Status(StatusCode::invalid_shape,
                concat("[", stage, "] ", field, " ", text_of(tensor.shape, tensor.rank), " with strides ",
                       text_of(tensor.stride, tensor.rank), " does not fit the address space"),
                "extents must not be negative, and every element needs an address", std::string(field));
}

bool overlap(const Tensor& a, const Tensor& b) {
  if (a.data == nullptr || b.data == nullptr) return false;
  const Addresses at_a(a), at_b(b);
  if (at_a.empty() || at_b.empty() || !at_a.meets(at_b)) return false;
  const Rows rows_a(a), rows_b(b);
  if (!rows_a.dense || !rows_b.dense) return true;
  const std::uintptr_t p = std::max(rows_a.pitch, rows_b.pitch);
  const bool one_pitch = (rows_a.pitch == 0 || rows_a.pitch == p) && (rows_b.pitch == 0 || rows_b.pitch == p);
  if (p == 0 || !one_pitch) return true;
  // Columns modulo the pitch: rows of the two meet only where their columns do.
  const std::uintptr_t low = std::min(at_a.begin, at_b.begin);
  const std::uintptr_t x = (at_a.begin - low) % p, nx = rows_a.width, y = (at_b.begin - low) % p, ny = rows_b.width;
  return (x < y + ny && y < x + nx) || x + p < y + ny || y + p < x + nx;
}

bool overlap(const Tensor& a, const std::byte* data, std::size_t size) {
  if (a.data == nullptr || data == nullptr || size == 0) return false;
  const Addresses at(a);
  const auto begin = reinterpret_cast<std::uintptr_t>(data);
  return !at.empty() && at.begin < begin + size && begin < at.end;
}

}  // namespace moekit::tensors
