#include "io/families.hpp"

#include <algorithm>
#include <vector>

#include <moekit/status.hpp>

#include "text.hpp"

namespace moekit::io {
using text::concat;

namespace {

constexpr PerExpertNames kProjections = {"experts.@.gate_proj.weight", "experts.@.up_proj.weight",
                                         "experts.@.down_proj.weight"};
/// What transformers 5 holds in memory, and what checkpoints saved from there may hold.
constexpr FusedNames kFused = {.gate_up = "experts.gate_up_proj", .down = "experts.down_proj"};
constexpr BlockName kMlp = {"model.layers.#.mlp.", "model.layers.#.mlp"};
constexpr SharedRule kGatedShared = {SharedWidth::by_key, "shared_expert_intermediate_size", "shared_expert.",
                                     "shared_expert_gate.weight"};
constexpr SharedRule kCountedShared = {SharedWidth::count_times_intermediate, "n_shared_experts", "shared_experts."};
constexpr ConfigKeys kDeepSeekKeys = {.num_experts = {"n_routed_experts", "num_local_experts", "num_experts"}};
constexpr RouterRule kNoAuxRouter = {.selection_bias = "gate.e_score_correction_bias",
                                     .score = Score::sigmoid,
                                     .groups = Groups::always,
                                     .group_score = GroupScore::top2_sum,
                                     .renormalise = Renormalise::by_norm_topk_prob,
                                     .renormalise_default = true,
                                     .renorm_eps = 1e-20f,
                                     .scaled = true,
                                     .scoring_func = "sigmoid",
                                     .topk_methods = {"noaux_tc"}};

/// Bias-corrected sigmoid scores in groups, counted shared experts: DeepSeek-V3 and those that took it over.
constexpr Family no_aux_family(std::string_view name, const Names& model_types) {
  return {.name = name,
          .model_types = model_types,
          .keys = kDeepSeekKeys,
          .layers = MoeLayers::after_dense,
          .blocks = {kMlp},
          .per_expert = kProjections,
          .fused = kFused,
          .router = kNoAuxRouter,
          .shared = kCountedShared};
}

constexpr Family kFamilies[] = {
    {.name = "mixtral",
     .model_types = {"mixtral"},
     .keys = {.num_experts = {"num_local_experts", "num_experts"}, .intermediate = {"intermediate_size"}},
     .blocks = {{{"model.layers.#.block_sparse_moe.", "model.layers.#.mlp"}, kMlp}},
     .per_expert = {"experts.@.w1.weight", "experts.@.w3.weight", "experts.@.w2.weight"},
     .fused = kFused,
     .router = {.renormalise = Renormalise::always}},
    {.name = "qwen2_moe",
     .model_types = {"qwen2_moe"},
     .layers = MoeLayers::sparse_step,
     .blocks = {kMlp},
     .per_expert = kProjections,
     .fused = kFused,
     .router = {.renormalise = Renormalise::by_norm_topk_prob},
     .shared = kGatedShared},
    {.name = "qwen3_moe",
     .model_types = {"qwen3_moe"},
     .layers = MoeLayers::sparse_step,
     .blocks = {kMlp},
     .per_expert = kProjections,
     .fused = kFused,
     .router = {.renormalise = Renormalise::by_norm_topk_prob}},
    {.name = "qwen3_next",
     .model_types = {"qwen3_next"},
     .layers = MoeLayers::sparse_step,
     .blocks = {kMlp},
     .per_expert = kProjections,
     .fused = kFused,
     .router = {.renormalise = Renormalise::by_norm_topk_prob, .renormalise_default = true},
     .shared = kGatedShared},
    {.name = "olmoe",
     .model_types = {"olmoe"},
     .keys = {.intermediate = {"intermediate_size"}},
     .blocks = {kMlp},
     .per_expert = kProjections,
     .fused = kFused,
     .router = {.renormalise = Renormalise::by_norm_topk_prob}},
    {.name = "deepseek_v2",
     .model_types = {"deepseek_v2"},
     .keys = kDeepSeekKeys,
     .layers = MoeLayers::after_dense,
     .blocks = {kMlp},
     .per_expert = kProjections,
     .fused = kFused,
     .router = {.groups = Groups::by_topk_method,
                .group_fill = GroupFill::zero,
                .scaled = true,
                .scoring_func = "softmax",
                .topk_methods = {"greedy", "group_limited_greedy"}},
     .shared = kCountedShared},
    no_aux_family("deepseek_v3", {"deepseek_v3", "kimi_k2"}),
    no_aux_family("glm4_moe", {"glm4_moe"}),
    {.name = "gpt_oss",
     .model_types = {"gpt_oss"},
     .keys = {.num_experts = {"num_local_experts", "num_experts"},
              .top_k = {"num_experts_per_tok", "experts_per_token"},
              .intermediate = {"intermediate_size"}},
     .blocks = {kMlp},
     .fused = {"experts.gate_up_proj", "experts.down_proj", "experts.gate_up_proj_bias", "experts.down_proj_bias", true,
               GateLayout::interleaved},
     .router = {.weight = {"router.weight"}, .logit_bias = "router.bias", .softmax_over = SoftmaxOver::selected},
     .swigluoai = true},
    {.name = "llama4",
     .model_types = {"llama4_text"},
     .wrapper = "llama4",
     .keys = {.num_experts = {"num_local_experts", "num_experts"}, .intermediate = {"intermediate_size"}},
     .layers = MoeLayers::listed,
     .blocks = {{{"model.layers.#.feed_forward.", "model.layers.#.feed_forward"},
                 {"language_model.model.layers.#.feed_forward.", "language_model.model.layers.#.feed_forward"}}},
     .per_expert = kProjections,
     .fused = {.gate_up = "experts.gate_up_proj", .down = "experts.down_proj", .in_out = true},
     .router = {.weight = {"router.weight"}, .score = Score::sigmoid, .weight_on_input = true},
     .shared = {SharedWidth::intermediate, {}, "shared_expert."}},
    {.name = "granitemoe",
     .model_types = {"granitemoe"},
     .keys = {.num_experts = {"num_local_experts", "num_experts"}, .intermediate = {"intermediate_size"}},
     .blocks = {BlockName{"model.layers.#.block_sparse_moe.", "model.layers.#.block_sparse_moe"}},
     .fused = {.gate_up = "input_linear.weight", .down = "output_linear.weight"},
     .router = {.weight = {"router.layer.weight", "router.weight"}, .softmax_over = SoftmaxOver::selected}},
    {.name = "dbrx",
     .model_types = {"dbrx"},
     .keys = {.num_experts = {"moe_num_experts"},
              .top_k = {"moe_top_k"},
              .hidden = {"d_model"},
              .intermediate = {"ffn_hidden_size"},
              .num_layers = {"n_layers"},
              .section = "ffn_config",
              .activation = "ffn_act_fn"},
     .blocks = {BlockName{"transformer.blocks.#.ffn.", "transformer.blocks.#.ffn"}},
     .flat = {"experts.mlp.w1", "experts.mlp.v1", "experts.mlp.w2"},
     .router = {.weight = {"router.layer.weight"}, .renormalise = Renormalise::by_norm_order}},
};

/// Levenshtein distance.
std::size_t distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (std::size_t i = 0; i < a.size(); ++i) {
    std::size_t diagonal = row[0]++;
    for (std::size_t j = 0; j < b.size(); ++j) {
      const std::size_t replaced = diagonal + (a[i] != b[j]);
      diagonal = row[j + 1];
      row[j + 1] = std::min({replaced, row[j] + 1, diagonal + 1});
    }
  }
  return row.back();
}

std::string value_text(const Json& value) {
  if (value.integer()) return concat(*value.integer());
  if (value.real()) return concat(*value.real());
  if (value.boolean()) return concat(*value.boolean());
  if (value.string()) return value.string()->substr(0, 60);
  return value.kind();
}

/// ", num_experts 8, …": keys that speak of experts, two levels deep.
std::string expert_keys(const Json& config, const std::string& path, int depth) {
  std::string out;
  for (const auto& [key, value] : *config.object()) {
    if (value.object() && depth > 0) out += expert_keys(value, concat(path, key, "."), depth - 1);
    if (key.find("expert") == std::string::npos && key.find("moe") == std::string::npos) continue;
    if (value.object() || out.size() > 600) continue;
    out += concat(", ", path, key, " ", value_text(value));
  }
  return out;
}

[[noreturn]] void unknown_family(const Fields& root, const std::string& model_type) {
  std::string known, nearest;
  std::size_t best = std::string::npos;
  for (const Family& family : kFamilies)
    for (const std::string_view type : family.model_types) {
      if (type.empty()) continue;
      known += concat(known.empty() ? "" : " ", type);
      if (const std::size_t d = distance(model_type.substr(0, 100), type); d < best) best = d, nearest = type;
    }
  std::string says;
  if (const auto architectures = root.strings("architectures"))
    for (const std::string& name : *architectures) says += concat(", architecture ", name.substr(0, 60));
  const std::string experts = expert_keys(root.json(), "", 1);
  says += experts.empty() ? ", and no key that speaks of experts" : experts;
  throw Error(StatusCode::unsupported,
              concat("[checkpoint] ", root.file(), ": model_type \"", model_type,
                     "\" is no family that is read here; the nearest by name is ", nearest,
                     ". The config says: ", says.substr(2)),
              concat("there are: ", known), "model_type");
}

bool contains(const Names& names, std::string_view name) {
  return !name.empty() && std::find(names.begin(), names.end(), name) != names.end();
}

}  // namespace

std::span<const Family> families() { return kFamilies; }

FamilyChoice choose_family(const Fields& root) {
  const auto model_type = root.string("model_type");
  if (!model_type) root.fail("model_type", "is missing");
  for (const Family& family : kFamilies) {
    if (contains(family.model_types, *model_type)) return {&family, root, *model_type};
    if (*model_type != family.wrapper || family.wrapper.empty()) continue;
    const auto text = root.fields("text_config");
    if (!text) root.fail("text_config", concat("is missing, but model_type is ", *model_type));
    return {&family, *text, *model_type};
  }
  unknown_family(root, *model_type);
}

}  // namespace moekit::io
