// logits = hidden · weightᵀ in f32. Included by one translation unit per instruction set.
//
// One order for every output, whatever the tile: lane l sums x[k]·w[k] over k = l, l + 8, l + 16, … ascending (fused
// where the unit has FMA), missing elements of the last eight counting as 0; then sum() adds the lanes. So a logit's
// bits depend on its own row and expert alone. Error: (K/8 + 4) · 2^-24 · Σ|x·w|.
#pragma once
#include "route/vector.hpp"

namespace moekit::route {
namespace {

// Tile in registers 3 x 4 (12 sums, 3 + 1 operands of 16 registers); block 24 x 32 outputs, 256 deep: 24 KiB of hidden
// rows and 32 KiB of weights, both widened to f32 once and read 8 and 8 times, beside 24 KiB of sums.
constexpr std::int64_t kTileRows = 3, kTileExperts = 4;
constexpr std::int64_t kBlockRows = 24, kBlockExperts = 32, kBlockDepth = 256;

/// `count` ≤ kBlockDepth elements as f32, filled up with zeros to a multiple of 8.
template <FloatType type>
MOEKIT_INLINE void widen(const void* from, std::int64_t at, std::int64_t count, float* to) {
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(to + i, load_f32<type>(from, at + i));
  if (i < count) store(to + i, load_tail<type>(from, at + i, count - i));
}
inline void widen(const void* from, FloatType type, std::int64_t at, std::int64_t count, float* to) {
  switch (type) {
    case FloatType::f32: return widen<FloatType::f32>(from, at, count, to);
    case FloatType::bf16: return widen<FloatType::bf16>(from, at, count, to);
    case FloatType::f16: return widen<FloatType::f16>(from, at, count, to);
  }
}
MOEKIT_INLINE std::int64_t round_up(std::int64_t n, std::int64_t step) { return (n + step - 1) / step * step; }

struct GemmBlock {
  alignas(32) float hidden[kBlockRows][kBlockDepth];
  alignas(32) float weight[kBlockExperts][kBlockDepth];
  F8 sums[kBlockRows][kBlockExperts];
};

MOEKIT_INLINE void clear(float* row) { __builtin_memset(row, 0, kBlockDepth * sizeof(float)); }

MOEKIT_INLINE void multiply_tile(GemmBlock& b, std::int64_t row, std::int64_t expert, std::int64_t depth) {
  F8 acc[kTileRows][kTileExperts];
  for (int r = 0; r < kTileRows; ++r)
    for (int e = 0; e < kTileExperts; ++e) acc[r][e] = b.sums[row + r][expert + e];
  for (std::int64_t k = 0; k < depth; k += kLanes) {
    F8 x[kTileRows];
    for (int r = 0; r < kTileRows; ++r) x[r] = load<F8>(&b.hidden[row + r][k]);
    for (int e = 0; e < kTileExperts; ++e) {
      const F8 w = load<F8>(&b.weight[expert + e][k]);
      for (int r = 0; r < kTileRows; ++r) acc[r][e] = fma(x[r], w, acc[r][e]);
    }
  }
  for (int r = 0; r < kTileRows; ++r)
    for (int e = 0; e < kTileExperts; ++e) b.sums[row + r][expert + e] = acc[r][e];
}

/// One block of outputs, the whole depth. Rows and experts that fill up the last tiles are 0 and not stored.
inline void multiply_block(const GemmTask& t, const GemmRange& r, GemmBlock& b) {
  const std::int64_t rows = r.row_end - r.row_begin, experts = r.expert_end - r.expert_begin;
  const std::int64_t tile_rows = round_up(rows, kTileRows), tile_experts = round_up(experts, kTileExperts);
  for (std::int64_t i = 0; i < tile_rows; ++i)
    for (std::int64_t e = 0; e < tile_experts; ++e) b.sums[i][e] = splat(0.0f);
  for (std::int64_t i = rows; i < tile_rows; ++i) clear(b.hidden[i]);
  for (std::int64_t e = experts; e < tile_experts; ++e) clear(b.weight[e]);
  for (std::int64_t k = 0; k < t.depth; k += kBlockDepth) {
    const std::int64_t depth = t.depth - k < kBlockDepth ? t.depth - k : kBlockDepth;
    for (std::int64_t i = 0; i < rows; ++i)
      widen(t.hidden, t.hidden_type, (r.row_begin + i) * t.hidden_stride + k, depth, b.hidden[i]);
    for (std::int64_t e = 0; e < experts; ++e)
      widen(t.weight, t.weight_type, (r.expert_begin + e) * t.weight_stride + k, depth, b.weight[e]);
    for (std::int64_t e = 0; e < tile_experts; e += kTileExperts)
      for (std::int64_t i = 0; i < tile_rows; i += kTileRows) multiply_tile(b, i, e, round_up(depth, kLanes));
  }
  for (std::int64_t i = 0; i < rows; ++i)
    for (std::int64_t e = 0; e < experts; ++e)
      t.logits[(r.row_begin + i) * t.logits_stride + r.expert_begin + e] = sum(b.sums[i][e]);
}

/// One row and at most kBlockExperts experts: eight of them side by side hide the latency of their sums.
template <FloatType type>
MOEKIT_INLINE void multiply_row(const GemmTask& t, std::int64_t row, std::int64_t first, std::int64_t end) {
  constexpr std::int64_t kDepth = 2048;
  alignas(32) float x[kDepth];
  F8 acc[kBlockExperts];
  for (F8& a : acc) a = splat(0.0f);
  for (std::int64_t k = 0; k < t.depth; k += kDepth) {
    const std::int64_t depth = t.depth - k < kDepth ? t.depth - k : kDepth, whole = depth / kLanes * kLanes;
    widen(t.hidden, t.hidden_type, row * t.hidden_stride + k, depth, x);
    const auto stream = [&]<int count>(std::int64_t expert, std::integral_constant<int, count>) {
      F8 part[count];
      std::int64_t at[count];
      for (int e = 0; e < count; ++e) at[e] = (expert + e) * t.weight_stride + k, part[e] = acc[expert - first + e];
      for (std::int64_t i = 0; i < whole; i += kLanes) {
        const F8 xi = load<F8>(x + i);
        for (int e = 0; e < count; ++e) part[e] = fma(xi, load_f32<type>(t.weight, at[e] + i), part[e]);
      }
      for (int e = 0; e < count; ++e) {
        if (whole < depth)
          part[e] = fma(load<F8>(x + whole), load_tail<type>(t.weight, at[e] + whole, depth - whole), part[e]);
        acc[expert - first + e] = part[e];
      }
    };
    std::int64_t expert = first;
    for (; expert + 8 <= end; expert += 8) stream(expert, std::integral_constant<int, 8>{});
    for (; expert < end; ++expert) stream(expert, std::integral_constant<int, 1>{});
  }
  for (std::int64_t e = first; e < end; ++e) t.logits[row * t.logits_stride + e] = sum(acc[e - first]);
}
inline void multiply_row(const GemmTask& t, std::int64_t row, std::int64_t first, std::int64_t end) {
  switch (t.weight_type) {
    case FloatType::f32: return multiply_row<FloatType::f32>(t, row, first, end);
    case FloatType::bf16: return multiply_row<FloatType::bf16>(t, row, first, end);
    case FloatType::f16: return multiply_row<FloatType::f16>(t, row, first, end);
  }
}

void gemm(const GemmTask& t, const GemmRange& r) {
  constexpr std::int64_t kFewRows = 4;  // up to here widening whole blocks costs more than reading weights again
  GemmBlock block;
  for (std::int64_t e = r.expert_begin; e < r.expert_end; e += kBlockExperts) {
    const std::int64_t expert_end = e + kBlockExperts < r.expert_end ? e + kBlockExperts : r.expert_end;
    if (r.row_end - r.row_begin <= kFewRows) {
      for (std::int64_t row = r.row_begin; row < r.row_end; ++row) multiply_row(t, row, e, expert_end);
      continue;
    }
    for (std::int64_t i = r.row_begin; i < r.row_end; i += kBlockRows)
      multiply_block(t, {i, i + kBlockRows < r.row_end ? i + kBlockRows : r.row_end, e, expert_end}, block);
  }
}

}  // namespace
}  // namespace moekit::route
