// The table of model families: how each stores its MoE layers and routes. Data; the code that reads it knows no family.
#pragma once
#include <array>
#include <span>
#include <string>
#include <string_view>

#include <moekit/config.hpp>

#include "io/json.hpp"

namespace moekit::io {

/// Up to three accepted spellings; unused ones are empty.
using Names = std::array<std::string_view, 3>;

/// Where the numbers stand in config.json.
struct ConfigKeys {
  Names num_experts = {"num_experts", "num_local_experts"};
  Names top_k = {"num_experts_per_tok"};
  Names hidden = {"hidden_size"};
  Names intermediate = {"moe_intermediate_size"};
  Names num_layers = {"num_hidden_layers"};
  std::string_view section = {};  ///< object that holds num_experts, top_k, intermediate and the router's keys
  std::string_view activation = "hidden_act";
};

enum class MoeLayers : std::uint8_t {
  all,
  sparse_step,  ///< not in mlp_only_layers and (i + 1) mod decoder_sparse_step = 0
  after_dense,  ///< i ≥ first_k_dense_replace and i mod moe_layer_freq = 0
  listed,       ///< in moe_layers, or (i + 1) mod interleave_moe_layer_step = 0
};

enum class Renormalise : std::uint8_t { never, always, by_norm_topk_prob, by_norm_order };
enum class Groups : std::uint8_t { none, by_topk_method, always };

struct RouterRule {
  Names weight = {"gate.weight"};        ///< tensor, below the block
  std::string_view logit_bias = {};      ///< tensor
  std::string_view selection_bias = {};  ///< tensor
  Score score = Score::softmax;
  SoftmaxOver softmax_over = SoftmaxOver::all;
  Groups groups = Groups::none;
  GroupScore group_score = GroupScore::max;
  GroupFill group_fill = GroupFill::neg_inf;
  Renormalise renormalise = Renormalise::never;
  bool renormalise_default = false;  ///< without norm_topk_prob
  float renorm_eps = 0.0f;
  bool scaled = false;  ///< by routed_scaling_factor
  bool weight_on_input = false;
  std::string_view scoring_func = {};  ///< what this key must say if it is there
  Names topk_methods = {};             ///< likewise
};

/// One tensor per matrix and expert; '@' is the expert.
struct PerExpertNames {
  std::string_view gate = {}, up = {}, down = {};
};
/// gate and up in one tensor of all experts.
struct FusedNames {
  std::string_view gate_up = {}, down = {};
  std::string_view gate_up_bias = {}, down_bias = {};
  bool in_out = false;  ///< [E, in, out] instead of [E, out, in]
  GateLayout layout = GateLayout::halves;
};
/// All experts one below the other: gate and up [E * I, H], and down [E * I, H], applied without transposing.
struct FlatNames {
  std::string_view gate = {}, up = {}, down = {};
};

enum class SharedWidth : std::uint8_t { none, by_key, count_times_intermediate, intermediate };
struct SharedRule {
  SharedWidth width = SharedWidth::none;
  std::string_view key = {};     ///< of the width or the count
  std::string_view prefix = {};  ///< "shared_expert."
  std::string_view gate_vector = {};
};

/// Prefix of the tensors of layer '#', and the module path that goes with it.
struct BlockName {
  std::string_view prefix = {}, module = {};
};

struct Family {
  std::string_view name;
  Names model_types;
  std::string_view wrapper = {};  ///< model_type of text-and-image models: their text_config is ours
  ConfigKeys keys{};
  MoeLayers layers = MoeLayers::all;
  std::array<BlockName, 2> blocks{};
  PerExpertNames per_expert{};
  FusedNames fused{};
  FlatNames flat{};
  RouterRule router{};
  SharedRule shared{};
  bool swigluoai = false;  ///< the activation of gpt-oss, whatever hidden_act says
};

std::span<const Family> families();

/// The family of a config and the object that holds its numbers (the text_config of a wrapper). Throws Error:
/// unsupported for an unknown model_type, with what the config says and the nearest known one.
struct FamilyChoice {
  const Family* family;
  Fields config;
  std::string model_type;
};
FamilyChoice choose_family(const Fields& root);

}  // namespace moekit::io
