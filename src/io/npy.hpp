// NumPy's .npy arrays: C order, little-endian.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include <moekit/tensor.hpp>

namespace moekit::io {

/// An array with memory of its own.
struct NpyArray {
  std::vector<std::byte> storage;
  Tensor tensor;  ///< dense view of storage, rank 0 … 4
};

/// What to make of uint16 elements, which are how bf16 travels in a format that does not know it.
enum class NpyU16 { refuse, as_bf16 };

/// Reads f32, f16, i32 and i64 (and, on request, bf16 as uint16). Throws Error: bad_file for what is malformed,
/// unsupported for other types, Fortran order and big-endian data, with what to do in NumPy.
NpyArray read_npy(const std::string& path, NpyU16 u16 = NpyU16::refuse);

/// Writes f32, f64, i32 or i64, C order whatever the strides of `tensor` are; bf16 and f16 are widened to f32.
/// Throws Error bad_file when the file cannot be written.
void write_npy(const std::string& path, const Tensor& tensor);

}  // namespace moekit::io
