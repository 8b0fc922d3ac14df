// Narrow number formats, one definition for everybody: scalar conversions, round to nearest even.
// bf16, f16: IEEE-like with infinities. e4m3: the "fn" form, bias 7, no infinity, 0x7F and 0xFF are NaN, largest 448.
#pragma once
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include <moekit/tensor.hpp>

namespace moekit::numeric {

inline float bf16_to_f32(std::uint16_t code) { return std::bit_cast<float>(static_cast<std::uint32_t>(code) << 16); }

inline std::uint16_t f32_to_bf16(float value) {
  const std::uint32_t code = std::bit_cast<std::uint32_t>(value);
  if ((code & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>((code >> 16) | 0x40u);  // NaN stays NaN
  return static_cast<std::uint16_t>((code + 0x7fffu + ((code >> 16) & 1u)) >> 16);
}

inline float f16_to_f32(std::uint16_t code) {
  const std::uint32_t sign = static_cast<std::uint32_t>(code & 0x8000u) << 16;
  const std::uint32_t magnitude = code & 0x7fffu;
  if (magnitude >= 0x7c00u) return std::bit_cast<float>(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
  // exponent bias 15 → 127 by a multiplication, which also normalises subnormals exactly
  const float scaled = std::bit_cast<float>(magnitude << 13) * 0x1p112f;
  return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(scaled));
}

inline std::uint16_t f32_to_f16(float value) {
  const std::uint32_t code = std::bit_cast<std::uint32_t>(value);
  const std::uint16_t sign = static_cast<std::uint16_t>((code >> 16) & 0x8000u);
  const std::uint32_t magnitude = code & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return sign | 0x7e00u;
  if (magnitude >= 0x477ff000u) return sign | 0x7c00u;  // 65520 and above round to infinity
  if (magnitude < 0x38800000u) {                        // below 2^-14: a multiple of 2^-24
    const float steps = std::nearbyintf(std::bit_cast<float>(magnitude) * 0x1p24f);
    return static_cast<std::uint16_t>(sign | static_cast<std::uint16_t>(steps));
  }
  const std::uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return static_cast<std::uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

inline float e4m3_to_f32(std::uint8_t code) {
  const std::uint32_t sign = static_cast<std::uint32_t>(code & 0x80u) << 24;
  const std::uint32_t magnitude = code & 0x7fu;
  if (magnitude == 0x7fu) return std::bit_cast<float>(sign | 0x7fc00000u);
  const float scaled = std::bit_cast<float>(magnitude << 20) * 0x1p120f;
  return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(scaled));
}

/// Saturates at ±448; NaN stays NaN.
inline std::uint8_t f32_to_e4m3(float value) {
  const std::uint32_t code = std::bit_cast<std::uint32_t>(value);
  const std::uint8_t sign = static_cast<std::uint8_t>((code >> 24) & 0x80u);
  const std::uint32_t magnitude = code & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return sign | 0x7fu;
  if (magnitude >= 0x43e00000u) return sign | 0x7eu;  // 448 and above
  if (magnitude < 0x3c800000u) {                      // below 2^-6: a multiple of 2^-9
    const float steps = std::nearbyintf(std::bit_cast<float>(magnitude) * 0x1p9f);
    return static_cast<std::uint8_t>(sign | static_cast<std::uint8_t>(steps));
  }
  const std::uint32_t rounded = magnitude + 0x7ffffu + ((magnitude >> 20) & 1u);
  return static_cast<std::uint8_t>(sign | ((rounded - 0x3c000000u) >> 20));
}

inline float e5m2_to_f32(std::uint8_t code) { return f16_to_f32(static_cast<std::uint16_t>(code << 8)); }
inline float e8m0_to_f32(std::uint8_t code) {
  return code == 0xff ? std::bit_cast<float>(0x7fc00000u) : std::ldexp(1.0f, static_cast<int>(code) - 127);
}

/// One element of float, fp8 or 8-bit integer type; f64 is narrowed.
inline float load_f32(const void* data, DType type, std::int64_t i) {
  switch (type) {
    case DType::f32: return static_cast<const float*>(data)[i];
    case DType::bf16: return bf16_to_f32(static_cast<const std::uint16_t*>(data)[i]);
    case DType::f16: return f16_to_f32(static_cast<const std::uint16_t*>(data)[i]);
    case DType::e4m3: return e4m3_to_f32(static_cast<const std::uint8_t*>(data)[i]);
    case DType::e5m2: return e5m2_to_f32(static_cast<const std::uint8_t*>(data)[i]);
    case DType::i8: return static_cast<const std::int8_t*>(data)[i];
    case DType::f64: return static_cast<float>(static_cast<const double*>(data)[i]);
    default: return std::bit_cast<float>(0x7fc00000u);
  }
}
inline void store_f32(void* data, DType type, std::int64_t i, float value) {
  switch (type) {
    case DType::f32: static_cast<float*>(data)[i] = value; break;
    case DType::bf16: static_cast<std::uint16_t*>(data)[i] = f32_to_bf16(value); break;
    case DType::f16: static_cast<std::uint16_t*>(data)[i] = f32_to_f16(value); break;
    case DType::e4m3: static_cast<std::uint8_t*>(data)[i] = f32_to_e4m3(value); break;
    case DType::f64: static_cast<double*>(data)[i] = value; break;
    default: break;
  }
}
/// value rounded to a float type and back.
inline float round_to(DType type, float value) {
  switch (type) {
    case DType::bf16: return bf16_to_f32(f32_to_bf16(value));
    case DType::f16: return f16_to_f32(f32_to_f16(value));
    default: return value;
  }
}

}  // namespace moekit::numeric
