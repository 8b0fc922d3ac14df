// Σ_j w_j · row_j of one token, f32, in ascending slot order, rounded once by whoever stores it.
#pragma once
#include <algorithm>

#include "quant/numeric.hpp"

namespace moekit::reduce {

inline bool can_sum(DType type) { return type == DType::f32 || type == DType::bf16 || type == DType::f16; }

inline constexpr std::int64_t kBlock = 256;  // columns summed at a time: 1 KiB of stack

/// sum[i] += weight · row[begin + i]
inline void add_scaled(float* sum, const void* row, DType type, std::int64_t begin, std::int64_t count, float weight) {
  if (type == DType::f32) {
    const float* in = static_cast<const float*>(row) + begin;
    for (std::int64_t i = 0; i < count; ++i) sum[i] += weight * in[i];
  } else if (type == DType::bf16) {
    const std::uint16_t* in = static_cast<const std::uint16_t*>(row) + begin;
    for (std::int64_t i = 0; i < count; ++i) sum[i] += weight * numeric::bf16_to_f32(in[i]);
  } else {
    const std::uint16_t* in = static_cast<const std::uint16_t*>(row) + begin;
    for (std::int64_t i = 0; i < count; ++i) sum[i] += weight * numeric::f16_to_f32(in[i]);
  }
}

/// value[i] = row[begin + i]
inline void load(float* value, const void* row, DType type, std::int64_t begin, std::int64_t count) {
  if (type == DType::f32) {
    std::copy_n(static_cast<const float*>(row) + begin, count, value);
  } else if (type == DType::bf16) {
    const std::uint16_t* in = static_cast<const std::uint16_t*>(row) + begin;
    for (std::int64_t i = 0; i < count; ++i) value[i] = numeric::bf16_to_f32(in[i]);
  } else {
    const std::uint16_t* in = static_cast<const std::uint16_t*>(row) + begin;
    for (std::int64_t i = 0; i < count; ++i) value[i] = numeric::f16_to_f32(in[i]);
  }
}

/// row[begin + i] = value[i], rounded to `type`
inline void store(void* row, DType type, std::int64_t begin, std::int64_t count, const float* value) {
  if (type == DType::f32) {
    std::copy_n(value, count, static_cast<float*>(row) + begin);
  } else if (type == DType::bf16) {
    std::uint16_t* out = static_cast<std::uint16_t*>(row) + begin;
    for (std::int64_t i = 0; i < count; ++i) out[i] = numeric::f32_to_bf16(value[i]);
  } else {
    std::uint16_t* out = static_cast<std::uint16_t*>(row) + begin;
    for (std::int64_t i = 0; i < count; ++i) out[i] = numeric::f32_to_f16(value[i]);
  }
}

/// A row of K elements in another type, each times `factor` in f32, one rounding.
inline void convert_row(const void* from, DType from_type, void* to, DType to_type, std::int64_t K, float factor) {
  float value[kBlock];
  for (std::int64_t begin = 0; begin < K; begin += kBlock) {
    const std::int64_t count = std::min(kBlock, K - begin);
    load(value, from, from_type, begin, count);
    for (std::int64_t i = 0; i < count; ++i) value[i] *= factor;
    store(to, to_type, begin, count, value);
  }
}

/// What one slot adds; row null = nothing.
struct Term {
  const void* row = nullptr;
  float weight = 0;
};

/// Writes columns [0, K) of one output row. `term(j)` is asked once per slot and block, in ascending order of j.
template <class TermOf>
void sum_row(const Tensor& out, DType in, std::int64_t num_slots, TermOf&& term) {
  float sum[kBlock];
  const std::int64_t K = out.shape[0];
  for (std::int64_t begin = 0; begin < K; begin += kBlock) {
    const std::int64_t count = std::min(kBlock, K - begin);
    std::fill_n(sum, count, 0.0f);
    for (std::int64_t j = 0; j < num_slots; ++j)
      if (const Term t = term(j); t.row) add_scaled(sum, t.row, in, begin, count, t.weight);
    store(out.data, out.dtype, begin, count, sum);
  }
}

}  // namespace moekit::reduce
