// Eight f32 lanes for the routing kernels, in GCC's vector extensions with the few instructions that those lack.
// Everything here has internal linkage: each including translation unit has its own copy, compiled with its own flags.
#pragma once
#include <cstdint>
#include <type_traits>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "route/cpu_units.hpp"

namespace moekit::route {
namespace {

#define MOEKIT_INLINE inline __attribute__((always_inline))

constexpr std::int64_t kLanes = 8;
typedef float F8 __attribute__((vector_size(32)));
typedef std::int32_t I8 __attribute__((vector_size(32)));
typedef std::uint32_t U8 __attribute__((vector_size(32)));
typedef std::uint16_t H8 __attribute__((vector_size(16)));

constexpr float kMinusInfinity = -__builtin_inff();

MOEKIT_INLINE F8 splat(float x) { return F8{x, x, x, x, x, x, x, x}; }
MOEKIT_INLINE I8 splat(std::int32_t x) { return I8{x, x, x, x, x, x, x, x}; }
template <class V, class T>
MOEKIT_INLINE V load(const T* from) {
  V out;
  __builtin_memcpy(&out, from, sizeof out);
  return out;
}
template <class V, class T>
MOEKIT_INLINE void store(T* to, V value) {
  __builtin_memcpy(to, &value, sizeof value);
}

MOEKIT_INLINE F8 fma(F8 a, F8 b, F8 c) {
#if defined(__FMA__)
  return (F8)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}
MOEKIT_INLINE F8 sqrt(F8 x) {
#if defined(__AVX__)
  return (F8)_mm256_sqrt_ps((__m256)x);
#else
  for (int i = 0; i < kLanes; ++i) x[i] = __builtin_sqrtf(x[i]);
  return x;
#endif
}
template <class V>
MOEKIT_INLINE V larger(V a, V b) {
  return a > b ? a : b;
}
template <class V>
MOEKIT_INLINE V smaller(V a, V b) {
  return a > b ? b : a;
}
/// Bit i = lane i of a comparison's result.
MOEKIT_INLINE unsigned mask_bits(I8 mask) {
#if defined(__AVX__)
  return static_cast<unsigned>(_mm256_movemask_ps((__m256)mask));
#else
  unsigned out = 0;
  for (int i = 0; i < kLanes; ++i) out |= static_cast<unsigned>(mask[i] & 1) << i;
  return out;
#endif
}

/// Lane i ^ 4, i ^ 2, i ^ 1 in lane i.
template <class V>
MOEKIT_INLINE V swap4(V v) {
  return __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3);
}
template <class V>
MOEKIT_INLINE V swap2(V v) {
  return __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5);
}
template <class V>
MOEKIT_INLINE V swap1(V v) {
  return __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6);
}
/// The largest lane, in every lane.
template <class V>
MOEKIT_INLINE V largest(V v) {
  v = larger(v, swap4(v));
  v = larger(v, swap2(v));
  return larger(v, swap1(v));
}
/// ((0+4)+(2+6)) + ((1+5)+(3+7)): the one order in which lanes are ever summed.
MOEKIT_INLINE float sum(F8 v) {
  v = v + swap4(v);
  v = v + swap2(v);
  return v[0] + v[1];
}

