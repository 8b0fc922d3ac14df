// One definition of every quantise and dequantise step. Vector code elsewhere must reproduce these bits.
//
// All arithmetic is f32, round to nearest even. Per token (int8) or per group of 128 along K (e4m3, the last one may
// be shorter):
//
//   int8, divisor 127      scale = absmax / 127       code = rne(x · (127 / absmax))   in [-127, 127]
//   int8, divisor 127.5    scale = absmax / 127.5     code = rne(x / scale)            in [-128, 127]
//   e4m3                   scale = absmax / 448       code = e4m3(x / scale), saturating
//   static scale           code = rne(x / scale) in the range of the divisor, or e4m3(x / scale)
//   dequantised            float(code) · scale, one rounding
//
// A unit whose absmax is below kSmallestAbsmax (zero included) gets codes 0 and scale 1: below it a scale would be
// subnormal and 127 / absmax or 448 / absmax could overflow.
// A unit that holds a NaN or an infinity gets codes 0 and scale NaN: its token comes out NaN, no other one is touched.
// With a static scale, which belongs to many tokens, infinities saturate and a NaN becomes int8 code 0 or e4m3 NaN.
#pragma once
#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>

#include <moekit/config.hpp>

#include "quant/numeric.hpp"

namespace moekit::quant {

inline constexpr float kSmallestAbsmax = 0x1p-117f;  // 448 · 2^-126 rounded up: the scale is still a normal number
inline constexpr float kE4m3Largest = 448.0f;

/// Largest |x| as the bits of an f32, whose order is that of the numbers: infinities and NaNs come out on top, and the
/// result does not depend on the order of the elements.
class Absmax {
 public:
  void add(float x) { bits_ = std::max(bits_, std::bit_cast<std::uint32_t>(x) & 0x7fffffffu); }
  bool finite() const { return bits_ < 0x7f800000u; }
  float value() const { return std::bit_cast<float>(bits_); }

 private:
  std::uint32_t bits_ = 0;
};

/// How the elements of one unit (a token's row, or a group of it) become codes.
struct UnitScale {
  float scale;       ///< what the code is multiplied by; NaN if the unit holds a NaN or an infinity
  float multiplier;  ///< int8 with divisor 127: 127 / absmax
  bool all_zero;     ///< every code is 0
};
inline constexpr UnitScale kNotFinite{std::numeric_limits<float>::quiet_NaN(), 0.0f, true};
inline constexpr UnitScale kZeroUnit{1.0f, 0.0f, true};

inline UnitScale unit_scale(const Absmax& absmax, float divisor) {
  if (!absmax.finite()) return kNotFinite;
  if (absmax.value() < kSmallestAbsmax) return kZeroUnit;
  return {absmax.value() / divisor, divisor / absmax.value(), false};
}

/// Nearest integer, ties to even, for |x| ≤ 2^22; vectorises on every ISA.
inline float round_even(float x) { return (x + 0x1.8p23f) - 0x1.8p23f; }

/// x in units of the scale → int8. NaN → 0.
inline std::int8_t int8_code(float steps, float divisor) {
  const float lowest = divisor == 127.0f ? -127.0f : -128.0f;
  if (!(steps == steps)) return 0;
  return static_cast<std::int8_t>(round_even(std::clamp(steps, lowest, 127.0f)));
}
inline std::int8_t int8_code(float x, const UnitScale& unit, float divisor) {
  if (unit.all_zero) return 0;
  return int8_code(divisor == 127.0f ? x * unit.multiplier : x / unit.scale, divisor);
}
inline std::uint8_t e4m3_code(float x, const UnitScale& unit) {
  return unit.all_zero ? std::uint8_t{0} : numeric::f32_to_e4m3(x / unit.scale);
}

inline float dequantise_int8(std::int8_t code, float scale) { return static_cast<float>(code) * scale; }
inline float dequantise_e4m3(std::uint8_t code, float scale) { return numeric::e4m3_to_f32(code) * scale; }

/// How rows of activations are quantised: what InputSpec (first GEMM) or QuantSpec::a2 (second) says.
struct RowScheme {
  DType type = DType::i8;   ///< i8 or e4m3
  std::int64_t group = -1;  ///< elements that share a scale; -1 = the whole row
  float int8_divisor = 127.0f;
  float static_scale = 0.0f;  ///< > 0: given; every scale that is written is this one

  std::int64_t num_groups(std::int64_t n) const { return group < 0 ? 1 : (n + group - 1) / group; }
};

/// A row of n elements of a float type, each multiplied in f32 by `factor` (the router weight that goes onto the
/// input) before anything else happens to it.
struct RowSource {
  const void* data = nullptr;
  DType type = DType::f32;
  std::int64_t n = 0;
  float factor = 1.0f;
  std::int64_t stride = 1;  ///< elements
};

/// Writes n codes and scheme.num_groups(n) scales. Does not allocate.
void quantise_row(const RowSource& row, const RowScheme& scheme, void* codes, float* scales);

/// Scales of a matrix [rows, cols]: [scale_rows, scale_cols] = how many blocks there are, partial ones included.
inline std::int64_t scale_extent(std::int64_t extent, std::int64_t block) {
  return block < 0 ? (extent > 0 ? 1 : 0) : (extent + block - 1) / block;
}
/// Index along one axis of the scale that element i belongs to.
inline std::int64_t scale_index(std::int64_t i, std::int64_t block) { return block < 0 ? 0 : i / block; }

/// A matrix [rows, cols] of floats (any strides) quantised as a weight: int8 per row (absmax / 127) or e4m3 blocks
/// (absmax / 448). `codes` [rows, cols] and `scales` f32 [scale rows, scale cols] are dense and the caller's.
/// An all-zero block has scale 1.
Status quantise_weights(const Tensor& matrix, const QuantDesc& desc, const Tensor& codes, const Tensor& scales);

}  // namespace moekit::quant
