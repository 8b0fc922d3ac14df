#include <moekit/tensor.hpp>

#include <algorithm>
#include <cstring>
#include <limits>

#include "text.hpp"

namespace moekit::inline v0 {
namespace {

struct DTypeInfo {
  DType type;
  const char* name;
  int bits;
};
constexpr DTypeInfo kTypes[] = {
    {DType::f64, "f64", 64},  {DType::f32, "f32", 32},    {DType::bf16, "bf16", 16},  {DType::f16, "f16", 16},
    {DType::e4m3, "e4m3", 8}, {DType::e5m2, "e5m2", 8},   {DType::e8m0, "e8m0", 8},   {DType::i64, "i64", 64},
    {DType::i32, "i32", 32},  {DType::i16, "i16", 16},    {DType::i8, "int8", 8},     {DType::u64, "u64", 64},
    {DType::u32, "u32", 32},  {DType::u16, "u16", 16},    {DType::u8, "u8", 8},       {DType::boolean, "bool", 8},
    {DType::int4, "int4", 4}, {DType::mxfp4, "mxfp4", 4}, {DType::mxfp8, "mxfp8", 8}, {DType::nvfp4, "nvfp4", 4},
};
constexpr DTypeInfo kUnknown = {DType::u8, "unknown type", 0};
const DTypeInfo& info(DType type) {
  const auto at = static_cast<std::size_t>(type);
  return at < std::size(kTypes) ? kTypes[at] : kUnknown;
}

/// Axes that there are, whatever a rank from outside says.
int axes(const Tensor& tensor) { return std::clamp(tensor.rank, 0, kMaxRank); }

/// a · b, or the largest number: an extent that does not fit matches no other.
std::int64_t product(std::int64_t a, std::int64_t b) {
  std::int64_t out = 0;
  return __builtin_mul_overflow(a, b, &out) ? std::numeric_limits<std::int64_t>::max() : out;
}

std::byte* advance(const Tensor& tensor, std::int64_t elements) {
  return static_cast<std::byte*>(tensor.data) + elements * bits(tensor.dtype) / 8;
}

}  // namespace

const char* name(DType type) { return info(type).name; }
int bits(DType type) { return info(type).bits; }
bool is_float(DType type) {
  return type == DType::f64 || type == DType::f32 || type == DType::bf16 || type == DType::f16;
}

std::optional<DType> dtype_from_name(const char* text) {
  for (const DTypeInfo& entry : kTypes)
    if (std::strcmp(entry.name, text) == 0) return entry.type;
  if (std::strcmp(text, "i8") == 0) return DType::i8;
  return std::nullopt;
}

std::string to_string(const Device& device) {
  switch (device.type) {
    case DeviceType::cpu: return "cpu";
    case DeviceType::cuda: return text::concat("cuda:", device.index);
  }
  return text::concat("unknown device ", static_cast<int>(device.type));
}

Tensor::Tensor(void* memory, DType type, std::initializer_list<std::int64_t> extents, Device where)
    : data(memory), dtype(type), device(where), rank(static_cast<int>(extents.size())) {
  if (rank > kMaxRank)
    throw Error(StatusCode::invalid_shape, text::concat("[tensor] rank ", rank, " is above ", kMaxRank));
  std::int64_t step = 1;
  for (int axis = rank - 1; axis >= 0; --axis) {
    shape[axis] = extents.begin()[axis];
    stride[axis] = step;
    step = product(step, shape[axis]);
  }
}

Tensor Tensor::strided(const void* memory, DType type, std::initializer_list<std::int64_t> extents,
                       std::initializer_list<std::int64_t> strides, Device where) {
  Tensor out(memory, type, extents, where);
  if (strides.size() != extents.size())
    throw Error(StatusCode::invalid_shape, text::concat("[tensor] ", strides.size(), " strides for rank ", out.rank));
  for (int axis = 0; axis < out.rank; ++axis) out.stride[axis] = strides.begin()[axis];
  return out;
}

std::int64_t Tensor::numel() const {
  if (rank == 0) return 0;
  std::int64_t count = 1;
  for (int axis = 0; axis < axes(*this); ++axis) count = product(count, shape[axis]);
  return count;
}

bool Tensor::is_contiguous() const {
  std::int64_t step = 1;
  if (numel() == 0) return true;
  for (int axis = axes(*this) - 1; axis >= 0; --axis) {
    if (shape[axis] != 1 && stride[axis] != step) return false;
    step = product(step, shape[axis]);
  }
  return true;
}

Tensor Tensor::slice_rows(std::int64_t begin, std::int64_t end) const {
  Tensor out = *this;
  out.data = data ? advance(*this, begin * stride[0]) : nullptr;
  out.shape[0] = end - begin;
  return out;
}

Tensor Tensor::index(std::int64_t i) const {
  Tensor out = *this;
  out.data = data ? advance(*this, i * stride[0]) : nullptr;
  out.rank = rank - 1;
  for (int axis = 0; axis < out.rank; ++axis) {
    out.shape[axis] = shape[axis + 1];
    out.stride[axis] = stride[axis + 1];
  }
  return out;
}

Tensor Tensor::transposed() const {
  Tensor out = *this;
  std::swap(out.shape[0], out.shape[1]);
  std::swap(out.stride[0], out.stride[1]);
  return out;
}

Status Tensor::view(std::initializer_list<std::int64_t> extents, Tensor& out) const {
  const Tensor seen(data, dtype, extents, device);
  if (!is_contiguous())
    return Status(StatusCode::invalid_shape, text::concat("[tensor] ", shape_string(*this),
                                                          " is strided and cannot be viewed as ", shape_string(seen)));
  if (seen.numel() != numel())
    return Status(StatusCode::invalid_shape, text::concat("[tensor] ", shape_string(*this), " has ", numel(),
                                                          " elements, ", shape_string(seen), " has ", seen.numel()));
  out = seen;
  return {};
}

std::string shape_string(const Tensor& tensor) {
  std::string out = "[";
  for (int axis = 0; axis < axes(tensor); ++axis) out += (axis ? ", " : "") + std::to_string(tensor.shape[axis]);
  return out + "]";
}

std::string to_string(const Granularity& granularity) {
  if (granularity.per_tensor()) return "per tensor";
  if (granularity.per_row()) return "per row";
  auto extent = [](std::int64_t n) { return n < 0 ? std::string("all") : std::to_string(n); };
  return extent(granularity.rows) + "x" + extent(granularity.cols);
}

Tensor slice_scale(const Tensor& scale, const std::optional<Granularity>& granularity, std::int64_t begin,
                   std::int64_t end) {
  if (!scale.present()) return scale;
  const bool whole = granularity ? granularity->rows < 0 : scale.numel() == 1;
  return whole ? scale : scale.slice_rows(begin, end);
}

QTensor QTensor::slice_rows(std::int64_t begin, std::int64_t end) const {
  return {data.slice_rows(begin, end), slice_scale(scale, granularity, begin, end), granularity};
}

}  // namespace moekit::inline v0
