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
  /// Eight e4m3 codes as value / 256, by way of f16: sign-extended and shifted into place; all but NaN.
  static F load_e4m3(const uint8_t* p) {
    const __m128i wide = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    return (F)_mm256_cvtph_ps(_mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16(static_cast<short>(0xbf80))));
  }

  /// 32 e4m3 codes of one k, decoded in place, without the shuffles of a sign extension: use(k, j, w) with w = the
  /// codes 4 i + j. By integer operations alone: w is value · 2^-120, subnormal for codes below 2^-6. Sums of
  /// activations times codes_lift, times codes_drop, are those of load_e4m3, bit for bit.
  static constexpr int codes_k = 1;
  static constexpr float codes_lift = 0x1p104f, codes_drop = 0x1p8f;
  template <class Use>
  static void each_e4m3(const uint8_t* p, const Use& use) {
    const __m256i keep = _mm256_set1_epi32(static_cast<int>(0x87f00000));
    const __m256i four = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    const __m256i even = _mm256_srai_epi16(_mm256_slli_epi32(four, 8), 4);
    use(0, 2, (F)_mm256_and_si256(even, keep));
    use(0, 0, (F)_mm256_and_si256(_mm256_slli_epi32(even, 16), keep));
    const __m256i odd = _mm256_srai_epi16(four, 4);
    use(0, 3, (F)_mm256_and_si256(odd, keep));
    use(0, 1, (F)_mm256_and_si256(_mm256_slli_epi32(odd, 16), keep));
  }
};

}  // namespace
}  // namespace moekit::cpu::simd
