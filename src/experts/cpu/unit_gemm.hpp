// Register tiles over panels: f32 sums. Internal to the unit that includes it (see unit.hpp).
#pragma once
#include "cpu/simd/vector.hpp"
#include "experts/cpu/unit.hpp"

namespace moekit::cpu {
namespace {

inline constexpr int kC = kPanelColumns;

/// Weights as f32 vectors: kp = k in one group of the pack, kBytes = bytes of a group of all 32 columns. value(b, j, p)
/// = vector j (columns j·width …) of k + p.
template <class V>
struct WeightF32 {
  static constexpr int kp = 1, kBytes = 4 * kC;
  static typename V::F value(const char* b, int j, int) {
    return V::load(reinterpret_cast<const float*>(b) + j * V::width);
  }
};
template <class V>
struct WeightBf16 {
  static constexpr int kp = 2, kBytes = 4 * kC;
  static typename V::F value(const char* b, int j, int p) {
    const auto pair = (typename V::U)V::load_i32(reinterpret_cast<const int32_t*>(b) + j * V::width);
    return (typename V::F)(p == 0 ? pair << 16 : pair & 0xffff0000u);
  }
};
template <class V>
struct WeightF16 {
  static constexpr int kp = 1, kBytes = 2 * kC;
  static typename V::F value(const char* b, int j, int) {
    return V::load_f16(reinterpret_cast<const uint16_t*>(b) + j * V::width);
  }
};
template <class V>
struct WeightI8 {
  static constexpr int kp = 4, kBytes = 4 * kC;
  static typename V::F value(const char* b, int j, int p) {
    const auto four = (typename V::U)V::load_i32(reinterpret_cast<const int32_t*>(b) + j * V::width);
    return V::to_float((typename V::I)(four << (24 - 8 * p)) >> 24);
  }
};
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
/// The lines of the next piece that one pass over k asks for, a few at a time: a burst would fill the miss buffers and
/// hold up the loads of the rows.
struct Prefetch {
  const char* at = nullptr;
  const char* end = nullptr;
  int64_t per_step = 0;

  void step() {
    const char* stop = at + per_step;
    if (stop > end) stop = end;
    for (; at < stop; at += 64) __builtin_prefetch(at, 0, 2);
  }
};
inline constexpr int64_t kPrefetchStep = 32;  // k between two calls of step()

/// Pass `pass` of `passes` over the rows [row, row + rows): its share of the next piece.
inline Prefetch share_of_next(const BlockArgs& g, int64_t row, int64_t rows, int64_t pass, int64_t passes, int64_t k) {
  Prefetch out;
  if (!g.next) return out;
  const int64_t lines = (g.next_bytes + 63) / 64, whole = g.rows * passes, first = row * passes + pass * rows;
  out.at = g.next + lines * first / whole * 64;
  out.end = g.next + lines * (first + rows) / whole * 64;
  const int64_t steps = (k + kPrefetchStep - 1) / kPrefetchStep;
  out.per_step = ((out.end - out.at) / 64 + steps - 1) / steps * 64;
  return out;
}

/// MR rows × NV vectors of accumulators, vectors j0 … j0 + NV of the panel.
template <class V, int MR, int NV>
struct Tile {
  typename V::F sum[MR][NV];

  void zero() {
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r)
#pragma GCC unroll 16
      for (int j = 0; j < NV; ++j) sum[r][j] = typename V::F{};
  }
  void load(const float* c) {
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r)
#pragma GCC unroll 16
      for (int j = 0; j < NV; ++j) sum[r][j] = V::load(c + r * kC + j * V::width);
  }
  void store(float* c) const {
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r)
#pragma GCC unroll 16
      for (int j = 0; j < NV; ++j) V::store(c + r * kC + j * V::width, sum[r][j]);
  }
  /// c = fma(sum, scale of row and half, c)
  void store_scaled(float* c, const float* scale, int half) const {
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r)
#pragma GCC unroll 16
      for (int j = 0; j < NV; ++j) {
        float* at = c + r * kC + j * V::width;
        V::store(at, V::fma(sum[r][j], V::set1(scale[2 * r + (half + j * V::width) / kHalfPanel]), V::load(at)));
      }
  }
  template <class W>
  void multiply(const char* b, int j0, const float* a, int64_t lda, int64_t k, Prefetch& ahead) {
    for (int64_t k0 = 0; k0 < k; k0 += kPrefetchStep, b += kPrefetchStep / W::kp * W::kBytes, a += kPrefetchStep) {
      ahead.step();
      multiply_step<W>(b, j0, a, lda, k - k0 < kPrefetchStep ? k - k0 : kPrefetchStep);
    }
  }
  template <class W>
  void multiply_step(const char* b, int j0, const float* a, int64_t lda, int64_t k) {
    for (int64_t at = 0; at < k; at += W::kp, b += W::kBytes) {
#pragma GCC unroll 4
      for (int p = 0; p < W::kp; ++p) {
        if constexpr (MR <= NV) {  // what is fewer stays in registers
          typename V::F x[MR];
#pragma GCC unroll 16
          for (int r = 0; r < MR; ++r) x[r] = V::set1(a[r * lda + at + p]);
#pragma GCC unroll 16
          for (int j = 0; j < NV; ++j) {
            const typename V::F w = W::value(b, j0 + j, p);
#pragma GCC unroll 16
            for (int r = 0; r < MR; ++r) sum[r][j] = V::fma(x[r], w, sum[r][j]);
          }
        } else {
          typename V::F w[NV];
#pragma GCC unroll 16
          for (int j = 0; j < NV; ++j) w[j] = W::value(b, j0 + j, p);
#pragma GCC unroll 16
          for (int r = 0; r < MR; ++r) {
            const typename V::F x = V::set1(a[r * lda + at + p]);
#pragma GCC unroll 16
            for (int j = 0; j < NV; ++j) sum[r][j] = V::fma(x, w[j], sum[r][j]);
          }
        }
      }
    }
  }
};

