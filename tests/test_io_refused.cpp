// Checkpoints that must be refused, and what configurations mean: edits of the golden checkpoints.
#include <gtest/gtest.h>

#include <moekit/checkpoint.hpp>

#include "support/golden_edits.hpp"
#include "text.hpp"

namespace moekit {
namespace {
using namespace testing;
using text::concat;

struct Refused : ::testing::Test {
  Status open(const std::string& config, const Tensors& tensors) {
    write_folder(folder, config, tensors);
    return thrown_by([&] { Checkpoint::open(folder.path()); });
  }
  TempFolder folder;
};
#define EXPECT_SAYS(status, part) EXPECT_NE((status).to_string().find(part), std::string::npos) << (status).to_string()

TEST_F(Refused, missing_one_of_eight_experts_is_named) {
  Tensors tensors = golden("mixtral");
  tensors.erase("model.layers.0.block_sparse_moe.experts.5.w2.weight");
  const Status s = open(golden_config("mixtral"), tensors);
  EXPECT_EQ(s.code(), StatusCode::bad_file);
  EXPECT_SAYS(s, "layer 0: expert 5: tensor model.layers.0.block_sparse_moe.experts.5.w2.weight is missing");
}

TEST_F(Refused, unknown_expert_names_list_the_first_unmatched) {
  Tensors renamed;
  for (const auto& [key, stored] : golden("gpt_oss")) {
    std::string name = key;
    FileTensor tensor = stored;
    for (const char* part : {"gate_up_proj", "down_proj"})
      if (name.ends_with(part)) name += "_new";
    tensor.name = name;
    renamed[name] = tensor;
  }
  Status s = open(golden_config("gpt_oss"), renamed);
  EXPECT_EQ(s.code(), StatusCode::bad_file);
  EXPECT_SAYS(s, "no experts under the names of family gpt_oss");
  EXPECT_SAYS(s, "not matched: model.layers.0.mlp.experts.down_proj_bias, model.layers.0.mlp.experts.down_proj_new");

  Tensors other = golden("qwen3_moe");
  for (const char* name : {"gate", "up", "down"}) {
    auto node = other.extract(concat("model.layers.1.mlp.experts.4.", name, "_proj.weight"));
    node.key() = node.mapped().name = concat("model.layers.1.mlp.experts.4.", name, ".weight");
    other.insert(std::move(node));
  }
  s = open(golden_config("qwen3_moe"), other);
  EXPECT_SAYS(s, "expert 4: tensor model.layers.1.mlp.experts.4.gate_proj.weight is missing");
  EXPECT_SAYS(s, "not matched there: model.layers.1.mlp.experts.4.down.weight");
}

TEST_F(Refused, missing_gate_of_a_gated_shared_expert) {
  Tensors tensors = golden("qwen2_moe");
  tensors.erase("model.layers.1.mlp.shared_expert_gate.weight");
  EXPECT_SAYS(open(golden_config("qwen2_moe"), tensors),
              "tensor model.layers.1.mlp.shared_expert_gate.weight is missing");
}

TEST_F(Refused, missing_selection_bias) {
  Tensors tensors = golden("deepseek_v3");
  tensors.erase("model.layers.0.mlp.gate.e_score_correction_bias");
  EXPECT_SAYS(open(golden_config("deepseek_v3"), tensors),
              "tensor model.layers.0.mlp.gate.e_score_correction_bias is missing");
}

TEST_F(Refused, tensors_that_the_family_does_not_have) {
  Tensors tensors = golden("qwen3_moe");
  tensors["x"] = f32_tensor("model.layers.0.mlp.experts.3.up_proj.bias", {48}, std::vector<float>(48));
  EXPECT_SAYS(open(golden_config("qwen3_moe"), tensors), "does not have: model.layers.0.mlp.experts.3.up_proj.bias");
  Tensors more = golden("qwen3_moe");  // 16 experts in the file
  EXPECT_SAYS(open(edited(golden_config("qwen3_moe"), "\"num_local_experts\": 16", "\"num_local_experts\": 15"), more),
              "got [16, 64]");
}

TEST_F(Refused, shape_against_config_names_tensor_and_both_shapes) {
  const std::string config = edited(golden_config("olmoe"), "\"intermediate_size\": 32", "\"intermediate_size\": 40");
  const Status s = open(config, golden("olmoe"));
  EXPECT_EQ(s.code(), StatusCode::bad_file);
  EXPECT_SAYS(s,
              "tensor model.layers.0.mlp.experts.0.gate_proj.weight must be [40, 64] (expert width x hidden size), got "
              "[32, 64]");
}

TEST_F(Refused, experts_of_two_types) {
  Tensors tensors = golden("olmoe");
  FileTensor& one = tensors["model.layers.0.mlp.experts.9.up_proj.weight"];
  one.dtype = "BF16";
  one.data.resize(one.data.size() / 2);
  EXPECT_SAYS(open(golden_config("olmoe"), tensors),
              "experts.9.up_proj.weight is BF16, but model.layers.0.mlp.experts.0.gate_proj.weight is F32");
}

TEST_F(Refused, double_precision_weights) {
  Tensors tensors = golden("olmoe");
  FileTensor& one = tensors["model.layers.0.mlp.experts.0.gate_proj.weight"];
  one.dtype = "F64";
  one.data += one.data;
  EXPECT_SAYS(open(golden_config("olmoe"), tensors),
              "experts.0.gate_proj.weight is F64; weights must be F32, BF16 or F16");
}

TEST_F(Refused, config_keys) {
  const std::string qwen = golden_config("qwen3_moe"), deepseek = golden_config("deepseek_v3");
  const Tensors none;
  struct Case {
    std::string config, part;
    StatusCode code = StatusCode::bad_file;
  };
  const std::vector<Case> cases = {
      {edited(qwen, "\"num_local_experts\": 16,", ""),
       "\"num_experts\" is missing (also read as \"num_local_experts\")"},
      {edited(qwen, "\"num_local_experts\": 16,", "\"num_local_experts\": 16, \"num_experts\": 8,"),
       "\"num_local_experts\" is 16, but \"num_experts\" is 8"},
      {edited(qwen, "\"num_local_experts\": 16,", "\"num_local_experts\": \"16\","),
       "must be an integer, got a string"},
      {edited(qwen, "\"num_local_experts\": 16,", "\"num_local_experts\": 0,"), "must be at least 1, got 0"},
      {edited(qwen, "\"num_local_experts\": 16,", "\"num_local_experts\": 1000000000000,"),
       "num_experts is 1000000000000"},
      {edited(qwen, "\"num_experts_per_tok\": 4", "\"num_experts_per_tok\": 17"),
       "top_k must be in [1, num_experts = 16], got 17"},
      {edited(qwen, "\"num_hidden_layers\": 2", "\"num_hidden_layers\": 1000000000000"), "at most 10000 layers"},
      {edited(qwen, "\"mlp_only_layers\": []", "\"mlp_only_layers\": [0, 1]"), "none of these layers is MoE"},
      {edited(qwen, "\"decoder_sparse_step\": 1", "\"decoder_sparse_step\": 0"),
       "\"decoder_sparse_step\" must be at least 1"},
      {edited(qwen, "\"hidden_act\": \"silu\"", "\"hidden_act\": \"mish\""),
       "there are: silu swish gelu gelu_pytorch_tanh relu2", StatusCode::unsupported},
      {edited(deepseek, "\"n_group\": 8", "\"n_group\": 5"), "5 groups do not divide 32 experts"},
      {edited(deepseek, "\"n_group\": 8,", ""), "\"n_group\" is missing"},
      {edited(deepseek, "\"n_group\": 8", "\"scoring_func\": \"softmax\", \"n_group\": 8"),
       "\"scoring_func\" is \"softmax\"", StatusCode::unsupported},
      {edited(deepseek, "\"n_group\": 8", "\"topk_method\": \"greedy\", \"n_group\": 8"),
       "\"topk_method\" is \"greedy\"", StatusCode::unsupported},
      {edited(golden_config("llama4"), "\"num_experts_per_tok\": 1", "\"num_experts_per_tok\": 2"), "known for 1 only",
       StatusCode::unsupported},
      {edited(golden_config("dbrx"), "\"ffn_config\"", "\"ffn\""), "\"ffn_config\" is missing"},
      {edited(golden_config("dbrx"), "\"moe_top_k\": 2", "\"moe_top_k\": 9"), "got 9"},
      {"{}", "\"model_type\" is missing"},
      {"[]", "config.json: must be an object"},
  };
  for (const Case& c : cases) {
    const Status s = open(c.config, none);
    EXPECT_EQ(s.code(), c.code) << c.part;
    EXPECT_SAYS(s, c.part);
    EXPECT_SAYS(s, "config.json");
  }
}

TEST_F(Refused, unknown_family_says_what_the_config_says_and_the_nearest_one) {
  const Status s = open(
      R"({"model_type":"qwen4_moe","architectures":["Qwen4MoeForCausalLM"],"num_experts":64,"moe_intermediate_size":12,
                           "hidden_size":8,"router":{"expert_bias":true}})",
      {});
  EXPECT_EQ(s.code(), StatusCode::unsupported);
  for (const char* part :
       {"model_type \"qwen4_moe\"", "nearest by name is qwen", "architecture Qwen4MoeForCausalLM", "num_experts 64",
        "moe_intermediate_size 12", "router.expert_bias true", "there are: mixtral qwen2_moe", "kimi_k2"})
    EXPECT_SAYS(s, part);
  EXPECT_EQ(s.to_string().find("hidden_size 8"), std::string::npos);
  EXPECT_SAYS(open(R"({"model_type":"llama"})", {}), "no key that speaks of experts");
}

