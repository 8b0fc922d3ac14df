// The suite finds what it is there to find: an implementation that is right passes, and each of its mutants, wrong in
// one thing, fails the check that is about that thing.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>

#include <moekit/testing/experts_suite.hpp>

#include "experts/activation.hpp"
#include "experts/call.hpp"
#include "experts/canonical.hpp"
#include "experts/dequantise.hpp"

namespace moekit {
namespace {

using conformance::CheckResult;
using conformance::SuiteOptions;

enum class Wrong {
  nothing,
  drops_last_token,
  swaps_gate_and_up,
  takes_the_next_expert,
  drops_last_k,
  drops_last_i,
  drops_last_column,
  skips_w1_bias,
  skips_w2_bias,
  w2_bias_not_weighted,
  does_not_weight,
  weights_twice,
  weights_the_input_again,
  counts_repeats_once,
  clamps_wild_ids,
  minus_one_is_expert_0,
  ignores_the_map,
  maps_local_ids,
  ignores_row_stride,
  ignores_id_stride,
  rounds_h_to_bf16,
  sums_in_bf16,
  rounds_output_to_bf16,
  silu_for_everything,
  ignores_clamps,
  ignores_beta,
  ignores_alpha,
  keeps_h_unquantised,
  quantises_h_by_127_5,
  first_scale_for_every_group,
  ignores_static_a2,
  static_a2_of_expert_0,
  down_transposed,
  neighbour_token,
  adds_to_what_is_there,
  multiplies_by_a_mask,
  writes_beyond_output,
  writes_beyond_workspace,
  writes_input,
  bits_depend_on_threads,
  bits_depend_on_batch,
  shares_static_scratch,
  shrinking_workspace,
  silent_refusal,
  says_yes_to_anything,
  accepts_small_workspace,
  writes_output_before_it_checks,
};

/// f32, one token after the other; everything that it may do wrong is in here.
template <Wrong kWrong>
class Mutant final : public Experts {
 public:
  static constexpr bool is(Wrong wrong) { return kWrong == wrong; }
  std::string_view name() const override { return "mutant"; }
  Verdict supports(const Problem& p) const override {
    if (is(Wrong::says_yes_to_anything)) return Verdict::yes();
    const Verdict v = experts::check_problem(p, ActivationFormat::standard);
    return is(Wrong::silent_refusal) && !v.ok() ? Verdict::no("") : v;
  }
  Formats activation_formats() const override { return {}; }
  bool accepts(const PackFormat& format) const override { return &format == &experts::canonical_format(); }
  const PackFormat& preferred_format(const WeightsSpec&) const override { return experts::canonical_format(); }
  InputSpec input_spec(const Problem& p) const override { return experts::input_spec(p); }
  ExpertsWorkspace workspace(const Problem& p, const ExpertTokens*) const override {
    return sizes(p.weights, p.size.M, p.out_dtype.value_or(DType::f32));
  }
  WeightAndReduce weight_and_reduce() const override { return WeightAndReduce::no_op(); }
  Determinism determinism() const override { return Determinism::batch_invariant; }
  double estimate_us(const Problem&, const Ceilings&) const override { return 1; }

  /// Some write what another call reads: nothing for the thread sanitizer to tell us.
  [[gnu::no_sanitize("thread")]] Status apply(const ExpertsArgs& args, ExpertsResult& result) const override {
    ProblemSize size;
    if (Status s = experts::call_size(args, size); !s.ok()) return s;
    ExpertsWorkspace needed = sizes(args.weights.spec, size.M, args.output.dtype);
    if (is(Wrong::accepts_small_workspace)) needed.w13_bytes = needed.w2_bytes = 0;
    if (is(Wrong::writes_output_before_it_checks)) args.output.as<std::byte>()[0] = std::byte{0};
    if (Status s = experts::check_call(args, ActivationFormat::standard, needed, size); !s.ok()) return s;
    float* scratch = reinterpret_cast<float*>(args.workspace2.data);
    static std::vector<float> shared(1 << 16);
    if (is(Wrong::shares_static_scratch)) scratch = shared.data();
    for (std::int64_t t = 0; t < size.M; ++t) run_token(args, t, size, scratch);
    if (is(Wrong::writes_beyond_output))
      args.output.as<std::byte>()[args.output.numel() * bytes(args.output.dtype)] = {};
    if (is(Wrong::writes_beyond_workspace)) args.workspace2.data[args.workspace2.size] = std::byte{0};
    if (is(Wrong::writes_input) && size.M > 0) args.routing.ids.as<std::int32_t>()[0] = -1;
    result.output = args.output;
    return {};
  }

