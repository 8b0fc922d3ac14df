// Variants of a case whose values are compared with the oracle: what sizes alone do not say.
#include <cmath>
#include <limits>

#include "testing/suite.hpp"
#include "text.hpp"

namespace moekit::suite {
namespace {

using Fill = SuiteWeights::Fill;

SuiteCase named(SuiteCase c, std::string check) {
  c.check = std::move(check);
  return c;
}

/// The case again with another configuration (activation, biases, types): new weights of the same sizes.
SuiteCase with_config(const SuiteCase& base, const LayerConfig& config, std::string check, std::uint64_t seed = 3) {
  SuiteCase c = make_case(config, base.M, std::make_shared<SuiteWeights>(spec_of(config), Fill::random, seed), seed);
  c.shape = base.shape;
  return named(std::move(c), std::move(check));
}

void routing(Suite& suite, const SuiteCase& base) {
  const std::int64_t E = base.num_experts(), M = base.M, k = base.k;
  SuiteCase c = named(base, "all_tokens_to_one_expert");
  for (std::int64_t t = 0; t < M; ++t)
    for (std::int64_t j = 0; j < k; ++j) c.set_id(t, j, j == 0 ? E - 1 : -1);
  suite.check_values(c);

  c = named(base, "the_same_expert_twice_counts_twice");
  for (std::int64_t t = 0; t < M; ++t)
    for (std::int64_t j = 0; j < k; ++j) c.set_id(t, j, t % E);
  suite.check_values(c);

  c = named(base, "experts_without_tokens");
  for (std::int32_t& id : c.ids)
    if (id % 2 == 1) id = 0;
  suite.check_values(c);

  c = named(base, "minus_one_is_not_routed");
  Random random(11);
  for (std::int64_t t = 0; t < M; ++t)
    for (std::int64_t j = 0; j < k; ++j)
      if (t == M / 2 || random.below(3) == 0) c.set_id(t, j, -1);
  suite.check_values(c);

  c = named(base, "nothing_is_routed");
  for (std::int32_t& id : c.ids) id = -1;
  suite.check_values(c);

  c = named(base, "topk_id_out_of_range_reads_nothing");
  const std::int64_t wild[] = {E, E + 7, std::numeric_limits<std::int32_t>::max(),
                               std::numeric_limits<std::int32_t>::min(), -2};
  for (std::int64_t t = 0; t < M; ++t) c.set_id(t, t % k, wild[t % 5]);
  suite.check_values(c);

  c = named(base, "router_weights_of_any_sign_and_size");
  for (std::size_t i = 0; i < c.route_weights.size(); ++i)
    c.route_weights[i] =
        i % 4 == 0 ? 0.0f : (i % 2 == 0 ? 1.0f : -1.0f) * std::ldexp(1.0f, static_cast<int>(i % 9) - 4);
  suite.check_values(c);

  c = named(base, "more_slots_than_experts");
  c.k = E + 3;
  c.ids.resize(static_cast<std::size_t>(M * c.k));
  c.route_weights.assign(c.ids.size(), 0.125f);
  for (std::size_t i = 0; i < c.ids.size(); ++i) c.ids[i] = static_cast<std::int32_t>(static_cast<std::int64_t>(i) % E);
  suite.check_values(c);
}

void strides(Suite& suite, const SuiteCase& base) {
  for (std::int64_t padding : {1, 5, 64}) {
    SuiteCase c = named(base, text::concat("rows_strided_by_", padding, "_more"));
    c.padding = padding;
    suite.check_values(c);
  }
}

/// P ids, some of them here: experts of this rank are spread unevenly over the id space.
void expert_maps(Suite& suite, const SuiteCase& base) {
  const std::int64_t P = base.num_experts() + 3;
  auto mapped = [&](const char* check, std::int64_t num_local, auto slot_of) {
    SuiteCase c = named(base, check);
    c.num_local = num_local;
    c.map.clear();
    for (std::int64_t id = 0; id < P; ++id) c.map.push_back(static_cast<std::int32_t>(slot_of(id)));
    c.k = std::min<std::int64_t>(base.k + 1, P);
    Random random(5);
    route_randomly(c, random);
    suite.check_values(c);
    if (c.M > 0) c.set_id(0, 0, P), c.set_id(c.M - 1, c.k - 1, std::numeric_limits<std::int32_t>::max());
    c.check += "_with_wild_ids";
    suite.check_values(c);
  };
  const std::int64_t L = (base.num_local + 1) / 2;
  mapped("expert_map_uneven_split", L, [&](std::int64_t id) { return id >= 2 && id - 2 < L ? L - 1 - (id - 2) : -1; });
  mapped("expert_map_none_local", L, [](std::int64_t) { return -1; });
  mapped("expert_map_last_ids_local", L, [&](std::int64_t id) { return id >= P - L ? id - (P - L) : -1; });
  mapped("expert_map_replicas_share_a_slot", L, [&](std::int64_t id) { return id % L; });
  mapped("expert_map_entries_out_of_range_are_not_here", L, [&](std::int64_t id) { return id % 2 == 0 ? 0 : L + id; });

  SuiteCase c = named(base, "local_ids_are_not_mapped_again");
  c.id_space = IdSpace::local;
  for (std::int64_t id = 0; id < P; ++id) c.map.push_back(-1);
  suite.check_values(c);
}

void weight_on_input(Suite& suite, const SuiteCase& base) {
  SuiteCase c = named(base, "router_weight_on_the_input_is_not_applied_again");
  c.k = 1;
  c.weight_on_input = true;
  Random random(8);
  route_randomly(c, random);
  for (float& weight : c.route_weights) weight = 0.37f;
  suite.check_values(c);
}

void biases(Suite& suite, const SuiteCase& base) {
  for (int which = 1; which < 4; ++which) {
    LayerConfig config = base.config;
    config.w1_bias = (which & 1) != 0;
    config.w2_bias = (which & 2) != 0;
    suite.check_values(with_config(base, config, which == 1 ? "w1_bias" : which == 2 ? "w2_bias" : "both_biases"));
  }
}

void activations(Suite& suite, const SuiteCase& base) {
  std::vector<std::pair<const char*, Activation>> all;
  using Kind = ActivationKind;
  for (Kind kind : {Kind::silu, Kind::gelu, Kind::gelu_tanh, Kind::relu2}) {
    all.emplace_back(name(kind), Activation{kind, true});
    all.emplace_back(name(kind), Activation{kind, false});
  }
  all.emplace_back("none", Activation{Kind::none, false});
  all.emplace_back("swigluoai", Activation::swigluoai());
  all.emplace_back("swigluoai_that_clamps", Activation::swigluoai(0.5f, 1.2f));
  Activation clamped{Kind::silu, true};
  clamped.clamp_gate = 0.75f, clamped.clamp_up = 0.5f, clamped.alpha = 1.5f;
  all.emplace_back("silu_with_clamps_and_alpha", clamped);
  for (const auto& [label, activation] : all) {
    LayerConfig config = base.config;
    config.activation = activation;
    suite.check_values(
        with_config(base, config, text::concat("activation_", label, activation.gated ? "" : "_ungated")));
  }
}

void types(Suite& suite, const SuiteCase& base) {
  for (DType type : {DType::f32, base.config.dtype}) {
    SuiteCase c = named(base, text::concat("output_as_", name(type)));
    c.out_dtype = type;
    suite.check_values(c);
  }
  for (DType type : {DType::f32, DType::bf16, DType::f16}) {
    if (type == base.config.dtype) continue;
    LayerConfig config = base.config;
    config.dtype = type;
    suite.check_values(with_config(base, config, text::concat("rows_as_", name(type))));
  }
  if (!base.config.quant.activations_quantised()) return;
  LayerConfig config = base.config;
  throw_if_failed(quant_from_names(weights_scheme(config.quant), "bf16", config.quant));
  suite.check_values(with_config(base, config, "weights_quantised_rows_exact"));
}

void static_scales(Suite& suite, const SuiteCase& base) {
  if (!base.config.quant.activations_quantised()) return;
  SuiteCase c = named(base, "static_scale_of_the_first_gemm");
  c.config.quant.a1.static_scale = true;
  c.a1_scale = {base.config.quant.a1.type == DType::i8 ? 0.015625f : 0.0078125f};
  suite.check_values(c);
  c = named(base, "static_scale_of_the_second_gemm");
  c.config.quant.a2.static_scale = true;
  c.a2_scale = {0.0078125f};
  suite.check_values(c);
  c.check = "static_scale_per_expert";
  c.a2_scale.clear();
  for (std::int64_t e = 0; e < c.num_local; ++e) c.a2_scale.push_back(0.00390625f * static_cast<float>(1 + e % 5));
  suite.check_values(c);
  if (c.M > 0) {
    c.check = "static_scale_per_row";
    c.a2_per_row = true;
    c.a2_scale.clear();
    for (std::int64_t t = 0; t < c.M; ++t) c.a2_scale.push_back(0.00390625f * static_cast<float>(1 + t % 5));
    suite.check_values(c);
  }
  if (base.config.quant.a1.type != DType::i8) return;
  c = named(base, "int8_divisor_127_5");
  c.config.quant.int8_divisor = 127.5f;
  suite.check_values(c);
}

/// Rows of zeros, of numbers near the ends of the range, and one that is much louder than the others.
void odd_rows(Suite& suite, const SuiteCase& base) {
  SuiteCase c = named(base, "rows_of_zeros_and_of_tiny_numbers");
  const float sizes[] = {0.0f, 1e-45f, 6.3e-38f, 1.3e-36f, 7e-36f, 1e-30f, 100.0f, 1.0f};
  for (std::int64_t t = 0; t < c.M; ++t)
    for (std::int64_t i = 0; i < c.K(); ++i) {
      float& value = c.rows[static_cast<std::size_t>(t * c.K() + i)];
      value = numeric::round_to(c.config.dtype, value * sizes[t % 8]);
    }
  suite.check_values(c);
}

/// Closed forms, with no oracle in between: y = Σ_j w · d·u·a·silu(g·a), a what reaches every row of h.
void closed_forms(Suite& suite, const SuiteCase& base) {
  if (base.config.quant.weights_quantised()) return;
  LayerConfig config = base.config;
  config.hidden = 64;
  config.intermediate = 32;  // powers of two: factors over K and I are exact in every type
  auto case_of = [&](Fill fill, const char* check, auto row) {
    SuiteCase c = make_case(config, base.M, std::make_shared<SuiteWeights>(spec_of(config), fill, 1), 2);
    for (std::int64_t t = 0; t < c.M; ++t)
      for (std::int64_t h = 0; h < config.hidden; ++h)
        c.rows[static_cast<std::size_t>(t * config.hidden + h)] = static_cast<float>(row(t, h));
    c.check = check;
    return c;
  };
  auto sum = [](const SuiteCase& c, std::int64_t t, double a, double copies) {
    double y = 0;
    for (std::int64_t j = 0; j < c.k; ++j) {
      const auto at = static_cast<std::size_t>(t * c.k + j);
      if (c.ids[at] < 0) continue;
      const PatternFactors f = pattern_factors(c.ids[at]);
      const double ga = f.g * a;
      y += static_cast<double>(c.route_weights[at]) * copies * f.d * f.u * a * ga / (1 + std::exp(-ga));
    }
    return y;
  };
  auto level = [](std::int64_t t) { return 1.0 + static_cast<double>(t % 4); };
  const SuiteCase flat =
      case_of(Fill::flat, "flat_weights_give_the_closed_form", [&](std::int64_t t, std::int64_t) { return level(t); });
  suite.check_values(flat, [&](std::int64_t t, std::int64_t) { return sum(flat, t, level(t), 1); });

  auto ramp = [](std::int64_t t, std::int64_t h) {
    return (1.0 + static_cast<double>(h % 8) / 8) * (t % 2 == 0 ? 1.0 : -0.5);
  };
  config.hidden = base.config.hidden, config.intermediate = base.config.intermediate;
  const SuiteCase hot = case_of(Fill::hot, "hot_weights_give_the_closed_form", ramp);
  suite.check_values(hot, [&](std::int64_t t, std::int64_t c) {
    const std::int64_t K = config.hidden, I = config.intermediate, column = c % I;
    // h[i] = ramp(i mod K) where i mod K = c mod I: that many copies
    std::int64_t copies = 0;
    for (std::int64_t i = 0; i < I; ++i) copies += i % K == column;
    return sum(hot, t, ramp(t, column), static_cast<double>(copies));
  });
}

}  // namespace

void check_variants(Suite& suite, const SuiteCase& base) {
  routing(suite, base);
  strides(suite, base);
  expert_maps(suite, base);
  weight_on_input(suite, base);
  biases(suite, base);
  activations(suite, base);
  types(suite, base);
  static_scales(suite, base);
  odd_rows(suite, base);
  closed_forms(suite, base);
}

}  // namespace moekit::suite