// ---- which layers, which rule -----------------------------------------------------------------------------------

std::vector<std::int64_t> layers_of(const Checkpoint& checkpoint) {
  std::vector<std::int64_t> out;
  for (const CheckpointLayer& layer : checkpoint.layers()) out.push_back(layer.index);
  return out;
}
struct Layers : Refused {
  std::vector<std::int64_t> of(const std::string& config, const Tensors& tensors) {
    write_folder(folder, config, tensors);
    return layers_of(Checkpoint::open(folder.path()));
  }
};
using List = std::vector<std::int64_t>;

TEST_F(Layers, dense_layers_are_left_out) {
  const Tensors qwen = golden("qwen3_moe"), deepseek = golden("deepseek_v3"), llama = golden("llama4");
  const std::string qwen_config = golden_config("qwen3_moe"), llama_config = golden_config("llama4");
  EXPECT_EQ(of(edited(qwen_config, "\"mlp_only_layers\": []", "\"mlp_only_layers\": [0]"), qwen), List({1}));
  EXPECT_EQ(of(edited(qwen_config, "\"mlp_only_layers\": []", "\"mlp_only_layers\": null"), qwen), List({0, 1}));
  EXPECT_EQ(of(edited(qwen_config, "\"decoder_sparse_step\": 1", "\"decoder_sparse_step\": 2"), qwen), List({1}));
  EXPECT_EQ(of(edited(golden_config("deepseek_v3"), "\"first_k_dense_replace\": 0", "\"first_k_dense_replace\": 1"),
               deepseek),
            List({1}));
  // a prediction layer behind the last one is not part of the model
  EXPECT_EQ(of(edited(golden_config("deepseek_v3"), "\"num_hidden_layers\": 2", "\"num_hidden_layers\": 1"), deepseek),
            List({0}));
  const std::size_t begin = llama_config.find("\"moe_layers\""), end = llama_config.find(']', begin);
  const std::string list = llama_config.substr(begin, end + 1 - begin);
  EXPECT_EQ(of(edited(llama_config, list, "\"moe_layers\": [1]"), llama), List({1}));
  const std::string step = edited(llama_config, list, "\"moe_layers\": null");
  EXPECT_EQ(of(step, llama), List({0, 1}));
  EXPECT_EQ(of(edited(step, "\"interleave_moe_layer_step\": 1", "\"interleave_moe_layer_step\": 2"), llama), List({1}));
}