 private:
  static ExpertsWorkspace sizes(const WeightsSpec& spec, std::int64_t M, DType output) {
    const std::int64_t floats = 2 * spec.hidden + 4 * spec.intermediate;
    const std::size_t odd = is(Wrong::shrinking_workspace) && M > 16 ? 0 : 256;
    return {odd, static_cast<std::size_t>(floats) * 4, {output, 2, {M, spec.hidden}}};
  }

  std::int64_t slot_of(const ExpertsArgs& args, std::int32_t id) const {
    const std::int64_t L = args.weights.spec.num_local;
    if (is(Wrong::minus_one_is_expert_0) && id == -1) id = 0;
    if (is(Wrong::clamps_wild_ids) && id != -1)
      id = static_cast<std::int32_t>(std::clamp<std::int64_t>(id, 0, args.num_experts - 1));
    ExpertsArgs seen = args;
    if (is(Wrong::ignores_the_map)) seen.expert_map = nullptr;
    if (is(Wrong::maps_local_ids)) seen.routing.id_space = IdSpace::physical;
    std::int64_t slot = experts::local_slot(id, seen);
    if (is(Wrong::takes_the_next_expert) && slot >= 0) slot = (slot + 1) % L;
    return slot;
  }

  void run_token(const ExpertsArgs& args, std::int64_t t, const ProblemSize& size, float* scratch) const {
    float *sum = scratch, *y = scratch + size.K, *h = y + size.K;
    const Tensor& out = args.output;
    std::fill_n(sum, size.K, 0.0f);
    if (is(Wrong::adds_to_what_is_there))
      for (std::int64_t c = 0; c < size.K; ++c) sum[c] = numeric::load_f32(out.data, out.dtype, t * size.K + c);
    const std::int64_t id_stride = is(Wrong::ignores_id_stride) ? size.k : args.routing.ids.stride[0];
    for (std::int64_t j = 0; j < size.k; ++j) {
      const std::int32_t id = args.routing.ids.as<std::int32_t>()[t * id_stride + j];
      if (is(Wrong::counts_repeats_once) && j > 0 && id == args.routing.ids.as<std::int32_t>()[t * id_stride]) continue;
      const std::int64_t slot = slot_of(args, id);
      if (slot < 0) continue;
      float weight = args.routing.weights.at<float>(t, j);
      if (is(Wrong::weights_twice)) weight *= weight;
      if ((args.weight_on_input && !is(Wrong::weights_the_input_again)) || is(Wrong::does_not_weight)) weight = 1;
      run_route(args, slot, t, h, y);
      for (std::int64_t c = 0; c < size.K; ++c) sum[c] += weight * y[c];
      if (is(Wrong::w2_bias_not_weighted) && args.weights.spec.w2_bias) {
        const auto expert = view(args, slot);
        for (std::int64_t c = 0; c < size.K; ++c) sum[c] += (1 - weight) * expert.down_bias[c];
      }
    }
    if (is(Wrong::multiplies_by_a_mask))  // 0 · another token's NaN
      for (std::int64_t c = 0; c < size.K; ++c)
        for (std::int64_t other = 0; other < size.M; ++other)
          sum[c] += 0.0f * static_cast<float>(experts::ActivationRow(args, 0, other)[c]);
    if (is(Wrong::bits_depend_on_threads) && args.context.stream.executor->concurrency() > 2) nudge(sum[0]);
    if (is(Wrong::bits_depend_on_batch) && size.M > 1) nudge(sum[0]);
    for (std::int64_t c = 0; c < size.K; ++c) {
      if (is(Wrong::drops_last_token) && t > 0 && t == size.M - 1) continue;
      if (is(Wrong::drops_last_column) && c == size.K - 1) continue;
      const float value = is(Wrong::rounds_output_to_bf16) ? numeric::round_to(DType::bf16, sum[c]) : sum[c];
      numeric::store_f32(out.data, out.dtype, t * size.K + c, value);
    }
  }
  static void nudge(float& x) { x = std::nextafter(x, 1e30f); }

