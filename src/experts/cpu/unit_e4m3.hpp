// e4m3 weights in groups of 128 k: each group is summed from zero and then added times its scale. Internal to the unit
// that includes it (see unit.hpp).
#pragma once
#include "experts/cpu/unit_gemm.hpp"

namespace moekit::cpu {
namespace {

template <class V>
struct WeightE4m3 {
  static constexpr int kp = 1, kBytes = kC;
  static typename V::F value(const char* b, int j, int) {
    return V::load_e4m3(reinterpret_cast<const uint8_t*>(b) + j * V::width);
  }
};

/// The same by integer operations alone: value · 2^-120, subnormal for codes below 2^-6. Half the work where the
/// processor multiplies subnormals at full speed; the caller brings the missing 2^112.
template <class V>
struct WeightE4m3Shifted {
  static constexpr int kp = 1, kBytes = kC;
  static typename V::F value(const char* b, int j, int) {
    const typename V::U wide = (typename V::U)V::load_i8(reinterpret_cast<const int8_t*>(b) + j * V::width);
    return (typename V::F)((wide << 20) & 0x87f00000u);
  }
};
/// One group after the other, each summed from zero.
template <class V, class W, int MR, int NV>
void multiply_groups(const BlockArgs& g, int64_t row) {
  const float* a = reinterpret_cast<const float*>(g.a + row * g.lda);
  if (g.first)
    for (int64_t i = row * kC; i < (row + MR) * kC; ++i) g.c[i] = 0;
  for (int64_t group = 0, k0 = 0; k0 < g.k; ++group, k0 += kScaleGroup) {
    float scale[MR][2];
    for (int r = 0; r < MR; ++r) {
      const float s = g.a_scale ? g.a_scale[(row + r) * g.a_scale_stride + group] : kE4m3Shift;
      scale[r][0] = s * g.b_scale[2 * group];
      scale[r][1] = s * g.b_scale[2 * group + 1];
    }
    const int64_t k = g.k - k0 < kScaleGroup ? g.k - k0 : kScaleGroup;
#pragma GCC unroll 1
    for (int j0 = 0; j0 < kC / V::width; j0 += NV) {
      Tile<V, MR, NV> tile;
      tile.zero();
      Prefetch ahead = share_of_next(g, row, MR, j0 / NV, kC / V::width / NV, k);
      tile.template multiply<W>(g.b + k0 / W::kp * W::kBytes, j0, a + k0, g.lda / 4, k, ahead);
      tile.store_scaled(g.c + row * kC + j0 * V::width, scale[0], j0 * V::width);
    }
  }
}

template <class V, class W, int S>
void stream_groups(const BlockArgs& g) {
  constexpr bool shifted = !__is_same(W, WeightE4m3<V>);
  for (int i = 0; i < S * kC; ++i) g.c[i] = 0;
  for (int64_t group = 0, k0 = 0; k0 < g.k; ++group, k0 += kScaleGroup) {
    const int64_t k = g.k - k0 < kScaleGroup ? g.k - k0 : kScaleGroup;
    Streams<V, W, S> streams;
    const float* a = reinterpret_cast<const float*>(g.a) + k0;
    // value · 2^-120 times activation · 2^8 · 2^104: the sum is that of the other form times 2^-8, bit for bit
    streams.multiply(g.b + k0 * W::kBytes, g.panel_stride, a, k, g.ahead, shifted ? 0x1p104f : 1.0f);
    const float row = (g.a_scale ? g.a_scale[group] : kE4m3Shift) * (shifted ? 256.0f : 1.0f);
#pragma GCC unroll 4
    for (int s = 0; s < S; ++s)
#pragma GCC unroll 8
      for (int j = 0; j < kC / V::width; ++j) {
        float* at = g.c + s * kC + j * V::width;
        const float scale = row * g.b_scale[s * g.b_scale_stride + 2 * group + j * V::width / kHalfPanel];
        V::store(at, V::fma(streams.sum[s][j], V::set1(scale), V::load(at)));
      }
  }
}

/// stream_groups with WeightE4m3Shifted for vectors of one row of a panel, bit for bit: 32 codes are read as 8 lanes of
/// four and decoded in place, without the shuffles of a sign extension. Vector j then holds the columns 4 i + j, and so
/// does C until the last group is done.
template <class V, int S>
void stream_quads(const BlockArgs& g) {
  typedef typename V::F F;
  typedef typename V::U U;
  typedef short Halves __attribute__((vector_size(sizeof(U))));
  static_assert(V::width == 8);
  for (int i = 0; i < S * kC; ++i) g.c[i] = 0;
  for (int64_t group = 0, k0 = 0; k0 < g.k; ++group, k0 += kScaleGroup) {
    const int64_t k = g.k - k0 < kScaleGroup ? g.k - k0 : kScaleGroup;
    float a[kScaleGroup];
    for (int64_t at = 0; at < k; ++at) a[at] = reinterpret_cast<const float*>(g.a)[k0 + at] * 0x1p104f;
    const char* b = g.b + k0 * kC;
    F sum[S][4] = {};
    for (int64_t at = 0; at < k; ++at, b += kC) {
      const F x = V::set1(a[at]);
#pragma GCC unroll 4
      for (int s = 0; s < S; ++s) {
        const U four = (U)V::load_i32(reinterpret_cast<const int32_t*>(b + s * g.panel_stride));
        U two = (U)((Halves)(four << 8) >> 4);
        sum[s][2] = V::fma(x, (F)(two & 0x87f00000u), sum[s][2]);
        sum[s][0] = V::fma(x, (F)((two << 16) & 0x87f00000u), sum[s][0]);
        two = (U)((Halves)four >> 4);
        sum[s][3] = V::fma(x, (F)(two & 0x87f00000u), sum[s][3]);
        sum[s][1] = V::fma(x, (F)((two << 16) & 0x87f00000u), sum[s][1]);
      }
    }
    const float row = g.a_scale[group] * 256.0f;
#pragma GCC unroll 4
    for (int s = 0; s < S; ++s) {
      const float* of = g.b_scale + s * g.b_scale_stride + 2 * group;
      const float low = row * of[0], high = row * of[1];
      const F scale = {low, low, low, low, high, high, high, high};
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        float* c = g.c + s * kC + j * V::width;
        V::store(c, V::fma(sum[s][j], scale, V::load(c)));
      }
    }
  }
  for (int s = 0; s < S; ++s) {
    float at[kC];
    for (int i = 0; i < kC; ++i) at[i] = g.c[s * kC + i];
    for (int i = 0; i < kC; ++i) g.c[s * kC + i] = at[i % 4 * V::width + i / 4];
  }
}

/// The weights of a piece as f32 [k][32].
template <class V, class W>
void expand(const char* b, int64_t k, float* out) {
  for (int64_t at = 0; at < k; at += W::kp, b += W::kBytes)
#pragma GCC unroll 4
    for (int p = 0; p < W::kp; ++p)
#pragma GCC unroll 16
      for (int j = 0; j < kC / V::width; ++j) V::store(out + (at + p) * kC + j * V::width, W::value(b, j, p));
}

/// More rows than a tile holds: each group is decoded once and then used by all of them, in the same order of
/// operations as without.
template <class V, class Shape>
void gemm_e4m3(const BlockArgs& g) {
  const bool shifted = g.fast_subnormals && g.a_scale != nullptr;  // other activations could overflow
  auto stream = [&](auto count) {
    constexpr int S = count.value;
    if (!shifted) return stream_groups<V, WeightE4m3<V>, S>(g);
    if constexpr (V::width == 8)
      stream_quads<V, S>(g);
    else
      stream_groups<V, WeightE4m3Shifted<V>, S>(g);
  };
  if constexpr (Shape::kStreams >= 4)
    if (g.panels == 4) return stream(Rows<4>{});
  if constexpr (Shape::kStreams >= 3)
    if (g.panels == 3) return stream(Rows<3>{});
  if constexpr (Shape::kStreams >= 2)
    if (g.panels == 2) return stream(Rows<2>{});
  auto groups_of = [](const BlockArgs& args, auto weight) {
    over_rows<Shape>(args, [&](auto rows, int64_t row) {
      multiply_groups<V, decltype(weight), rows.value, Shape::vectors(rows.value)>(args, row);
    });
  };
  if (g.rows <= Shape::kRows || !g.expanded) return groups_of(g, WeightE4m3<V>{});
  expand<V, WeightE4m3<V>>(g.b, g.k, g.expanded);
  BlockArgs wide = g;
  wide.b = reinterpret_cast<const char*>(g.expanded);
  groups_of(wide, WeightF32<V>{});
}

template <class V, class Shape>
constexpr void fill_e4m3(Unit& unit) {
  unit.gemm[static_cast<int>(Gemm::e4m3)] = gemm_e4m3<V, Shape>;
}

}  // namespace
}  // namespace moekit::cpu
