#include "io/layer_config.hpp"

#include <algorithm>
#include <cmath>

#include <moekit/status.hpp>

#include "text.hpp"

namespace moekit::io {
using text::concat;

namespace {

constexpr std::int64_t kMostLayers = 10'000;

struct ActivationName {
  std::string_view name;
  ActivationKind kind;
};
constexpr ActivationName kActivations[] = {
    {"silu", ActivationKind::silu},   {"swish", ActivationKind::silu},
    {"gelu", ActivationKind::gelu},   {"gelu_pytorch_tanh", ActivationKind::gelu_tanh},
    {"relu2", ActivationKind::relu2},
};

[[noreturn]] void not_known(const Fields& config, std::string_view key, std::string_view what, std::string hint) {
  throw Error(StatusCode::unsupported,
              concat("[checkpoint] ", config.file(), ": \"", config.key_path(key), "\" ", what), std::move(hint),
              config.key_path(key));
}

/// The value under whichever spelling is there; several must agree.
std::int64_t require(const Fields& config, const Names& keys) {
  std::optional<std::int64_t> value;
  std::string_view found;
  for (const std::string_view key : keys) {
    if (key.empty()) continue;
    const auto other = config.integer(key);
    if (!other) continue;
    if (value && *value != *other) config.fail(key, concat("is ", *other, ", but \"", found, "\" is ", *value));
    value = other;
    found = key;
  }
  if (!value)
    config.fail(keys[0],
                keys[1].empty() ? std::string("is missing") : concat("is missing (also read as \"", keys[1], "\")"));
  if (*value < 1) config.fail(found, concat("must be at least 1, got ", *value));
  return *value;
}

std::int64_t require(const Fields& config, std::string_view key, std::int64_t least) {
  const auto value = config.integer(key);
  if (!value) config.fail(key, "is missing");
  if (*value < least) config.fail(key, concat("must be at least ", least, ", got ", *value));
  return *value;
}

std::int64_t optional(const Fields& config, std::string_view key, std::int64_t fallback, std::int64_t least) {
  return config.has(key) ? require(config, key, least) : fallback;
}

bool is_moe(const Family& family, const Fields& config, std::int64_t i) {
  switch (family.layers) {
    case MoeLayers::all: return true;
    case MoeLayers::sparse_step: {
      const auto dense = config.integers("mlp_only_layers");
      if (dense && std::find(dense->begin(), dense->end(), i) != dense->end()) return false;
      return (i + 1) % optional(config, "decoder_sparse_step", 1, 1) == 0;
    }
    case MoeLayers::after_dense:
      return i >= require(config, "first_k_dense_replace", 0) && i % optional(config, "moe_layer_freq", 1, 1) == 0;
    case MoeLayers::listed: {
      if (const auto moe = config.integers("moe_layers")) return std::find(moe->begin(), moe->end(), i) != moe->end();
      return (i + 1) % optional(config, "interleave_moe_layer_step", 1, 1) == 0;
    }
  }
  return false;
}

std::vector<std::int64_t> moe_layers(const Family& family, const Fields& config) {
  const std::int64_t count = require(config, family.keys.num_layers);
  if (count > kMostLayers)
    config.fail(family.keys.num_layers[0], concat("is ", count, ", at most ", kMostLayers, " layers are read"));
  std::vector<std::int64_t> out;
  for (std::int64_t i = 0; i < count; ++i)
    if (is_moe(family, config, i)) out.push_back(i);
  if (out.empty()) config.fail(family.keys.num_layers[0], concat("is ", count, ", and none of these layers is MoE"));
  return out;
}

/// A key whose value is fixed by the family, if it is there at all.
void check_fixed(const Fields& config, std::string_view key, const Names& allowed) {
  const auto value = config.string(key);
  if (!value || allowed[0].empty() || std::find(allowed.begin(), allowed.end(), *value) != allowed.end()) return;
  std::string list;
  for (const std::string_view name : allowed) list += concat(name.empty() || list.empty() ? "" : " ", name);
  not_known(config, key, concat("is \"", *value, "\", which this family is not known to use"),
            concat("known here: ", list));
}

void read_groups(const RouterRule& rule, const Fields& config, RouterConfig& router) {
  if (rule.groups == Groups::none) return;
  if (rule.groups == Groups::by_topk_method && config.string("topk_method").value_or("greedy") == "greedy") return;
  router.num_groups = require(config, "n_group", 1);
  router.keep_groups = require(config, "topk_group", 1);
  router.group_score = rule.group_score;
  router.group_fill = rule.group_fill;
}

void read_renormalise(const RouterRule& rule, const Fields& config, RouterConfig& router) {
  router.renorm_eps = rule.renorm_eps;
  switch (rule.renormalise) {
    case Renormalise::never: return;
    case Renormalise::always: router.renormalise = true; return;
    case Renormalise::by_norm_topk_prob:
      router.renormalise = config.boolean("norm_topk_prob").value_or(rule.renormalise_default);
      return;
    case Renormalise::by_norm_order: {
      constexpr std::string_view kKey = "moe_normalize_expert_weights";
      if (config.json().find(kKey) && !config.has(kKey)) return;  // null: no division; no key: the 1-norm
      router.renormalise = true;
      router.renorm_p = static_cast<float>(config.number(kKey).value_or(1.0));
    }
  }
}

RouterConfig read_router(const RouterRule& rule, const Fields& config) {
  check_fixed(config, "scoring_func", {rule.scoring_func});
  check_fixed(config, "topk_method", rule.topk_methods);
  RouterConfig router;
  router.score = rule.score;
  router.softmax_over = rule.softmax_over;
  router.logit_bias = !rule.logit_bias.empty();
  router.selection_bias = !rule.selection_bias.empty();
  router.weight_on_input = rule.weight_on_input;
  read_groups(rule, config, router);
  read_renormalise(rule, config, router);
  if (rule.scaled) {
    const auto scale = config.number("routed_scaling_factor");
    if (!scale) config.fail("routed_scaling_factor", "is missing");
    router.scale = static_cast<float>(*scale);
  }
  return router;
}

Activation read_activation(const Family& family, const Fields& config) {
  const std::string_view key = family.keys.activation;
  if (family.swigluoai) {
    config.string(key);  // says silu, which is not what the family does; still, not any value
    return Activation::swigluoai(static_cast<float>(config.number("swiglu_limit").value_or(7.0)),
                                 static_cast<float>(config.number("swiglu_alpha").value_or(1.702)));
  }
  Activation out;
  const Json* value = config.find(key);
  if (!value) return out;  // every family here defaults to silu
  if (value->object()) {
    const Fields described = *config.fields(key);
    const auto name = described.string("name");
    if (!name) described.fail("name", "is missing: an activation is a name, or an object that has one");
    out.kind = activation_from_name(*name, config, key);
  } else {
    out.kind = activation_from_name(*config.string(key), config, key);
  }
  return out;
}

SharedExpertConfig read_shared(const Family& family, const Fields& config, const LayerConfig& layer) {
  SharedExpertConfig shared;
  const SharedRule& rule = family.shared;
  switch (rule.width) {
    case SharedWidth::none: return shared;
    case SharedWidth::by_key: shared.intermediate = require(config, rule.key, 0); break;
    case SharedWidth::count_times_intermediate:
      if (__builtin_mul_overflow(optional(config, rule.key, 0, 0), layer.intermediate, &shared.intermediate))
        config.fail(rule.key, "is too large");
      break;
    case SharedWidth::intermediate: shared.intermediate = layer.intermediate; break;
  }
  if (shared.intermediate == 0) return shared;
  shared.sigmoid_gate = !rule.gate_vector.empty();
  shared.activation = layer.activation;
  return shared;
}

}  // namespace

ActivationKind activation_from_name(const std::string& name, const Fields& config, std::string_view key) {
  std::string known;
  for (const ActivationName& entry : kActivations) {
    if (entry.name == name) return entry.kind;
    known += concat(known.empty() ? "" : " ", entry.name);
  }
  not_known(config, key, concat("is \"", name, "\", an activation that is not known here"),
            concat("there are: ", known));
}

ModelConfig read_model_config(const Family& family, const Fields& config) {
  const ConfigKeys& keys = family.keys;
  std::optional<Fields> section;
  if (!keys.section.empty()) {
    section = config.fields(keys.section);
    if (!section) config.fail(keys.section, "is missing");
  }
  const Fields& moe = section ? *section : config;
  ModelConfig out;
  LayerConfig& layer = out.layer;
  layer.num_experts = require(moe, keys.num_experts);
  layer.top_k = require(moe, keys.top_k);
  layer.hidden = require(config, keys.hidden);
  layer.intermediate = require(moe, keys.intermediate);
  layer.activation = read_activation(family, moe);
  layer.router = read_router(family.router, moe);
  layer.w1_bias = !family.fused.gate_up_bias.empty();
  layer.w2_bias = !family.fused.down_bias.empty();
  layer.shared = read_shared(family, config, layer);
  if (layer.router.weight_on_input && layer.top_k != 1)
    not_known(moe, keys.top_k[0], concat("is ", layer.top_k, "; weights on the input are known for 1 only"), {});
  if (const Status s = validate(layer); !s.ok())
    throw Error(s.code() == StatusCode::unsupported ? s.code() : StatusCode::bad_file,
                concat("[checkpoint] ", config.file(), ": ", s.message()), s.hint(), s.field());
  out.moe_layers = moe_layers(family, config);
  return out;
}

}  // namespace moekit::io