  static experts::ExpertMatrices view(const ExpertsArgs& args, std::int64_t slot) {
    const WeightsSpec& spec = args.weights.spec;
    experts::ExpertMatrices e(spec, experts::CanonicalLayout(spec).view(args.weights.expert(slot)));
    if (is(Wrong::swaps_gate_and_up) && spec.gated) std::swap(e.gate, e.up);
    if (is(Wrong::skips_w1_bias)) e.gate_bias = e.up_bias = nullptr;
    if (is(Wrong::skips_w2_bias)) e.down_bias = nullptr;
    if (is(Wrong::first_scale_for_every_group)) e.up.block = {-1, -1};
    if (is(Wrong::down_transposed))  // read as if it were stored [I, K]
      e.down.data = Tensor(e.down.data.data, e.down.data.dtype, {spec.intermediate, spec.hidden}).transposed();
    return e;
  }

  static float dot(const experts::WeightMatrix& m, std::int64_t row, const float* x, std::int64_t n) {
    float sum = 0;
    for (std::int64_t i = 0; i < n; ++i) {
      sum += m(row, i) * x[i];
      if (is(Wrong::sums_in_bf16)) sum = numeric::round_to(DType::bf16, sum);
    }
    return sum;
  }

  void run_route(const ExpertsArgs& args, std::int64_t slot, std::int64_t t, float* h, float* y) const {
    const std::int64_t K = args.weights.spec.hidden, I = args.weights.spec.intermediate;
    const experts::ExpertMatrices expert = view(args, slot);
    ExpertsArgs seen = args;
    if (is(Wrong::ignores_row_stride)) seen.activations.data.stride[0] = K;
    if (is(Wrong::neighbour_token)) t = t ^ 1 ? std::min(t ^ 1, args.routing.num_tokens() - 1) : t;
    const experts::ActivationRow row(seen, slot, t);
    for (std::int64_t k = 0; k < K; ++k) y[k] = static_cast<float>(row[k]);  // y is free until GEMM2
    if (is(Wrong::drops_last_k) && K > 1) y[K - 1] = 0;
    Activation activation = args.activation;
    if (is(Wrong::silu_for_everything)) activation = Activation{ActivationKind::silu, activation.gated};
    if (is(Wrong::ignores_clamps)) activation.clamp_gate = activation.clamp_up = INFINITY;
    if (is(Wrong::ignores_beta)) activation.beta = 0;
    if (is(Wrong::ignores_alpha)) activation.alpha = 1;
    for (std::int64_t i = 0; i < I; ++i) {
      const float gate =
          (activation.gated ? dot(expert.gate, i, y, K) : 0.0f) + (expert.gate_bias ? expert.gate_bias[i] : 0.0f);
      const float up = dot(expert.up, i, y, K) + (expert.up_bias ? expert.up_bias[i] : 0.0f);
      h[i] = experts::activate(activation, gate, up);
      if (is(Wrong::rounds_h_to_bf16)) h[i] = numeric::round_to(DType::bf16, h[i]);
    }
    if (is(Wrong::drops_last_i) && I > 1) h[I - 1] = 0;
    if (experts::quantises_h(args) && !is(Wrong::keeps_h_unquantised)) quantise(args, slot, t, h, I);
    for (std::int64_t c = 0; c < K; ++c)
      y[c] = dot(expert.down, c, h, I) + (expert.down_bias ? expert.down_bias[c] : 0.0f);
  }

