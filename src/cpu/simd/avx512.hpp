// 16 lanes: AVX-512 F BW VL DQ. Only for files compiled with those flags.
#pragma once
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"  // false alarms of gcc 12's own header
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop

#include "cpu/simd/vector.hpp"

namespace moekit::cpu::simd {
namespace {

struct Avx512 : Lanes<16> {
  static F fma(F a, F b, F c) { return (F)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
  static F load_f16(const uint16_t* p) {
    return (F)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static __m256i f16_codes(F v) { return _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT); }
  static void store_f16(uint16_t* p, F v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), f16_codes(v)); }
  static F round_f16(F v) { return (F)_mm512_cvtph_ps(f16_codes(v)); }
  /// Sixteen e4m3 codes as value / 256, by way of f16; all but NaN.
  static F load_e4m3(const uint8_t* p) {
    const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return (F)_mm512_cvtph_ps(
        _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(static_cast<short>(0xbf80))));
  }

  /// 32 e4m3 codes each of two k, decoded in place by way of f16: use(k, j, w) with w = the codes 2 i + j as
  /// load_e4m3 gives them.
  static constexpr int codes_k = 2;
  static constexpr float codes_lift = 1, codes_drop = 1;
  template <class Use>
  static void each_e4m3(const uint8_t* p, const Use& use) {
    const __m512i keep = _mm512_set1_epi16(static_cast<short>(0xbf80));
    const __m512i codes = _mm512_loadu_si512(p);
    const __m512i even = _mm512_and_si512(_mm512_srai_epi16(_mm512_slli_epi16(codes, 8), 1), keep);
    const __m512i odd = _mm512_and_si512(_mm512_srai_epi16(codes, 1), keep);
    use(0, 0, (F)_mm512_cvtph_ps(_mm512_castsi512_si256(even)));
    use(0, 1, (F)_mm512_cvtph_ps(_mm512_castsi512_si256(odd)));
    use(1, 0, (F)_mm512_cvtph_ps(_mm512_extracti64x4_epi64(even, 1)));
    use(1, 1, (F)_mm512_cvtph_ps(_mm512_extracti64x4_epi64(odd, 1)));
  }
};

}  // namespace
}  // namespace moekit::cpu::simd
