// AVX2, FMA, F16C. 16 registers: f32 tiles of 6 rows × 2 vectors of 8 columns, or up to 2 rows × 4; i32 tiles of 3 × 4.
#include "cpu/simd/avx2.hpp"
#include "experts/cpu/unit_e4m3.hpp"
#include "experts/cpu/unit_gemm.hpp"
#include "experts/cpu/unit_rows.hpp"

namespace moekit::cpu {
namespace {

using V = simd::Avx2;
struct Shape {
  static constexpr int kRows = 6, kStreamRows = 2, kStreams = 3;
  static constexpr int vectors(int rows) { return rows <= 2 ? 4 : 2; }
};
struct ShapeI8 {
  static constexpr int kRows = 3;
};
constexpr int kVectors = 4;  // of an i32 tile

/// Activations of four k as i16: 0 2 1 3, so that a broadcast dword meets the even or the odd bytes of the weights.
void pack_i8(const int8_t* src, int64_t n, void* dst) {
  auto* out = static_cast<int16_t*>(dst);
  for (int64_t i = 0; i < n; i += 4) {
    auto at = [&](int64_t k) { return k < n ? src[k] : int8_t{0}; };
    out[i] = at(i);
    out[i + 1] = at(i + 2);
    out[i + 2] = at(i + 1);
    out[i + 3] = at(i + 3);
  }
}

/// Bytes are sign-extended to i16 in registers; pairs of i16 products in i32 are exact for every operand.
template <int MR>
void tile_i8(const BlockArgs& g, int64_t row) {
  float* c = g.c + row * kC;
  __m256i sum[MR][kVectors];
#pragma GCC unroll 16
  for (int r = 0; r < MR; ++r)
#pragma GCC unroll 16
    for (int j = 0; j < kVectors; ++j)
      sum[r][j] = g.first ? _mm256_setzero_si256()
                          : _mm256_loadu_si256(reinterpret_cast<const __m256i*>(c + r * kC + j * V::width));
  const char* b = g.b;
  const int* a[MR];
#pragma GCC unroll 16
  for (int r = 0; r < MR; ++r) a[r] = reinterpret_cast<const int*>(g.a + (row + r) * g.lda);
  Prefetch ahead = share_of_next(g, row, MR, 0, 1, g.k);
  for (int64_t at = 0; at < g.k / 2; at += 2, b += 4 * kC) {
    if (at % (prefetch_step(MR) / 2) == 0) ahead.step();
#pragma GCC unroll 16
    for (int j = 0; j < kVectors; ++j) {
      const __m256i four = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b) + j);
      const __m256i odd = _mm256_srai_epi16(four, 8), even = _mm256_srai_epi16(_mm256_slli_epi16(four, 8), 8);
#pragma GCC unroll 16
      for (int r = 0; r < MR; ++r) {
        sum[r][j] = _mm256_add_epi32(sum[r][j], _mm256_madd_epi16(even, _mm256_set1_epi32(a[r][at])));
        sum[r][j] = _mm256_add_epi32(sum[r][j], _mm256_madd_epi16(odd, _mm256_set1_epi32(a[r][at + 1])));
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < MR; ++r)
#pragma GCC unroll 16
    for (int j = 0; j < kVectors; ++j)
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(c + r * kC + j * V::width), sum[r][j]);
}
/// One row times S panels.
template <int S>
void stream_i8(const BlockArgs& g) {
  __m256i sum[S][kVectors];
#pragma GCC unroll 4
  for (int s = 0; s < S; ++s)
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) sum[s][j] = _mm256_setzero_si256();
  const char* b = g.b;
  const int* a = reinterpret_cast<const int*>(g.a);
  for (int64_t at = 0; at < g.k / 2; at += 2, b += 4 * kC) {
    const __m256i x_even = _mm256_set1_epi32(a[at]), x_odd = _mm256_set1_epi32(a[at + 1]);
#pragma GCC unroll 4
    for (int s = 0; s < S; ++s) {
      const char* panel = b + s * g.panel_stride;
      __builtin_prefetch(panel + g.ahead, 0, 3);
      __builtin_prefetch(panel + g.ahead + 64, 0, 3);
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) {
        const __m256i four = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(panel) + j);
        const __m256i odd = _mm256_srai_epi16(four, 8), even = _mm256_srai_epi16(_mm256_slli_epi16(four, 8), 8);
        sum[s][j] = _mm256_add_epi32(sum[s][j],
                                     _mm256_add_epi32(_mm256_madd_epi16(even, x_even), _mm256_madd_epi16(odd, x_odd)));
      }
    }
  }
#pragma GCC unroll 4
  for (int s = 0; s < S; ++s)
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j)
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(g.c + s * kC + j * V::width), sum[s][j]);
}
void gemm_i8(const BlockArgs& g) {
  if (g.panels == 3) return stream_i8<3>(g);
  if (g.panels == 2) return stream_i8<2>(g);
  over_rows<ShapeI8>(g, [&](auto rows, int64_t row) { tile_i8<rows.value>(g, row); });
}

constexpr Unit make() {
  Unit unit{};
  unit.name = "avx2";
  unit.i8_a_bytes = 2;
  fill_gemm<V, Shape>(unit);
  fill_e4m3<V, Shape>(unit);
  unit.gemm[static_cast<int>(Gemm::i8)] = gemm_i8;
  unit.pack_i8 = pack_i8;
  fill_rows<V>(unit);
  return unit;
}

}  // namespace

constexpr Unit kAvx2Unit = make();

}  // namespace moekit::cpu