struct Rules : Refused {
  LayerConfig of(const std::string& config, const Tensors& tensors) {
    write_folder(folder, config, tensors);
    return Checkpoint::open(folder.path()).layers()[0].config;
  }
};

TEST_F(Rules, values_of_the_config_reach_the_layer) {
  const Tensors qwen = golden("qwen3_moe"), dbrx = golden("dbrx"), v2 = golden("deepseek_v2"), oss = golden("gpt_oss");
  const std::string qwen_config = golden_config("qwen3_moe"), dbrx_config = golden_config("dbrx"),
                    v2_config = golden_config("deepseek_v2");
  EXPECT_FALSE(
      of(edited(qwen_config, "\"norm_topk_prob\": true", "\"norm_topk_prob\": false"), qwen).router.renormalise);
  EXPECT_FALSE(of(edited(qwen_config, "\"norm_topk_prob\": true,", ""), qwen).router.renormalise);
  EXPECT_TRUE(of(edited(golden_config("qwen3_next"), "\"norm_topk_prob\": true,", ""), golden("qwen3_next"))
                  .router.renormalise);
  EXPECT_EQ(of(edited(qwen_config, "\"hidden_act\": \"silu\"", "\"hidden_act\": \"gelu_pytorch_tanh\""), qwen)
                .activation.kind,
            ActivationKind::gelu_tanh);

  const std::string p = "\"moe_normalize_expert_weights\": 1.0";
  EXPECT_EQ(of(edited(dbrx_config, p, "\"moe_normalize_expert_weights\": 2.0"), dbrx).router.renorm_p, 2.0f);
  EXPECT_FALSE(of(edited(dbrx_config, p, "\"moe_normalize_expert_weights\": null"), dbrx).router.renormalise);
  const LayerConfig absent = of(edited(dbrx_config, p, "\"unused\": 0"), dbrx);
  EXPECT_TRUE(absent.router.renormalise);
  EXPECT_EQ(absent.router.renorm_p, 1.0f);

  const LayerConfig grouped = of(v2_config, v2);
  EXPECT_EQ(grouped.router.num_groups, 4);
  EXPECT_EQ(grouped.router.group_fill, GroupFill::zero);
  EXPECT_EQ(of(edited(v2_config, "group_limited_greedy", "greedy"), v2).router.num_groups, 1);
  EXPECT_FALSE(of(edited(v2_config, "\"norm_topk_prob\": false", "\"norm_topk_prob\": true"), v2).router.renormalise);
  const LayerConfig v3 = of(golden_config("deepseek_v3"), golden("deepseek_v3"));
  EXPECT_EQ(v3.router.group_fill, GroupFill::neg_inf);
  EXPECT_EQ(v3.router.group_score, GroupScore::top2_sum);
  EXPECT_EQ(v3.router.renorm_eps, 1e-20f);
  EXPECT_EQ(v3.router.renorm_eps_mode, RenormEps::add);

  const LayerConfig clamp = of(edited(edited(golden_config("gpt_oss"), "\"swiglu_limit\": 7.0", "\"swiglu_limit\": 2"),
                                      "\"swiglu_alpha\": 1.702,", ""),
                               oss);
  EXPECT_EQ(clamp.activation, Activation::swigluoai(2.0f, 1.702f));
  EXPECT_TRUE(clamp.w1_bias);
  EXPECT_TRUE(clamp.w2_bias);
  EXPECT_EQ(of(edited(golden_config("gpt_oss"), "num_experts_per_tok", "experts_per_token"), oss).top_k, 4);

  Tensors kimi = golden("deepseek_v3");
  write_folder(folder, edited(golden_config("deepseek_v3"), "\"deepseek_v3\"", "\"kimi_k2\""), kimi);
  EXPECT_EQ(Checkpoint::open(folder.path()).family(), "deepseek_v3");
  EXPECT_EQ(Checkpoint::open(folder.path()).model_type(), "kimi_k2");
}

