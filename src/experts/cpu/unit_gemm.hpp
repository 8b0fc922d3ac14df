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
/// k between two calls of step(): high tiles take longer for one.
constexpr int64_t prefetch_step(int rows) { return rows > 6 ? 8 : 32; }

/// Pass `pass` of `passes` over the rows [row, row + rows): its share of the next piece.
inline Prefetch share_of_next(const BlockArgs& g, int64_t row, int rows, int64_t pass, int64_t passes, int64_t k) {
  Prefetch out;
  if (!g.next) return out;
  const int64_t lines = (g.next_bytes + 63) / 64, whole = g.rows * passes, first = row * passes + pass * rows;
  out.at = g.next + lines * first / whole * 64;
  out.end = g.next + lines * (first + rows) / whole * 64;
  const int64_t steps = (k + prefetch_step(rows) - 1) / prefetch_step(rows);
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
    constexpr int64_t step = prefetch_step(MR);
    for (int64_t k0 = 0; k0 < k; k0 += step, b += step / W::kp * W::kBytes, a += step) {
      ahead.step();
      multiply_step<W>(b, j0, a, lda, k - k0 < step ? k - k0 : step);
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

/// One row times S panels at a time. One stream of loads leaves bandwidth unused that several get
/// (docs/performance.md); lines are asked for kStreamAhead bytes before they are needed.
template <class V, class W, int S>
struct Streams {
  static constexpr int kVectors = kC / V::width;
  typename V::F sum[S][kVectors];

  void multiply(const char* b, int64_t stride, const float* a, int64_t k, int64_t ahead) {
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
        const typename V::F x = V::set1(a[at + p]);
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
template <int N>
struct Rows {
  static constexpr int value = N;
};

template <int MR, class Run>
void take_rows(int64_t rows, int64_t row, const Run& run) {
  if constexpr (MR > 1)
    if (rows < MR) return take_rows<MR - 1>(rows, row, run);
  run(Rows<MR>{}, row);
}

/// All rows, in as few tiles of up to Shape::kRows rows as there can be, all of about the same height: a low tile has
/// too few chains of additions in flight.
template <class Shape, class Run>
void over_rows(const BlockArgs& g, const Run& run) {
  constexpr int MR = Shape::kRows;
  for (int64_t row = 0, left = (g.rows + MR - 1) / MR; left > 0; --left) {
    const int64_t rest = g.rows - row, take = MR == 6 && rest == 7 ? 5 : (rest + left - 1) / left;
    take_rows<MR>(take, row, run);
    row += take;
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

template <class V, class Shape>
constexpr void fill_gemm(Unit& unit) {
  unit.max_rows = Shape::kRows;
  unit.stream_rows = Shape::kStreamRows;
  unit.streams = Shape::kStreams;
  unit.gemm[static_cast<int>(Gemm::f32)] = gemm_block<V, WeightF32<V>, Shape>;
  unit.gemm[static_cast<int>(Gemm::bf16)] = gemm_block<V, WeightBf16<V>, Shape>;
  unit.gemm[static_cast<int>(Gemm::f16)] = gemm_block<V, WeightF16<V>, Shape>;
  unit.gemm[static_cast<int>(Gemm::i8_wide)] = gemm_block<V, WeightI8<V>, Shape>;
}

}  // namespace
}  // namespace moekit::cpu