MOEKIT_INLINE U8 widen_u16(H8 x) {
#if defined(__AVX2__)
  return (U8)_mm256_cvtepu16_epi32((__m128i)x);  // GCC makes seven instructions of the conversion below
#else
  return __builtin_convertvector(x, U8);
#endif
}
MOEKIT_INLINE F8 widen_bf16(H8 x) { return (F8)(widen_u16(x) << 16); }
MOEKIT_INLINE F8 widen_f16(H8 x) {
#if defined(__F16C__)
  return (F8)_mm256_cvtph_ps((__m128i)x);
#else
  const U8 code = widen_u16(x);
  const U8 magnitude = code & 0x7fffu, sign = (code & 0x8000u) << 16;
  const F8 scaled = (F8)(magnitude << 13) * 0x1p112f;  // exponent bias 15 → 127, subnormals too
  const U8 finite = (U8)scaled, infinite = 0x7f800000u | ((magnitude & 0x3ffu) << 13);
  return (F8)(sign | ((U8)(magnitude >= 0x7c00u) != 0 ? infinite : finite));
#endif
}
/// Elements i … i+7 as f32.
template <FloatType type>
MOEKIT_INLINE F8 load_f32(const void* from, std::int64_t i) {
  if constexpr (type == FloatType::f32) return load<F8>(static_cast<const float*>(from) + i);
  const H8 half = load<H8>(static_cast<const std::uint16_t*>(from) + i);
  return type == FloatType::bf16 ? widen_bf16(half) : widen_f16(half);
}
/// Elements i … i+count-1, count < 8, as f32, the other lanes 0; reads nothing beyond.
template <FloatType type>
MOEKIT_INLINE F8 load_tail(const void* from, std::int64_t i, std::int64_t count) {
  using Element = std::conditional_t<type == FloatType::f32, float, std::uint16_t>;
  alignas(32) Element padded[kLanes] = {};
  const Element* source = static_cast<const Element*>(from) + i;
  for (std::int64_t lane = 0; lane < count; ++lane) padded[lane] = source[lane];
  return load_f32<type>(padded, 0);
}

/// e^x for x ≤ 0: relative error below 2.5 · 2^-24; x below ln 2^-126 gives 0.
/// x = n ln2 + r, |r| ≤ 0.347; Taylor to r^7 (truncation 5.2e-9); ln2 in two parts, the first of 9 bits, so n·hi is
/// exact.
MOEKIT_INLINE F8 exp_negative(F8 x) {
  constexpr float kLog2E = 1.44269504f, kLn2Hi = 0.693359375f, kLn2Lo = -2.12194440e-4f, kRound = 0x1.8p23f;
  const F8 shifted = fma(x, splat(kLog2E), splat(kRound));
  const F8 n = shifted - kRound;
  const F8 r = fma(n, splat(-kLn2Lo), fma(n, splat(-kLn2Hi), x));
  F8 p = splat(1.0f / 5040);
  p = fma(p, r, splat(1.0f / 720));
  p = fma(p, r, splat(1.0f / 120));
  p = fma(p, r, splat(1.0f / 24));
  p = fma(p, r, splat(1.0f / 6));
  p = fma(p, r, splat(0.5f));
  p = fma(p, r, splat(1.0f));
  p = fma(p, r, splat(1.0f));
  const U8 scale = ((U8)shifted << 23) + (127u << 23);  // low bits of `shifted` hold n
  return x >= -87.33654f ? p * (F8)scale : splat(0.0f);
}
/// log(1 + e) for e in [0, 1]: 2 atanh(t), t = e / (2 + e) ≤ 1/3; series to t^17 (truncation 2e-10 of the result).
MOEKIT_INLINE F8 log1p_unit(F8 e) {
  const F8 t = e / (e + 2.0f), t2 = t * t;
  F8 p = splat(1.0f / 17);
  p = fma(p, t2, splat(1.0f / 15));
  p = fma(p, t2, splat(1.0f / 13));
  p = fma(p, t2, splat(1.0f / 11));
  p = fma(p, t2, splat(1.0f / 9));
  p = fma(p, t2, splat(1.0f / 7));
  p = fma(p, t2, splat(1.0f / 5));
  p = fma(p, t2, splat(1.0f / 3));
  p = fma(p, t2, splat(1.0f));
  return 2.0f * t * p;
}
MOEKIT_INLINE F8 magnitude(F8 x) { return (F8)((I8)x & 0x7fffffff); }

MOEKIT_INLINE F8 sigmoid(F8 z) {
  const F8 e = exp_negative(-magnitude(z));
  return (z >= 0.0f ? splat(1.0f) : e) / (1.0f + e);  // 0 where e is: no score lies below 2^-126
}
MOEKIT_INLINE F8 sqrt_softplus(F8 z) {
  const F8 root = exp_negative(-0.5f * magnitude(z));  // e^(-|z|/2)
  const F8 s = sqrt(larger(z, splat(0.0f)) + log1p_unit(root * root));
  return z < -16.0f ? root : s;  // log(1+e) = e(1 - e/2 …): the square root is e^(z/2) to 2^-25
}

}  // namespace
}  // namespace moekit::route