template <class V, class W, int MR, int NV>
void multiply_tile(const BlockArgs& g, int64_t row) {
  const float* a = reinterpret_cast<const float*>(g.a + row * g.lda);
#pragma GCC unroll 1
  for (int j0 = 0; j0 < kC / V::width; j0 += NV) {
    float* c = g.c + row * kC + j0 * V::width;
    Tile<V, MR, NV> tile;
    if (g.first)
      tile.zero();
    else
      tile.load(c);
    Prefetch ahead = share_of_next(g, row, MR, j0 / NV, kC / V::width / NV, g.k);
    tile.template multiply<W>(g.b, j0, a, g.lda / 4, g.k, ahead);
    tile.store(c);
  }
}

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

/// One row times S panels at a time. One stream of loads leaves bandwidth unused that several get
/// (docs/performance.md); lines are asked for kStreamAhead bytes before they are needed.
template <class V, class W, int S>
struct Streams {
  static constexpr int kVectors = kC / V::width;
  typename V::F sum[S][kVectors];

  void multiply(const char* b, int64_t stride, const float* a, int64_t k, int64_t ahead, float factor = 1.0f) {
#pragma GCC unroll 4
    for (int s = 0; s < S; ++s)
#pragma GCC unroll 8
      for (int j = 0; j < kVectors; ++j) sum[s][j] = typename V::F{};
    for (int64_t at = 0; at < k; at += W::kp, b += W::kBytes) {
#pragma GCC unroll 4
      for (int s = 0; s < S; ++s)
#pragma GCC unroll 2
        for (int line = 0; line < W::kBytes; line += 64) __builtin_prefetch(b + s * stride + ahead + line, 0, 3);
#pragma GCC unroll 4
      for (int p = 0; p < W::kp; ++p) {
        const typename V::F x = V::set1(factor == 1.0f ? a[at + p] : a[at + p] * factor);
#pragma GCC unroll 4
        for (int s = 0; s < S; ++s)
#pragma GCC unroll 8
          for (int j = 0; j < kVectors; ++j) sum[s][j] = V::fma(x, W::value(b + s * stride, j, p), sum[s][j]);
      }
    }
  }
  void store(float* c) const {
#pragma GCC unroll 4
    for (int s = 0; s < S; ++s)
#pragma GCC unroll 8
      for (int j = 0; j < kVectors; ++j) V::store(c + s * kC + j * V::width, sum[s][j]);
  }
};

template <class V, class W, int S>
void stream_panels(const BlockArgs& g) {
  Streams<V, W, S> streams;
  streams.multiply(g.b, g.panel_stride, reinterpret_cast<const float*>(g.a), g.k, g.ahead);
  streams.store(g.c);
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

template <int N>
struct Rows {
  static constexpr int value = N;
};

/// All rows, in tiles of Shape::kRows; one row more than that is split so that no tile is left with a single row.
template <class Shape, class Run>
void over_rows(const BlockArgs& g, const Run& run) {
  constexpr int MR = Shape::kRows;
  int64_t row = 0;
  auto take = [&](auto rows) {
    run(rows, row);
    row += rows.value;
  };
  const int64_t whole = g.rows % MR == 1 && g.rows > MR ? g.rows - MR - 1 : g.rows - g.rows % MR;
  while (row < whole) take(Rows<MR>{});
  if (g.rows - row > MR) take(Rows<MR - 1>{});  // MR + 1 = (MR - 1) + 2
  switch (g.rows - row) {
    case 1: return take(Rows<1>{});
    case 2: return take(Rows<2>{});
    case 3:
      if constexpr (MR > 3) return take(Rows<3>{});
      break;
    case 4:
      if constexpr (MR > 4) return take(Rows<4>{});
      break;
    case 5:
      if constexpr (MR > 5) return take(Rows<5>{});
      break;
    default: break;
  }
}

template <class V, class W, class Shape>
void gemm_block(const BlockArgs& g) {
  if constexpr (Shape::kStreams >= 4)
    if (g.panels == 4) return stream_panels<V, W, 4>(g);
  if constexpr (Shape::kStreams >= 3)
    if (g.panels == 3) return stream_panels<V, W, 3>(g);
  if constexpr (Shape::kStreams >= 2)
    if (g.panels == 2) return stream_panels<V, W, 2>(g);
  over_rows<Shape>(
      g, [&](auto rows, int64_t row) { multiply_tile<V, W, rows.value, Shape::vectors(rows.value)>(g, row); });
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
    return shifted ? stream_groups<V, WeightE4m3Shifted<V>, S>(g) : stream_groups<V, WeightE4m3<V>, S>(g);
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
constexpr void fill_gemm(Unit& unit) {
  unit.max_rows = Shape::kRows;
  unit.stream_rows = Shape::kStreamRows;
  unit.streams = Shape::kStreams;
  unit.gemm[static_cast<int>(Gemm::f32)] = gemm_block<V, WeightF32<V>, Shape>;
  unit.gemm[static_cast<int>(Gemm::bf16)] = gemm_block<V, WeightBf16<V>, Shape>;
  unit.gemm[static_cast<int>(Gemm::f16)] = gemm_block<V, WeightF16<V>, Shape>;
  unit.gemm[static_cast<int>(Gemm::i8_wide)] = gemm_block<V, WeightI8<V>, Shape>;
  unit.gemm[static_cast<int>(Gemm::e4m3)] = gemm_e4m3<V, Shape>;
}

}  // namespace
}  // namespace moekit::cpu
