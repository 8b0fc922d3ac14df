// Vectors of 4 by the compiler's own means: SSE2 or NEON. Product and sum round apart (no FMA is assumed).
#include "cpu/simd/portable.hpp"
#include "experts/cpu/unit_e4m3.hpp"
#include "experts/cpu/unit_gemm.hpp"
#include "experts/cpu/unit_rows.hpp"

namespace moekit::cpu {
namespace {

using V = simd::Portable;
struct Shape {
  static constexpr int kRows = 3, kStreamRows = 1, kStreams = 1;
  static constexpr int vectors(int rows) { return rows == 1 ? 8 : 4; }
};

void pack_i8(const int8_t* src, int64_t n, void* dst) {
  auto* out = static_cast<int8_t*>(dst);
  for (int64_t i = 0; i < (n + 3) / 4 * 4; ++i) out[i] = i < n ? src[i] : int8_t{0};
}

template <int MR>
void tile_i8(const BlockArgs& g, int64_t row) {
  typedef V::I I;
  typedef V::U U;
  constexpr int kVectors = 2;
  for (int j0 = 0; j0 < kC / V::width; j0 += kVectors) {
    int32_t* c = reinterpret_cast<int32_t*>(g.c) + row * kC + j0 * V::width;
    I sum[MR][kVectors];
    for (int r = 0; r < MR; ++r)
      for (int j = 0; j < kVectors; ++j) sum[r][j] = g.first ? I{} : V::load_i32(c + r * kC + j * V::width);
    const auto* b = reinterpret_cast<const int32_t*>(g.b) + j0 * V::width;
    for (int64_t k = 0; k < g.k; k += 4, b += kC)
      for (int j = 0; j < kVectors; ++j) {
        const U four = (U)V::load_i32(b + j * V::width);
#pragma GCC unroll 4
        for (int p = 0; p < 4; ++p) {
          const I w = (I)(four << (24 - 8 * p)) >> 24;
          for (int r = 0; r < MR; ++r)
            sum[r][j] = sum[r][j] + w * V::iset1(reinterpret_cast<const int8_t*>(g.a + (row + r) * g.lda)[k + p]);
        }
      }
    for (int r = 0; r < MR; ++r)
      for (int j = 0; j < kVectors; ++j) *reinterpret_cast<V::ILoose*>(c + r * kC + j * V::width) = sum[r][j];
  }
}
void gemm_i8(const BlockArgs& g) {
  over_rows<Shape>(g, [&](auto rows, int64_t row) { tile_i8<rows.value>(g, row); });
}

constexpr Unit make() {
  Unit unit{};
  unit.name = "portable";
  unit.i8_a_bytes = 1;
  fill_gemm<V, Shape>(unit);
  fill_e4m3<V, Shape>(unit);
  unit.gemm[static_cast<int>(Gemm::i8)] = gemm_i8;
  unit.pack_i8 = pack_i8;
  fill_rows<V>(unit);
  return unit;
}

}  // namespace

constexpr Unit kPortableUnit = make();

}  // namespace moekit::cpu
