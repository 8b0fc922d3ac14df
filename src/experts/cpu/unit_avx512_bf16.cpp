// AVX-512 with BF16: as avx512, and bf16 × bf16 by the dot instruction on the same pack. The instruction adds the two
// products of a pair unfused and flushes subnormals, so its bits differ from the widened form's; they still depend on
// nothing but the row.
#include "cpu/simd/avx512.hpp"
#include "experts/cpu/unit_avx512_i8.hpp"
#include "experts/cpu/unit_e4m3.hpp"
#include "experts/cpu/unit_gemm.hpp"
#include "experts/cpu/unit_rows.hpp"

namespace moekit::cpu {
namespace {

template <int MR>
void tile_dot(const BlockArgs& g, int64_t row) {
  float* c = g.c + row * kC;
  __m512 sum[MR][2];
#pragma GCC unroll 16
  for (int r = 0; r < MR; ++r)
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) sum[r][j] = g.first ? _mm512_setzero_ps() : _mm512_loadu_ps(c + r * kC + j * 16);
  const char* b = g.b;
  const char* a = g.a + row * g.lda;
  Prefetch ahead = share_of_next(g, row, MR, 0, 1, g.k);
  for (int64_t k = 0; k < g.k; k += 2, b += 4 * kC, a += 4) {
    if (k % prefetch_step(MR) == 0) ahead.step();
    const auto low = (__m512bh)_mm512_loadu_si512(b), high = (__m512bh)_mm512_loadu_si512(b + 64);
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r) {
      const auto x = (__m512bh)_mm512_set1_epi32(*reinterpret_cast<const int*>(a + r * g.lda));
      sum[r][0] = _mm512_dpbf16_ps(sum[r][0], x, low);
      sum[r][1] = _mm512_dpbf16_ps(sum[r][1], x, high);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < MR; ++r)
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) _mm512_storeu_ps(c + r * kC + j * 16, sum[r][j]);
}
template <int S>
void stream_dot(const BlockArgs& g) {
  __m512 sum[S][2];
#pragma GCC unroll 4
  for (int s = 0; s < S; ++s) sum[s][0] = sum[s][1] = _mm512_setzero_ps();
  const char* b = g.b;
  for (int64_t k = 0; k < g.k; k += 2, b += 4 * kC) {
    const auto x = (__m512bh)_mm512_set1_epi32(*reinterpret_cast<const int*>(g.a + 2 * k));
#pragma GCC unroll 4
    for (int s = 0; s < S; ++s) {
      const char* panel = b + s * g.panel_stride;
      __builtin_prefetch(panel + g.ahead, 0, 3);
      __builtin_prefetch(panel + g.ahead + 64, 0, 3);
      sum[s][0] = _mm512_dpbf16_ps(sum[s][0], x, (__m512bh)_mm512_loadu_si512(panel));
      sum[s][1] = _mm512_dpbf16_ps(sum[s][1], x, (__m512bh)_mm512_loadu_si512(panel + 64));
    }
  }
#pragma GCC unroll 4
  for (int s = 0; s < S; ++s) {
    _mm512_storeu_ps(g.c + s * kC, sum[s][0]);
    _mm512_storeu_ps(g.c + s * kC + 16, sum[s][1]);
  }
}
void gemm_dot(const BlockArgs& g) {
  if (g.panels == 4) return stream_dot<4>(g);
  if (g.panels == 3) return stream_dot<3>(g);
  if (g.panels == 2) return stream_dot<2>(g);
  over_rows<ShapeAvx512>(g, [&](auto rows, int64_t row) { tile_dot<rows.value>(g, row); });
}

constexpr Unit make() {
  Unit unit{};
  unit.name = "avx512_bf16";
  unit.has_bf16_dot = true;
  fill_gemm<simd::Avx512, ShapeAvx512>(unit);
  fill_e4m3<simd::Avx512, ShapeAvx512>(unit);
  fill_i8_vnni(unit);
  unit.gemm[static_cast<int>(Gemm::bf16_dot)] = gemm_dot;
  fill_rows<simd::Avx512>(unit);
  return unit;
}

}  // namespace

constexpr Unit kAvx512Bf16Unit = make();

}  // namespace moekit::cpu
