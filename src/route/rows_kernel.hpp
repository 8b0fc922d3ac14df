// The routing rule in f32, one row at a time. Included by one translation unit per instruction set.
//
// Precision. Let u = 2^-24. Without biases and top2_sum the logits as given choose: the same ids as in f64. Else the
// deciding values carry errors: z = logit + bias by u|z|; a score by 12u relative (softmax over all: 12u + u|z - m| +
// (E/32 + 8)u); c = s + bias by u|c| on top; a group's sum of two by the sum of theirs. Values further apart than these
// bounds order as in f64. The weights' relative error is that of the scores, plus 3u.
#pragma once
#include <math.h>

#include "route/topk_kernel.hpp"

namespace moekit::route {
namespace {

struct RowBuffers {
  alignas(32) float logit[kRowLimit];       // z, padded with -inf
  alignas(32) float score[kRowLimit];       // s, if all are needed
  alignas(32) std::int32_t key[kRowLimit];  // order of the choice, padded with kKeyTaken
  alignas(32) std::int32_t group_key[kRowLimit];
  bool kept[kRowLimit];  // per group
};

/// What the configuration asks of every row.
struct RowPlan {
  bool grouped, by_logit, all_scores, selected_mass;
  explicit RowPlan(const RowsTask& t)
      : grouped(t.keep_groups < t.num_groups),
        by_logit(t.selection_bias == nullptr),
        all_scores((t.selection_bias && t.score != ScoreKind::softmax_selected) || (grouped && t.group_top2)),
        // softmax over all and then over their sum: the sum over the others cancels
        selected_mass(t.score == ScoreKind::softmax_selected ||
                      (t.score == ScoreKind::softmax && by_logit && !grouped && t.renormalise && t.renorm_p == 1 &&
                       t.renorm_eps == 0)) {}
};

/// Reads a row, adds the bias; the largest value, NaN if one is.
template <FloatType type>
MOEKIT_INLINE float read_row(const RowsTask& t, const void* from, float* logit) {
  F8 best = splat(kMinusInfinity);
  I8 nan = splat(0);
  const auto take = [&](std::int64_t i, F8 z) {
    if (t.logit_bias) z = z + load<F8>(t.logit_bias + i);
    return z;
  };
  std::int64_t i = 0;
  for (; i + kLanes <= t.num_experts; i += kLanes) {
    const F8 z = take(i, load_f32<type>(from, i));
    nan |= z != z;
    best = larger(z, best);
    store(logit + i, z);
  }
  const std::int64_t end = padded(t.num_experts);
  if (const std::int64_t rest = t.num_experts - i; rest > 0) {
    F8 z = take(i, load_tail<type>(from, i, rest));
    z = kLaneIndex < static_cast<std::int32_t>(rest) ? z : splat(kMinusInfinity);
    nan |= z != z;
    best = larger(z, best);
    store(logit + i, z);
    i += kLanes;
  }
  for (; i < end; i += kLanes) store(logit + i, splat(kMinusInfinity));
  return mask_bits(nan) ? __builtin_nanf("") : largest(best)[0];
}
float read_row(const RowsTask& t, std::int64_t row, float* logit) {
  const std::int64_t at = row * t.logits_stride;
  switch (t.type) {
    case FloatType::f32: return read_row<FloatType::f32>(t, static_cast<const float*>(t.logits) + at, logit);
    case FloatType::bf16: return read_row<FloatType::bf16>(t, static_cast<const std::uint16_t*>(t.logits) + at, logit);
    case FloatType::f16: break;
  }
  return read_row<FloatType::f16>(t, static_cast<const std::uint16_t*>(t.logits) + at, logit);
}

/// Σ e^(z - m) over a padded row, four sums side by side.
MOEKIT_INLINE float total_mass(const float* logit, std::int64_t end, float m) {
  F8 part[kVectorsPerBlock] = {};
  for (std::int64_t i = 0; i < end; i += kBlockColumns)
    for (int v = 0; v < kVectorsPerBlock; ++v) part[v] = part[v] + exp_negative(load<F8>(logit + i + v * kLanes) - m);
  return sum((part[0] + part[1]) + (part[2] + part[3]));
}
MOEKIT_INLINE F8 softmax_score(F8 z, float m, float inverse_mass) {
  const F8 s = exp_negative(z - m) * inverse_mass;
  return s >= 0x1p-126f ? s : splat(0.0f);
}

template <class Function>
MOEKIT_INLINE void for_vectors(const float* from, float* to, std::int64_t end, Function f) {
  for (std::int64_t i = 0; i < end; i += kLanes) store(to + i, f(load<F8>(from + i)));
}
/// Scores of z[0, end), end a multiple of 8; m and the mass are those of the whole row (softmax).
MOEKIT_INLINE void scores(ScoreKind kind, const float* z, float* s, std::int64_t end, float m, float inverse_mass) {
  switch (kind) {
    case ScoreKind::softmax:
    case ScoreKind::softmax_selected:
      for_vectors(z, s, end, [&](F8 x) { return softmax_score(x, m, inverse_mass); });
      break;
    case ScoreKind::sigmoid: for_vectors(z, s, end, [](F8 x) { return sigmoid(x); }); break;
    case ScoreKind::sqrt_softplus: for_vectors(z, s, end, [](F8 x) { return sqrt_softplus(x); }); break;
    case ScoreKind::identity: for_vectors(z, s, end, [](F8 x) { return x; }); break;
  }
}

/// Keys of value (+ bias), NaN last, padding never.
MOEKIT_INLINE void set_keys(const float* value, const float* bias, std::int64_t columns, std::int32_t* key) {
  const std::int32_t end = static_cast<std::int32_t>(padded(columns));
  for (std::int32_t i = 0; i < end; i += static_cast<std::int32_t>(kLanes)) {
    F8 c = load<F8>(value + i);
    if (bias) c = c + load<F8>(bias + i);
    I8 k = order_key(c);
    k = c != c ? splat(kKeyNan) : k;
    store(key + i, kLaneIndex + i < static_cast<std::int32_t>(columns) ? k : splat(kKeyTaken));
  }
}

struct BestTwo {
  std::int32_t first = kKeyTaken, second = kKeyTaken;
};
MOEKIT_INLINE void merge(I8& first, I8& second, I8 other_first, I8 other_second) {
  second = larger(smaller(first, other_first), larger(second, other_second));
  first = larger(first, other_first);
}
BestTwo best_two(const std::int32_t* key, std::int64_t count) {
  BestTwo out;
  std::int64_t i = 0;
  if (count >= kLanes) {
    I8 first = splat(kKeyTaken), second = first;
    for (; i + kLanes <= count; i += kLanes) merge(first, second, load<I8>(key + i), splat(kKeyTaken));
    merge(first, second, swap4(first), swap4(second));
    merge(first, second, swap2(first), swap2(second));
    merge(first, second, swap1(first), swap1(second));
    out = {first[0], second[0]};
  }
  for (; i < count; ++i) {
    const std::int32_t low = key[i] < out.first ? key[i] : out.first;
    out.second = low > out.second ? low : out.second;
    out.first = key[i] > out.first ? key[i] : out.first;
  }
  return out;
}

std::int32_t group_key(BestTwo best, bool top2) {
  if (best.first == kKeyNan || !top2) return best.first;
  const float second = best.second <= kKeyNan ? kMinusInfinity : value_of(best.second);
  const float total = value_of(best.first) + second;
  return total != total ? kKeyNan : order_key(total);
}

/// Lowers the keys of the experts of dropped groups; `values` holds the keys that the group scores are made of.
void drop_groups(const RowsTask& t, const RowPlan& plan, const std::int32_t* values, RowBuffers& b) {
  const std::int64_t n = t.num_groups, per_group = t.num_experts / n;
  std::int32_t* keys = b.group_key;  // may be `values`: a group's entry lies before its experts or is the first of them
  for (std::int64_t g = 0; g < n; ++g) {
    const BestTwo best = best_two(values + g * per_group, per_group);
    b.kept[g] = false;
    keys[g] = group_key(best, t.group_top2);
  }
  for (std::int64_t g = n; g < padded(n); ++g) keys[g] = kKeyTaken;
  Tournament groups(keys, n);
  for (std::int64_t i = 0; i < t.keep_groups; ++i) b.kept[groups.take()] = true;

  const bool logits_choose = plan.by_logit && t.score != ScoreKind::identity;
  const std::int32_t fill = t.fill_zero ? order_key(logits_choose ? kMinusInfinity : 0.0f) : kKeyDropped;
  for (std::int64_t g = 0; g < n; ++g) {
    if (b.kept[g]) continue;
    for (std::int64_t e = g * per_group; e < (g + 1) * per_group; ++e) b.key[e] = b.key[e] == kKeyNan ? kKeyNan : fill;
  }
}

/// Multiplies by scale / norm, in f64: k values.
MOEKIT_INLINE double weight_factor(const RowsTask& t, const float* w) {
  if (!t.renormalise) return t.scale;
  double largest_weight = 0, total = 0;
  for (std::int64_t j = 0; j < t.top_k; ++j) {
    const double size = static_cast<double>(__builtin_fabsf(w[j]));
    largest_weight = size > largest_weight ? size : largest_weight;
    total += t.renorm_p == 2 ? size * size : size;
  }
  if (largest_weight == 0) return 0;
  if (t.renorm_p == 2) total = __builtin_sqrt(total);
  if (t.renorm_p != 1 && t.renorm_p != 2) {
    total = 0;
    for (std::int64_t j = 0; j < t.top_k; ++j)
      total += ::pow(static_cast<double>(__builtin_fabsf(w[j])) / largest_weight, t.renorm_p);
    total = __builtin_isinf(t.renorm_p) ? largest_weight : largest_weight * ::pow(total, 1 / t.renorm_p);
  }
  const double divisor = !t.eps_is_floor ? total + t.renorm_eps : total > t.renorm_eps ? total : t.renorm_eps;
  return t.scale / divisor;
}

/// e^(z - max z), a multiple of 8 of them; their sum. Without any mass all are 0.
MOEKIT_INLINE float selected_mass(const float* z, float* e, std::int64_t end) {
  F8 best = load<F8>(z);
  for (std::int64_t j = kLanes; j < end; j += kLanes) best = larger(best, load<F8>(z + j));
  best = largest(best);
  F8 total = splat(0.0f);
  for (std::int64_t j = 0; j < end; j += kLanes) {
    const F8 mass = best > kMinusInfinity ? exp_negative(load<F8>(z + j) - best) : splat(0.0f);
    store(e + j, mass);
    total = total + mass;
  }
  return sum(total);
}

/// Weights of the chosen experts; m is the row's largest logit.
MOEKIT_INLINE void weigh(const RowsTask& t, const RowPlan& plan, const RowBuffers& b, float m, const std::int32_t* ids,
                         float* out) {
  alignas(32) float z[kTopKLimit], w[kTopKLimit];
  const std::int64_t end = (t.top_k + kLanes - 1) / kLanes * kLanes;
  for (std::int64_t j = end - kLanes; j < end; ++j) z[j] = kMinusInfinity;
  for (std::int64_t j = 0; j < t.top_k; ++j) z[j] = b.logit[ids[j]];

  if (plan.all_scores) {
    for (std::int64_t j = 0; j < t.top_k; ++j) w[j] = b.score[ids[j]];
  } else if (plan.selected_mass) {
    const float mass = selected_mass(z, w, end);
    // over all and renormalised: weight_factor divides by the same sum
    if (t.score == ScoreKind::softmax_selected && mass > 0)
      for (std::int64_t j = 0; j < end; j += kLanes) store(w + j, load<F8>(w + j) / mass);
  } else {
    const float mass = t.score == ScoreKind::softmax ? total_mass(b.logit, padded(t.num_experts), m) : 1.0f;
    scores(t.score, z, w, end, m, 1 / mass);
  }
  if (plan.grouped && t.fill_zero && plan.by_logit) {
    const std::int64_t per_group = t.num_experts / t.num_groups;
    for (std::int64_t j = 0; j < t.top_k; ++j)
      if (!b.kept[ids[j] / per_group]) w[j] = 0;
  }
  const double factor = weight_factor(t, w);
  for (std::int64_t j = 0; j < t.top_k; ++j) out[j] = static_cast<float>(static_cast<double>(w[j]) * factor);
}

void route_row(const RowsTask& t, const RowPlan& plan, std::int64_t row, RowBuffers& b) {
  const float m = read_row(t, row, b.logit);
  if (!(m > kMinusInfinity && m < -kMinusInfinity)) return t.odd_row(t.context, row);

  if (plan.all_scores) {
    const std::int64_t end = padded(t.num_experts);
    const float mass = t.score == ScoreKind::softmax ? total_mass(b.logit, end, m) : 1.0f;
    scores(t.score, b.logit, b.score, end, m, 1 / mass);
  }
  const bool scores_choose = t.selection_bias && t.score != ScoreKind::softmax_selected;
  set_keys(scores_choose ? b.score : b.logit, t.selection_bias, t.num_experts, b.key);
  if (plan.grouped) {
    const bool other_values = t.group_top2 && plan.by_logit;  // logits choose experts, scores choose groups
    if (other_values) set_keys(b.score, nullptr, t.num_experts, b.group_key);
    drop_groups(t, plan, other_values ? b.group_key : b.key, b);
  }
  std::int32_t* ids = t.ids + row * t.ids_stride;
  Tournament experts(b.key, t.num_experts);
  for (std::int64_t j = 0; j < t.top_k; ++j) ids[j] = static_cast<std::int32_t>(experts.take());
  weigh(t, plan, b, m, ids, t.weights + row * t.weights_stride);
}

void route_rows(const RowsTask& task, std::int64_t begin, std::int64_t end) {
  RowBuffers buffers;
  const RowPlan plan(task);
  for (std::int64_t row = begin; row < end; ++row) route_row(task, plan, row, buffers);
}

}  // namespace
}  // namespace moekit::route