TEST_F(Rules, a_model_without_shared_experts_has_none) {
  Tensors tensors = golden("deepseek_v2");
  std::erase_if(tensors, [](const auto& entry) { return entry.first.find("shared_experts") != std::string::npos; });
  for (const char* none : {"null", "0"}) {
    const std::string config =
        edited(golden_config("deepseek_v2"), "\"n_shared_experts\": 2", concat("\"n_shared_experts\": ", none));
    EXPECT_EQ(of(config, tensors).shared, SharedExpertConfig{});
    EXPECT_FALSE(Checkpoint::open(folder.path()).source(0).shared.expert.up.present());
  }
}

TEST_F(Rules, storage_type_is_that_of_the_file_not_of_the_config) {
  Tensors tensors = golden("olmoe");
  for (auto& [name, tensor] : tensors)
    if (name.find(".experts.") != std::string::npos) {
      std::string narrow;
      for (std::size_t i = 0; i < tensor.data.size(); i += 4)
        narrow += tensor.data.substr(i + 2, 2);  // truncated to bf16
      tensor.dtype = "BF16";
      tensor.data = narrow;
    }
  const LayerConfig config = of(golden_config("olmoe"), tensors);  // says float32
  EXPECT_EQ(config.dtype, DType::bf16);
  EXPECT_EQ(weights_scheme(config.quant), "bf16");
}

}  // namespace
}  // namespace moekit
