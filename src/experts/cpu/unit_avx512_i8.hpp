// Integer tiles of the AVX-512 units: u8 × s8 by VNNI. Internal to the unit that includes it.
#pragma once
#include "cpu/simd/avx512.hpp"
#include "experts/cpu/unit_gemm.hpp"

namespace moekit::cpu {
namespace {

struct ShapeAvx512 {
  static constexpr int kRows = 12, kStreamRows = 6, kStreams = 4;
  static constexpr int vectors(int) { return 2; }
};

/// The instruction wants unsigned activations: a + 128; settle() takes 128 times the column sums off again.
inline void pack_offset_i8(const int8_t* src, int64_t n, void* dst) {
  auto* out = static_cast<uint8_t*>(dst);
  for (int64_t i = 0; i < (n + 3) / 4 * 4; ++i) out[i] = static_cast<uint8_t>((i < n ? src[i] : 0) ^ 0x80);
}

template <int MR>
void tile_vnni(const BlockArgs& g, int64_t row) {
  float* c = g.c + row * kC;
  __m512i sum[MR][2];
#pragma GCC unroll 16
  for (int r = 0; r < MR; ++r)
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) sum[r][j] = g.first ? _mm512_setzero_si512() : _mm512_loadu_si512(c + r * kC + j * 16);
  const char* b = g.b;
  const char* a = g.a + row * g.lda;
  Prefetch ahead = share_of_next(g, row, MR, 0, 1, g.k);
  for (int64_t k = 0; k < g.k; k += 4, b += 4 * kC, a += 4) {
    if (k % prefetch_step(MR) == 0) ahead.step();
    const __m512i low = _mm512_loadu_si512(b), high = _mm512_loadu_si512(b + 64);
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r) {
      const __m512i x = _mm512_set1_epi32(*reinterpret_cast<const int*>(a + r * g.lda));
      sum[r][0] = _mm512_dpbusd_epi32(sum[r][0], x, low);
      sum[r][1] = _mm512_dpbusd_epi32(sum[r][1], x, high);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < MR; ++r)
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) _mm512_storeu_si512(c + r * kC + j * 16, sum[r][j]);
}
template <int S>
void stream_vnni(const BlockArgs& g) {
  __m512i sum[S][2];
#pragma GCC unroll 4
  for (int s = 0; s < S; ++s) sum[s][0] = sum[s][1] = _mm512_setzero_si512();
  const char* b = g.b;
  for (int64_t k = 0; k < g.k; k += 4, b += 4 * kC) {
    const __m512i x = _mm512_set1_epi32(*reinterpret_cast<const int*>(g.a + k));
#pragma GCC unroll 4
    for (int s = 0; s < S; ++s) {
      const char* panel = b + s * g.panel_stride;
      __builtin_prefetch(panel + g.ahead, 0, 3);
      __builtin_prefetch(panel + g.ahead + 64, 0, 3);
      sum[s][0] = _mm512_dpbusd_epi32(sum[s][0], x, _mm512_loadu_si512(panel));
      sum[s][1] = _mm512_dpbusd_epi32(sum[s][1], x, _mm512_loadu_si512(panel + 64));
    }
  }
#pragma GCC unroll 4
  for (int s = 0; s < S; ++s) {
    _mm512_storeu_si512(g.c + s * kC, sum[s][0]);
    _mm512_storeu_si512(g.c + s * kC + 16, sum[s][1]);
  }
}
inline void gemm_vnni(const BlockArgs& g) {
  if (g.panels == 4) return stream_vnni<4>(g);
  if (g.panels == 3) return stream_vnni<3>(g);
  if (g.panels == 2) return stream_vnni<2>(g);
  over_rows<ShapeAvx512>(g, [&](auto rows, int64_t row) { tile_vnni<rows.value>(g, row); });
}

constexpr void fill_i8_vnni(Unit& unit) {
  unit.i8_a_bytes = 1;
  unit.i8_offset = true;
  unit.gemm[static_cast<int>(Gemm::i8)] = gemm_vnni;
  unit.pack_i8 = pack_offset_i8;
}

}  // namespace
}  // namespace moekit::cpu
