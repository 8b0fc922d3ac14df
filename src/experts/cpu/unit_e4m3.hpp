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

template <class V, int S>
void stream_groups(const BlockArgs& g) {
  for (int i = 0; i < S * kC; ++i) g.c[i] = 0;
  for (int64_t group = 0, k0 = 0; k0 < g.k; ++group, k0 += kScaleGroup) {
    const int64_t k = g.k - k0 < kScaleGroup ? g.k - k0 : kScaleGroup;
    Streams<V, WeightE4m3<V>, S> streams;
    streams.multiply(g.b + k0 * kC, g.panel_stride, reinterpret_cast<const float*>(g.a) + k0, k, g.ahead);
    const float row = g.a_scale ? g.a_scale[group] : kE4m3Shift;
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

/// The sums of one group of S panels; vector j of a panel holds the columns kWays · i + j.
template <class V, int S>
struct CodeStreams {
  static constexpr int kWays = kC / V::width, kBytes = V::codes_k * kC;
  typename V::F sum[S][kWays];

  /// a[0, k): activations times codes_lift.
  void multiply(const char* b, int64_t stride, const float* a, int64_t k, int64_t ahead) {
#pragma GCC unroll 4
    for (int s = 0; s < S; ++s)
#pragma GCC unroll 4
      for (int j = 0; j < kWays; ++j) sum[s][j] = typename V::F{};
    int64_t at = 0;
    for (; at + V::codes_k <= k; at += V::codes_k, b += kBytes)
#pragma GCC unroll 4
      for (int s = 0; s < S; ++s) {
        __builtin_prefetch(b + s * stride + ahead, 0, 3);
        V::each_e4m3(reinterpret_cast<const uint8_t*>(b + s * stride),
                     [&](int p, int j, typename V::F w) { sum[s][j] = V::fma(V::set1(a[at + p]), w, sum[s][j]); });
      }
    if (at == k) return;
    for (int s = 0; s < S; ++s) {  // the last k alone: its codes, then zeros that nobody uses
      uint8_t rest[kBytes] = {};
      for (int i = 0; i < kC; ++i) rest[i] = static_cast<uint8_t>(b[s * stride + i]);
      V::each_e4m3(rest, [&](int p, int j, typename V::F w) {
        if (p == 0) sum[s][j] = V::fma(V::set1(a[at]), w, sum[s][j]);
      });
    }
  }
};

/// stream_groups where codes are decoded in place, bit for bit the same. C too is in the order of CodeStreams until the
/// last group is done.
template <class V, int S>
void stream_codes(const BlockArgs& g) {
  constexpr int kWays = kC / V::width;
  for (int i = 0; i < S * kC; ++i) g.c[i] = 0;
  for (int64_t group = 0, k0 = 0; k0 < g.k; ++group, k0 += kScaleGroup) {
    const int64_t k = g.k - k0 < kScaleGroup ? g.k - k0 : kScaleGroup;
    float a[kScaleGroup];
    for (int64_t at = 0; at < k; ++at) a[at] = reinterpret_cast<const float*>(g.a)[k0 + at] * V::codes_lift;
    CodeStreams<V, S> streams;
    streams.multiply(g.b + k0 * kC, g.panel_stride, a, k, g.ahead);
    const float row = (g.a_scale ? g.a_scale[group] : kE4m3Shift) * V::codes_drop;
    for (int s = 0; s < S; ++s) {
      float scale[V::width];
      for (int i = 0; i < V::width; ++i)
        scale[i] = row * g.b_scale[s * g.b_scale_stride + 2 * group + i * kWays / kHalfPanel];
#pragma GCC unroll 4
      for (int j = 0; j < kWays; ++j) {
        float* c = g.c + s * kC + j * V::width;
        V::store(c, V::fma(streams.sum[s][j], V::load(scale), V::load(c)));
      }
    }
  }
  for (int s = 0; s < S; ++s) {
    float c[kC];
    for (int i = 0; i < kC; ++i) c[i] = g.c[s * kC + i];
    for (int i = 0; i < kC; ++i) g.c[s * kC + i] = c[i % kWays * V::width + i / kWays];
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
  auto stream = [&](auto count) {
    constexpr int S = count.value;
    if constexpr (V::width == 16) return stream_codes<V, S>(g);
    if constexpr (V::width == 8)  // subnormal weights; and activations that are no codes could overflow
      if (g.fast_subnormals && g.a_scale) return stream_codes<V, S>(g);
    stream_groups<V, S>(g);
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
