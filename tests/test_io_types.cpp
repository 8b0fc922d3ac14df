// Every key of config.json that a family reads, with every JSON type that it must not have: refused by file and key.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include <moekit/checkpoint.hpp>

#include "support/golden_edits.hpp"
#include "text.hpp"

namespace moekit {
namespace {
using namespace testing;
using nlohmann::json;

enum class Type { integer, number, boolean, string, integers, strings, object };

struct Key {
  const char* pointer;  ///< "/ffn_config/moe_top_k"
  Type type;
};

/// Values that are none of that type; null counts as absent and is not among them.
std::vector<const char*> wrong_values(Type type) {
  switch (type) {
    case Type::integer: return {R"("16")", "1.5", "true", "[1]", "{}", "[]", "1e30"};
    case Type::number: return {R"("1")", "true", "[1]", "{}"};
    case Type::boolean: return {R"("true")", "1", "0.0", "[]", "{}"};
    case Type::string: return {"5", "0.5", "true", "[]", "{}", R"(["silu"])", R"({"name":5})"};
    case Type::integers: return {"1", R"("0")", "true", "{}", R"(["0"])", "[1.5]", "[[0]]", "[true]", "[null]"};
    case Type::strings: return {"1", R"("x")", "true", "{}", "[1]", "[[]]", "[null]"};
    case Type::object: return {"1", R"("x")", "true", "[]", "[{}]", "0.5"};
  }
  return {};
}

struct Case {
  const char* folder;
  std::vector<Key> keys;
};

std::vector<Key> with(std::vector<Key> common, std::vector<Key> more) {
  common.insert(common.end(), more.begin(), more.end());
  return common;
}

const std::vector<Key> kPlain = {{"/model_type", Type::string},          {"/num_experts_per_tok", Type::integer},
                                 {"/hidden_size", Type::integer},        {"/num_hidden_layers", Type::integer},
                                 {"/hidden_act", Type::string},          {"/torch_dtype", Type::string},
                                 {"/quantization_config", Type::object}, {"/num_experts", Type::integer},
                                 {"/num_local_experts", Type::integer},  {"/scoring_func", Type::string},
                                 {"/topk_method", Type::string}};
const std::vector<Key> kSparse = {{"/moe_intermediate_size", Type::integer},
                                  {"/mlp_only_layers", Type::integers},
                                  {"/decoder_sparse_step", Type::integer},
                                  {"/norm_topk_prob", Type::boolean}};
const std::vector<Key> kDeepSeek = {{"/moe_intermediate_size", Type::integer},
                                    {"/n_routed_experts", Type::integer},
                                    {"/first_k_dense_replace", Type::integer},
                                    {"/moe_layer_freq", Type::integer},
                                    {"/n_shared_experts", Type::integer},
                                    {"/routed_scaling_factor", Type::number},
                                    {"/n_group", Type::integer},
                                    {"/topk_group", Type::integer}};

std::vector<Case> cases() {
  return {
      {"golden/mixtral", with(kPlain, {{"/intermediate_size", Type::integer}})},
      {"golden/qwen2_moe", with(with(kPlain, kSparse), {{"/shared_expert_intermediate_size", Type::integer}})},
      {"golden/qwen3_moe", with(kPlain, kSparse)},
      {"golden/qwen3_next", with(with(kPlain, kSparse), {{"/shared_expert_intermediate_size", Type::integer}})},
      {"golden/olmoe", with(kPlain, {{"/intermediate_size", Type::integer}, {"/norm_topk_prob", Type::boolean}})},
      {"golden/deepseek_v2", with(kPlain, kDeepSeek)},
      {"golden/deepseek_v3", with(with(kPlain, kDeepSeek), {{"/norm_topk_prob", Type::boolean}})},
      {"golden/glm4_moe", with(with(kPlain, kDeepSeek), {{"/norm_topk_prob", Type::boolean}})},
      {"golden/gpt_oss",
       {{"/num_local_experts", Type::integer},
        {"/experts_per_token", Type::integer},
        {"/num_experts_per_tok", Type::integer},
        {"/intermediate_size", Type::integer},
        {"/hidden_act", Type::string},
        {"/swiglu_limit", Type::number},
        {"/swiglu_alpha", Type::number}}},
      {"golden/llama4",
       {{"/num_local_experts", Type::integer},
        {"/moe_layers", Type::integers},
        {"/interleave_moe_layer_step", Type::integer},
        {"/hidden_act", Type::string}}},
      {"golden/granitemoe", {{"/num_local_experts", Type::integer}, {"/hidden_act", Type::string}}},
      {"golden/dbrx",
       {{"/ffn_config", Type::object},
        {"/ffn_config/moe_num_experts", Type::integer},
        {"/ffn_config/moe_top_k", Type::integer},
        {"/ffn_config/ffn_hidden_size", Type::integer},
        {"/ffn_config/moe_normalize_expert_weights", Type::number},
        {"/ffn_config/ffn_act_fn/name", Type::string},
        {"/d_model", Type::integer},
        {"/n_layers", Type::integer}}},
      {"golden_quant/fp8_block128",
       {{"/quantization_config/quant_method", Type::string},
        {"/quantization_config/weight_block_size", Type::integers},
        {"/quantization_config/fmt", Type::string},
        {"/quantization_config/activation_scheme", Type::string},
        {"/quantization_config/modules_to_not_convert", Type::strings}}},
      {"golden_quant/ct_int8_w8a8",
       {{"/quantization_config/format", Type::string},
        {"/quantization_config/ignore", Type::strings},
        {"/quantization_config/config_groups", Type::object},
        {"/quantization_config/config_groups/group_0", Type::object},
        {"/quantization_config/config_groups/group_0/weights", Type::object},
        {"/quantization_config/config_groups/group_0/weights/num_bits", Type::integer},
        {"/quantization_config/config_groups/group_0/weights/type", Type::string},
        {"/quantization_config/config_groups/group_0/weights/strategy", Type::string},
        {"/quantization_config/config_groups/group_0/weights/symmetric", Type::boolean},
        {"/quantization_config/config_groups/group_0/weights/group_size", Type::integer},
        {"/quantization_config/config_groups/group_0/input_activations", Type::object},
        {"/quantization_config/config_groups/group_0/input_activations/num_bits", Type::integer},
        {"/quantization_config/config_groups/group_0/input_activations/dynamic", Type::boolean},
        {"/quantization_config/config_groups/group_0/output_activations", Type::object},
        {"/quantization_config/sparsity_config", Type::object},
        {"/quantization_config/transform_config", Type::object}}},
  };
}

Status open(const std::string& folder) {
  try {
    (void)Checkpoint::open(folder);
  } catch (const Error& error) {
    return error.status();
  }
  return {};
}

/// The object that the family reads: of llama4 its text_config.
std::string base_of(const json& config) { return config.contains("text_config") ? "/text_config" : ""; }

TEST(config_types, every_key_with_every_wrong_type_is_refused_by_name) {
  for (const Case& c : cases()) {
    const TempFolder folder;
    write_text(folder / "model.safetensors", read_text(data_path(text::concat(c.folder, "/model.safetensors"))));
    const json good = json::parse(read_text(data_path(text::concat(c.folder, "/config.json"))));
    write_text(folder / "config.json", good.dump());
    ASSERT_TRUE(open(folder.path()).ok()) << c.folder << ": " << open(folder.path()).to_string();
    for (const Key& key : c.keys)
      for (const char* value : wrong_values(key.type)) {
        json config = good;
        const std::string pointer = base_of(good) + key.pointer;
        config[json::json_pointer(pointer)] = json::parse(value);
        if (pointer.ends_with("/interleave_moe_layer_step"))
          config[json::json_pointer(base_of(good))].erase("moe_layers");
        write_text(folder / "config.json", config.dump());
        const Status status = open(folder.path());
        const std::string name = pointer.substr(pointer.rfind('/') + 1);
        const std::string what = text::concat(c.folder, ", ", pointer, " = ", value, ": ", status.to_string());
        EXPECT_EQ(status.code(), StatusCode::bad_file) << what;
        EXPECT_NE(status.message().find(name), std::string::npos) << what;
        EXPECT_NE(status.message().find("config.json"), std::string::npos) << what;
      }
  }
}

TEST(config_types, an_activation_as_an_object_must_have_a_name) {
  for (const char* value : {"{}", R"({"kind":"silu"})", R"({"name":null})"}) {
    const TempFolder folder;
    json config = json::parse(golden_config("dbrx"));
    config["ffn_config"]["ffn_act_fn"] = json::parse(value);
    write_folder(folder, config.dump(), golden("dbrx"));
    const Status status = open(folder.path());
    EXPECT_EQ(status.code(), StatusCode::bad_file) << value;
    EXPECT_NE(status.message().find("ffn_config.ffn_act_fn.name"), std::string::npos) << status.to_string();
  }
}

}  // namespace
}  // namespace moekit
