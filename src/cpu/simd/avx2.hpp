// 8 lanes: AVX2, FMA, F16C. Only for files compiled with -mavx2 -mfma -mf16c.
#pragma once
#include <immintrin.h>

#include "cpu/simd/vector.hpp"

namespace moekit::cpu::simd {
namespace {

struct Avx2 : Lanes<8> {
  static F fma(F a, F b, F c) { return (F)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
  static F load_f16(const uint16_t* p) {
    return (F)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static __m128i f16_codes(F v) { return _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT); }
  static void store_f16(uint16_t* p, F v) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), f16_codes(v)); }
  static F round_f16(F v) { return (F)_mm256_cvtph_ps(f16_codes(v)); }
  static I load_i8(const int8_t* p) {
    return (I)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  }
  /// Eight e4m3 codes as value / 256, by way of f16: sign-extended and shifted into place; all but NaN.
  static F load_e4m3(const uint8_t* p) {
    const __m128i wide = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    return (F)_mm256_cvtph_ps(_mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16(static_cast<short>(0xbf80))));
  }
};

}  // namespace
}  // namespace moekit::cpu::simd