  static void quantise(const ExpertsArgs& args, std::int64_t slot, std::int64_t t, float* h, std::int64_t I) {
    if (is(Wrong::static_a2_of_expert_0)) slot = 0;
    quant::RowScheme scheme = experts::h_scheme(args, slot, t);
    if (is(Wrong::quantises_h_by_127_5)) scheme.int8_divisor = 127.5f;
    if (is(Wrong::ignores_static_a2)) scheme.static_scale = 0;
    auto* codes = reinterpret_cast<std::byte*>(h + I);
    float* scales = h + 2 * I;
    quant::quantise_row({h, DType::f32, I}, scheme, codes, scales);
    for (std::int64_t i = 0; i < I; ++i)
      h[i] = numeric::load_f32(codes, scheme.type, i) * scales[quant::scale_index(i, scheme.group)];
  }
};

template <Wrong kWrong>
std::unique_ptr<Experts> make_mutant(const MakeContext&) {
  return std::make_unique<Mutant<kWrong>>();
}
Verdict anywhere() { return Verdict::yes(); }

std::vector<CheckResult> run(const ExpertsEntry& entry, const char* scheme, std::vector<std::string> shapes,
                             bool values_only = false) {
  SuiteOptions options;
  options.schemes = {scheme};
  options.shapes = std::move(shapes);
  options.values_only = values_only;
  return run_experts_suite({&entry, 1}, options);
}

struct Row {
  ExpertsEntry entry;
  const char* scheme;
  const char* check;  ///< one that must fail
};
#define MUTANT(wrong, scheme, check) \
  Row { {#wrong, &make_mutant<Wrong::wrong>, &anywhere}, scheme, check }

const Row kMutants[] = {
    MUTANT(drops_last_token, "f32", "values"),
    MUTANT(drops_last_token, "bf16", "values"),
    MUTANT(swaps_gate_and_up, "f32", "values"),
    MUTANT(swaps_gate_and_up, "int8", "values"),
    MUTANT(swaps_gate_and_up, "fp8_block128", "values"),
    MUTANT(takes_the_next_expert, "f32", "values"),
    MUTANT(takes_the_next_expert, "int8", "values"),
    MUTANT(takes_the_next_expert, "fp8_block128", "values"),
    MUTANT(drops_last_k, "f32", "values"),
    MUTANT(drops_last_k, "bf16", "values"),
    MUTANT(drops_last_k, "int8", "values"),
    MUTANT(drops_last_k, "fp8_block128", "values"),
    MUTANT(drops_last_i, "f32", "values"),
    MUTANT(drops_last_i, "bf16", "values"),
    MUTANT(drops_last_i, "int8", "values"),
    MUTANT(drops_last_i, "fp8_block128", "values"),
    MUTANT(drops_last_column, "f32", "values"),
    MUTANT(skips_w1_bias, "f32", "w1_bias"),
    MUTANT(skips_w1_bias, "int8", "w1_bias"),
    MUTANT(skips_w2_bias, "f32", "w2_bias"),
    MUTANT(skips_w2_bias, "fp8_block128", "w2_bias"),
    MUTANT(w2_bias_not_weighted, "f32", "w2_bias"),
    MUTANT(does_not_weight, "f32", "values"),
    MUTANT(weights_twice, "f32", "values"),
    MUTANT(weights_the_input_again, "f32", "router_weight_on_the_input_is_not_applied_again"),
    MUTANT(weights_the_input_again, "int8", "router_weight_on_the_input_is_not_applied_again"),
    MUTANT(counts_repeats_once, "f32", "the_same_expert_twice_counts_twice"),
    MUTANT(clamps_wild_ids, "f32", "topk_id_out_of_range_reads_nothing"),
    MUTANT(minus_one_is_expert_0, "f32", "minus_one_is_not_routed"),
    MUTANT(ignores_the_map, "f32", "expert_map_uneven_split"),
    MUTANT(ignores_the_map, "f32", "expert_map_none_local"),
    MUTANT(maps_local_ids, "f32", "local_ids_are_not_mapped_again"),
    MUTANT(ignores_row_stride, "f32", "rows_strided_by_5_more"),
    MUTANT(ignores_row_stride, "int8", "rows_strided_by_1_more"),
    MUTANT(ignores_id_stride, "f32", "rows_strided_by_1_more"),
    MUTANT(rounds_h_to_bf16, "f32", "values"),
    MUTANT(sums_in_bf16, "bf16", "values"),
    MUTANT(rounds_output_to_bf16, "bf16", "values"),
    MUTANT(silu_for_everything, "f32", "activation_gelu"),
    MUTANT(silu_for_everything, "f32", "activation_relu2_ungated"),
    MUTANT(silu_for_everything, "f32", "activation_swigluoai"),
    MUTANT(silu_for_everything, "int8", "activation_gelu_tanh"),
    MUTANT(ignores_clamps, "f32", "activation_swigluoai_that_clamps"),
    MUTANT(ignores_clamps, "fp8_block128", "activation_silu_with_clamps_and_alpha"),
    MUTANT(ignores_beta, "f32", "activation_swigluoai"),
    MUTANT(ignores_alpha, "f32", "activation_swigluoai"),
    MUTANT(keeps_h_unquantised, "int8", "values"),
    MUTANT(keeps_h_unquantised, "fp8_block128", "values"),
    MUTANT(quantises_h_by_127_5, "int8", "values"),
    MUTANT(first_scale_for_every_group, "int8", "values"),
    MUTANT(first_scale_for_every_group, "fp8_block128", "values"),
    MUTANT(ignores_static_a2, "int8", "static_scale_of_the_second_gemm"),
    MUTANT(static_a2_of_expert_0, "int8", "static_scale_per_expert"),
    MUTANT(static_a2_of_expert_0, "fp8_block128", "static_scale_per_expert"),
    MUTANT(down_transposed, "f32", "values"),
    MUTANT(down_transposed, "f32", "hot_weights_give_the_closed_form"),
    MUTANT(neighbour_token, "f32", "values"),
    MUTANT(neighbour_token, "f32", "flat_weights_give_the_closed_form"),
    MUTANT(adds_to_what_is_there, "f32", "values"),
    MUTANT(multiplies_by_a_mask, "f32", "nan_and_inf_stay_in_their_token"),
    MUTANT(writes_beyond_output, "f32", "values"),
    MUTANT(writes_beyond_workspace, "f32", "values"),
    MUTANT(writes_input, "f32", "values"),
    MUTANT(bits_depend_on_threads, "f32", "threads_do_not_change_bits"),
    MUTANT(bits_depend_on_batch, "f32", "other_tokens_do_not_change_bits"),
    MUTANT(shrinking_workspace, "f32", "workspace_is_monotone"),
    MUTANT(silent_refusal, "f32", "refusals_have_reasons"),
    MUTANT(says_yes_to_anything, "f32", "refusals_have_reasons"),
    MUTANT(accepts_small_workspace, "f32", "calls_that_do_not_fit_are_refused"),
    MUTANT(writes_output_before_it_checks, "f32", "calls_that_do_not_fit_are_refused"),
};

TEST(suite_finds, nothing_where_nothing_is_wrong) {
  const ExpertsEntry right{"mutant", &make_mutant<Wrong::nothing>, &anywhere};
  for (const char* scheme : {"f32", "bf16", "f16", "int8", "fp8_block128"})
    for (const CheckResult& r : run(right, scheme, {"e4k2h136i20 M=5"})) EXPECT_TRUE(r.ok) << to_string(r);
}

TEST(suite_finds, every_mutant_by_the_check_that_is_about_it) {
  for (const Row& mutant : kMutants) {
    bool found = false, ran = false;
    for (const CheckResult& r : run(mutant.entry, mutant.scheme, {"e4k2h136i20 M=5"})) {
      ran = ran || r.check == mutant.check;
      found = found || (!r.ok && r.check == mutant.check);
    }
    EXPECT_TRUE(ran) << "no check is called " << mutant.check;
    EXPECT_TRUE(found) << mutant.entry.name << " with " << mutant.scheme << " weights passes " << mutant.check;
  }
}

TEST(suite_finds, calls_that_share_hidden_state) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "the data race is the point";
#endif
  const ExpertsEntry entry{"shares", &make_mutant<Wrong::shares_static_scratch>, &anywhere};
  bool found = false;
  for (int attempt = 0; attempt < 20 && !found; ++attempt)
    for (const CheckResult& r : run(entry, "f32", {"e8k4h256i64 M=64"}))
      found = found || (!r.ok && r.check == "two_calls_at_once");
  EXPECT_TRUE(found);
}

/// Worst-case bounds grow with the number of terms; mistakes of one element must still stick out.
TEST(suite_finds, one_missing_element_among_many) {
  for (const char* shape : {"e2k1h2880i17 M=33", "e2k1h17i2880 M=33", "e2k1h512i512 M=33"}) {
    const ExpertsEntry k{"drops_last_k", &make_mutant<Wrong::drops_last_k>, &anywhere};
    const ExpertsEntry i{"drops_last_i", &make_mutant<Wrong::drops_last_i>, &anywhere};
    EXPECT_FALSE(run(k, "f32", {shape}, true)[0].ok) << shape;
    EXPECT_FALSE(run(i, "f32", {shape}, true)[0].ok) << shape;
  }
}

}  // namespace
}  // namespace moekit
