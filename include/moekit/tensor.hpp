// Element types, devices and non-owning tensor views.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>

#include <moekit/export.hpp>
#include <moekit/status.hpp>

namespace moekit::inline v0 {

/// Element types: storage types, and the types that quantisation schemes speak of (DESIGN: f32 bf16 f16 e4m3 e5m2
/// int8 int4 mxfp4 mxfp8 nvfp4). The 4-bit types pack two elements into a byte.
enum class DType : std::uint8_t {
  f64,
  f32,
  bf16,
  f16,
  e4m3,
  e5m2,
  e8m0,
  i64,
  i32,
  i16,
  i8,
  u64,
  u32,
  u16,
  u8,
  boolean,
  int4,
  mxfp4,
  mxfp8,
  nvfp4,
};

MOEKIT_API const char* name(DType type);                            ///< "bf16", "i8", …
MOEKIT_API std::optional<DType> dtype_from_name(const char* name);  ///< also "int8" for i8
MOEKIT_API int bits(DType type);                                    ///< bits per element: 4, 8, 16, 32 or 64
inline std::int64_t bytes(DType type) { return bits(type) / 8; }    ///< whole-byte types only
MOEKIT_API bool is_float(DType type);                               ///< f64 f32 bf16 f16: what activations may be

enum class DeviceType : std::uint8_t { cpu, cuda };
/// Where memory lies and work runs.
struct Device {
  DeviceType type = DeviceType::cpu;
  int index = 0;
  bool operator==(const Device&) const = default;
};
MOEKIT_API std::string to_string(const Device& device);  ///< "cpu", "cuda:0"

inline constexpr int kMaxRank = 4;

/// A view of memory that somebody else owns: what DLPack calls a tensor, strides in elements.
///
/// A default-constructed Tensor is "absent" (data null, rank 0). Strides may be anything that the use allows: rows
/// may be padded (stride[0] > K), broadcast (0), or reversed by a transposed view where a function says so.
struct Tensor {
  void* data = nullptr;
  DType dtype = DType::f32;
  Device device{};
  int rank = 0;
  std::array<std::int64_t, kMaxRank> shape{};
  std::array<std::int64_t, kMaxRank> stride{};  ///< in elements

  Tensor() = default;
  /// Row-major and dense.
  MOEKIT_API Tensor(void* memory, DType type, std::initializer_list<std::int64_t> extents, Device where = {});
  /// Read-only memory: the library never writes through tensors that a function documents as read.
  Tensor(const void* memory, DType type, std::initializer_list<std::int64_t> extents, Device where = {})
      : Tensor(const_cast<void*>(memory), type, extents, where) {}
  /// With explicit strides, in elements.
  MOEKIT_API static Tensor strided(const void* memory, DType type, std::initializer_list<std::int64_t> extents,
                                   std::initializer_list<std::int64_t> strides, Device where = {});

  bool present() const { return data != nullptr || rank > 0; }
  MOEKIT_API std::int64_t numel() const;
  MOEKIT_API bool is_contiguous() const;  ///< row-major and dense; extents of 0 and 1 do not care about strides
  std::int64_t rows() const { return rank > 0 ? shape[0] : 0; }
  MOEKIT_API Tensor slice_rows(std::int64_t begin, std::int64_t end) const;  ///< [begin, end) along axis 0
  MOEKIT_API Tensor index(std::int64_t i) const;                             ///< element i of axis 0, rank - 1
  MOEKIT_API Tensor transposed() const;                                      ///< rank 2: axes exchanged, no copy
  /// A contiguous tensor seen in another shape of as many elements; anything else is a failure.
  MOEKIT_API Status view(std::initializer_list<std::int64_t> shape, Tensor& out) const;

  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }
  /// Address of element (i, j) of a rank-2 tensor of T.
  template <class T>
  T& at(std::int64_t i, std::int64_t j) const {
    return static_cast<T*>(data)[i * stride[0] + j * stride[1]];
  }
};

/// "[8, 28672, 4096]"
MOEKIT_API std::string shape_string(const Tensor& tensor);

/// How many elements share one scale: rows × cols of the matrix it belongs to; -1 = the whole axis.
/// {-1,-1} per tensor · {1,-1} per token or output channel · {128,128} and {1,128} blocks · {1,g} groups along K.
struct Granularity {
  std::int64_t rows = -1;
  std::int64_t cols = -1;
  bool operator==(const Granularity&) const = default;
  bool per_tensor() const { return rows < 0 && cols < 0; }
  bool per_row() const { return rows == 1 && cols < 0; }
};
MOEKIT_API std::string to_string(const Granularity& granularity);  ///< "per tensor", "per row", "128x128", …

/// Data with the scales that belong to it: a quantised activation or, with an absent scale, a plain one.
struct QTensor {
  Tensor data;
  Tensor scale;  ///< f32, absent if not quantised; [rows, groups] beside [rows, K], [L, T*D, groups] beside [L, T*D, K]
  /// What one scale covers. Absent = unknown (a tensor from outside the library): then the one-element rule holds,
  /// a scale with one element is per tensor and any other is row-wise.
  std::optional<Granularity> granularity;

  /// Rows [begin, end) of data; row-wise scales likewise, per-tensor scales whole.
  MOEKIT_API QTensor slice_rows(std::int64_t begin, std::int64_t end) const;
};

/// Row-wise scales sliced, per-tensor (and per-expert) ones whole: the rule of QTensor::slice_rows for a scale alone.
MOEKIT_API Tensor slice_scale(const Tensor& scale, const std::optional<Granularity>& granularity, std::int64_t begin,
                              std::int64_t end);

}  // namespace moekit::inline v0
