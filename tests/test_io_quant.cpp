// Quantised checkpoints: values bit for bit, and the config's word against the file's.
#include <gtest/gtest.h>

#include <cmath>

#include <moekit/checkpoint.hpp>

#include "io/json.hpp"
#include "io/quant_scheme.hpp"
#include "quant/numeric.hpp"
#include "support/golden_edits.hpp"
#include "text.hpp"

namespace moekit {
namespace {
using namespace testing;
using text::concat;

float element(const Tensor& t, std::int64_t i, std::int64_t j) {
  return numeric::load_f32(t.data, t.dtype, i * t.stride[0] + j * t.stride[1]);
}

/// q · s in f32, -0 counted as +0, row-major.
std::vector<float> dequantise(const Tensor& data, const Tensor& scale, const Granularity& block) {
  std::vector<float> out;
  for (std::int64_t i = 0; i < data.shape[0]; ++i)
    for (std::int64_t j = 0; j < data.shape[1]; ++j) {
      const float s = element(scale, i / block.rows, block.cols < 0 ? 0 : j / block.cols);
      out.push_back(element(data, i, j) * s + 0.0f);
    }
  return out;
}
std::string fnv1a64(const std::vector<float>& values) {
  std::uint64_t hash = 0xcbf29ce484222325ull;
  const auto* raw = reinterpret_cast<const unsigned char*>(values.data());
  for (std::size_t i = 0; i < values.size() * sizeof(float); ++i) hash = (hash ^ raw[i]) * 0x100000001b3ull;
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(hash));
  return text;
}

struct Scheme {
  const char *folder, *weights, *activations;
};
constexpr Scheme kSchemes[] = {{"ct_int8_w8a8", "int8", "int8_token"},
                               {"fp8_block128", "fp8_block128", "fp8_group128"}};

TEST(Quantised, every_matrix_dequantises_to_the_published_bits) {
  for (const Scheme& scheme : kSchemes) {
    SCOPED_TRACE(scheme.folder);
    const std::string folder = data_path(concat("golden_quant/", scheme.folder));
    const Checkpoint checkpoint = Checkpoint::open(folder);
    const LayerConfig& config = checkpoint.layer(0).config;
    EXPECT_EQ(weights_scheme(config.quant), scheme.weights);
    EXPECT_EQ(activations_scheme(config.quant), scheme.activations);
    EXPECT_EQ(config.dtype, DType::bf16);
    const io::Json hashes = io::read_json(folder + "/dequant_hash.json");
    const WeightsSource source = checkpoint.source(0);
    std::size_t checked = 0;
    for (std::int64_t e = 0; e < config.num_experts; ++e) {
      CanonicalExpert x;
      ASSERT_TRUE(source.expert(e, x).ok());
      for (const auto& [name, data, scale] :
           {std::tuple{"gate", x.gate, x.gate_scale}, {"up", x.up, x.up_scale}, {"down", x.down, x.down_scale}}) {
        const std::string key = concat("experts.", e, ".", name);
        const io::Json* known = hashes.find(key);
        ASSERT_TRUE(known) << key;
        EXPECT_EQ(*(*known->find("shape")->array())[0].integer(), data.shape[0]);
        EXPECT_EQ(*(*known->find("shape")->array())[1].integer(), data.shape[1]);
        const std::vector<float> values = dequantise(data, scale, config.quant.w1.granularity);
        EXPECT_EQ(fnv1a64(values), *known->find("fnv1a64")->string()) << key;
        double sum = 0, abs_max = 0;
        for (const float v : values)
          sum += static_cast<double>(v), abs_max = std::max(abs_max, std::abs(static_cast<double>(v)));
        EXPECT_NEAR(sum, io::Fields(*known, key).number("sum").value(), 1e-9) << key;
        EXPECT_EQ(abs_max, io::Fields(*known, key).number("abs_max").value()) << key;
        ++checked;
      }
    }
    EXPECT_EQ(checked, hashes.object()->size());
  }
}

// ---- the config against the file ----------------------------------------------------------------------------------

struct QuantFolder : ::testing::Test {
  static std::string config(const char* folder) {
    return read_text(data_path(concat("golden_quant/", folder, "/config.json")));
  }
  static Tensors tensors(const char* folder) {
    Tensors out;
    for (FileTensor& tensor : read_tensors(data_path(concat("golden_quant/", folder, "/model.safetensors"))))
      out[tensor.name] = tensor;
    return out;
  }
  /// The experts as plain bf16 (zeros: only types matter here).
  static Tensors unquantised(const char* folder) {
    Tensors out;
    for (auto& [name, tensor] : tensors(folder)) {
      if (name.find("_scale") != std::string::npos) continue;
      out[name] = tensor;
      if (tensor.dtype == "BF16") continue;
      out[name].dtype = "BF16";
      out[name].data.assign(tensor.data.size() * 2, '\0');
    }
    return out;
  }
  Status open(const std::string& config_text, const Tensors& list) {
    write_folder(folder, config_text, list);
    return thrown_by([&] {
      const Checkpoint checkpoint = Checkpoint::open(folder.path());
      scheme = weights_scheme(checkpoint.layer(0).config.quant);
      source = checkpoint.source(0);
    });
  }
  TempFolder folder;
  std::string scheme;
  WeightsSource source;
};
#define EXPECT_SAYS(status, part) EXPECT_NE((status).to_string().find(part), std::string::npos) << (status).to_string()

TEST_F(QuantFolder, experts_on_the_ignore_list_load_as_they_are_stored_else_both_sides_are_named) {
  const std::string int8 = config("ct_int8_w8a8"), fp8 = config("fp8_block128");
  const std::string int8_ignored =
      edited(int8, "\"re:.*mlp.gate$\"", "\"re:.*mlp.gate$\", \"re:.*mlp\\\\.experts\\\\..*\"");
  ASSERT_TRUE(open(int8_ignored, unquantised("ct_int8_w8a8")).ok());
  EXPECT_EQ(scheme, "bf16");
  Status s = open(int8, unquantised("ct_int8_w8a8"));
  EXPECT_EQ(s.code(), StatusCode::bad_file);
  EXPECT_SAYS(s, "experts.0.gate_proj.weight is stored as BF16, but");
  EXPECT_SAYS(s, "says int8 and does not list it in quantization_config.ignore");
  s = open(int8_ignored, tensors("ct_int8_w8a8"));
  EXPECT_SAYS(s, "experts.0.gate_proj.weight is stored as I8, but");
  EXPECT_SAYS(s, "says that it is not quantised (quantization_config.ignore)");

  const std::string fp8_ignored = edited(fp8, "\"model.layers.0.mlp.gate\"", "\"model.layers.0.mlp.experts\"");
  ASSERT_TRUE(open(fp8_ignored, unquantised("fp8_block128")).ok());
  EXPECT_EQ(scheme, "bf16");
  EXPECT_SAYS(open(fp8, unquantised("fp8_block128")), "does not list it in quantization_config.modules_to_not_convert");
  EXPECT_SAYS(open(fp8_ignored, tensors("fp8_block128")), "is stored as F8_E4M3");
}

TEST_F(QuantFolder, quantised_weights_without_a_quantization_config) {
  const std::string text = edited(config("fp8_block128"), "\"quantization_config\"", "\"unused\"");
  EXPECT_SAYS(
      open(text, tensors("fp8_block128")),
      "gate_proj.weight is F8_E4M3; weights must be F32, BF16 or F16, and config.json has no quantization_config");
  // the other scheme's type
  EXPECT_SAYS(open(config("fp8_block128"), unquantised("fp8_block128")), "BF16");
}

TEST_F(QuantFolder, ignore_entries_match_whole_components_and_expressions_from_the_beginning) {
  io::QuantScheme scheme_;
  scheme_.ignore_key = "quantization_config.ignore";
  const auto ignores = [&](const char* entry, const char* module) {
    scheme_.ignore = {entry};
    return scheme_.ignores(module);
  };
  const char* expert = "model.layers.0.mlp.experts.3.gate_proj";
  EXPECT_FALSE(ignores("gate", expert));
  EXPECT_FALSE(ignores("mlp.gate", "model.layers.0.mlp.gate_proj"));
  EXPECT_TRUE(ignores("mlp.gate", "model.layers.0.mlp.gate"));
  EXPECT_TRUE(ignores("model.layers.0.mlp", expert));
  EXPECT_FALSE(ignores("model.layers.0.mlp", "model.layers.00.mlp.experts"));
  EXPECT_FALSE(ignores("", expert));
  EXPECT_TRUE(ignores("re:.*mlp.gate$", "model.layers.0.mlp.gate"));
  EXPECT_FALSE(ignores("re:.*mlp.gate$", expert));
  EXPECT_FALSE(ignores("re:mlp", expert)) << "an expression matches from the beginning";
  EXPECT_TRUE(ignores("re:model\\.layers\\.(0|1)\\.", expert));
  EXPECT_FALSE(ignores("re:(x+x+)+y", "model.xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx"));
  EXPECT_FALSE(ignores("re:(m*)*(o*)*(x+x+)+y$", "mmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmxxxxxxxxxxxxxxxxxxxxxxxxxxx"));
  const Status s = thrown_by([&] { ignores("re:(", expert); });
  EXPECT_EQ(s.code(), StatusCode::unsupported);
  EXPECT_SAYS(s, "quantization_config.ignore");
}

TEST_F(QuantFolder, scales_are_checked_for_presence_shape_type_and_value) {
  const std::string text = config("ct_int8_w8a8");
  const std::string name = "model.layers.0.mlp.experts.4.up_proj.weight_scale";
  Tensors list = tensors("ct_int8_w8a8");
  list.erase(name);
  EXPECT_SAYS(open(text, list), concat("tensor ", name, " is missing"));
  list = tensors("ct_int8_w8a8");
  list[name].shape = {1, 56};
  EXPECT_SAYS(open(text, list), concat("tensor ", name, " must be [56, 1]"));
  list[name].shape = {56, 1};
  list[name].dtype = "F16";
  EXPECT_SAYS(open(text, list), "F16, scales must be F32 or BF16");
  list[name].dtype = "BF16";
  list[name].data[2 * 17] = '\x80', list[name].data[2 * 17 + 1] = '\x7f';  // +infinity
  write_folder(folder, text, list);
  const Checkpoint checkpoint = Checkpoint::open(folder.path());
  const Status s = thrown_by([&] { checkpoint.source(0); });
  EXPECT_EQ(s.code(), StatusCode::bad_file);
  EXPECT_SAYS(s, concat("scale ", name, " is inf at [17, 0]"));
  list = tensors("ct_int8_w8a8");  // f32 scales are as good
  for (auto& [key, tensor] : list)
    if (key.ends_with("_scale")) {
      std::string wide;
      for (std::size_t i = 0; i < tensor.data.size(); i += 2) wide += std::string(2, '\0') + tensor.data.substr(i, 2);
      tensor.dtype = "F32";
      tensor.data = wide;
    }
  EXPECT_TRUE(open(text, list).ok());
}

TEST_F(QuantFolder, leftover_scales_are_not_silently_dropped) {
  Tensors list = tensors("fp8_block128");
  list["s"] = f32_tensor("model.layers.0.mlp.experts.1.up_proj.input_scale", {1}, {2.0f});
  EXPECT_SAYS(open(config("fp8_block128"), list), "does not have: model.layers.0.mlp.experts.1.up_proj.input_scale");
}

TEST_F(QuantFolder, shared_expert_is_quantised_or_not_as_the_ignore_list_says) {
  std::string text = edited(config("ct_int8_w8a8"), "\"qwen3_moe\"", "\"qwen2_moe\"");
  text =
      edited(text, "\"moe_intermediate_size\"", "\"shared_expert_intermediate_size\": 56, \"moe_intermediate_size\"");
  const auto with_shared = [](Tensors list, const Tensors& from) {
    const std::string first = "model.layers.0.mlp.experts.0.", shared = "model.layers.0.mlp.shared_expert.";
    for (const auto& [name, tensor] : from)
      if (name.starts_with(first)) {
        FileTensor copy = tensor;
        copy.name = concat(shared, name.substr(first.size()));
        list[copy.name] = copy;
      }
    list["g"] = f32_tensor("model.layers.0.mlp.shared_expert_gate.weight", {1, 88}, std::vector<float>(88));
    return list;
  };
  const Tensors int8 = tensors("ct_int8_w8a8"), bf16 = unquantised("ct_int8_w8a8");
  const std::string ignored = edited(text, "\"lm_head\"", "\"lm_head\", \"re:.*shared_expert.*\"");
  write_folder(folder, text, with_shared(int8, int8));
  SharedExpertConfig shared = Checkpoint::open(folder.path()).layer(0).config.shared;
  EXPECT_EQ(shared.intermediate, 56);
  EXPECT_TRUE(shared.quantised);
  EXPECT_TRUE(shared.sigmoid_gate);
  EXPECT_TRUE(Checkpoint::open(folder.path()).source(0).shared.expert.down_scale.present());
  write_folder(folder, ignored, with_shared(int8, bf16));
  EXPECT_FALSE(Checkpoint::open(folder.path()).layer(0).config.shared.quantised);
  EXPECT_FALSE(Checkpoint::open(folder.path()).source(0).shared.expert.down_scale.present());
  EXPECT_SAYS(open(text, with_shared(int8, bf16)), "shared_expert.gate_proj.weight is stored as BF16");
  EXPECT_SAYS(open(ignored, with_shared(int8, int8)), "shared_expert.gate_proj.weight is stored as I8");
}

/// 128-wide experts in one tensor: gate and up keep their own rows of scales.
TEST_F(QuantFolder, fused_fp8_splits_weights_and_scales_alike) {
  constexpr std::int64_t E = 2, I = 128, H = 264;
  Tensors list;
  FileTensor gate_up{"model.layers.0.mlp.experts.gate_up_proj", "F8_E4M3", {E, 2 * I, H}, {}};
  FileTensor down{"model.layers.0.mlp.experts.down_proj", "F8_E4M3", {E, H, I}, {}};
  for (std::int64_t i = 0; i < E * 2 * I * H; ++i) gate_up.data += static_cast<char>(i % 120);
  for (std::int64_t i = 0; i < E * H * I; ++i) down.data += static_cast<char>(i % 113);
  std::vector<float> gate_up_scale, down_scale;
  for (int i = 0; i < E * 2 * 3; ++i) gate_up_scale.push_back(static_cast<float>(i + 1));
  for (int i = 0; i < E * 3 * 1; ++i) down_scale.push_back(static_cast<float>(100 + i));
  for (const FileTensor& tensor : {gate_up, down, f32_tensor(gate_up.name + "_scale_inv", {E, 2, 3}, gate_up_scale),
                                   f32_tensor(down.name + "_scale_inv", {E, 3, 1}, down_scale),
                                   f32_tensor("model.layers.0.mlp.gate.weight", {E, H}, std::vector<float>(E * H))})
    list[tensor.name] = tensor;
  std::string text = edited(config("fp8_block128"), "\"num_experts\": 4", "\"num_experts\": 2");
  text = edited(text, "\"moe_intermediate_size\": 136", "\"moe_intermediate_size\": 128");
  const Status s = open(text, list);
  ASSERT_TRUE(s.ok()) << s.to_string();
  EXPECT_EQ(scheme, "fp8_block128");
  CanonicalExpert x;
  ASSERT_TRUE(source.expert(1, x).ok());
  EXPECT_EQ(element(x.gate_scale, 0, 2), 9.0f);  // expert 1, row block 0
  EXPECT_EQ(element(x.up_scale, 0, 0), 10.0f);   // expert 1, row block 1
  EXPECT_EQ(element(x.down_scale, 2, 0), 105.0f);
  EXPECT_EQ(x.up.as<unsigned char>()[3], static_cast<unsigned char>(((1 * 2 * I + I) * H + 3) % 120));

  text = edited(text, "\"moe_intermediate_size\": 128", "\"moe_intermediate_size\": 64");
  list[gate_up.name].shape = {E, 128, H}, list[gate_up.name].data.resize(E * 128 * H);
  list[down.name].shape = {E, H, 64}, list[down.name].data.resize(E * H * 64);
  FileTensor& scales = list[gate_up.name + "_scale_inv"];
  scales.shape = {E, 1, 3}, scales.data.resize(4 * E * 3);
  EXPECT_SAYS(open(text, list), "gate and up share blocks of scales");
}

// ---- schemes that are not read -------------------------------------------------------------------------------------

TEST_F(QuantFolder, other_schemes_are_refused_by_name) {
  const std::string base = R"({"model_type":"qwen3_moe","quantization_config":)";
  const auto ct = [](const std::string& format, const std::string& weights, const std::string& activations) {
    return concat(R"({"quant_method":"compressed-tensors","format":")", format,
                  R"(","config_groups":{"group_0":{"weights":)", weights, R"(,"input_activations":)", activations,
                  "}}}");
  };
  const std::string int8_channel = R"({"num_bits":8,"type":"int","strategy":"channel","symmetric":true})";
  const std::vector<std::pair<std::string, std::string>> cases = {
      {R"({"quant_method":"gptq","bits":4,"group_size":128})", "quantisation gptq 4-bit group_size 128"},
      {R"({"quant_method":"awq","bits":4})", "quantisation awq 4-bit"},
      {R"({"quant_method":"mxfp4"})", "quantisation mxfp4"},
      {R"({"quant_method":"modelopt","quant_algo":"NVFP4"})", "quantisation modelopt"},
      {R"({"quant_method":"bitsandbytes"})", "quantisation bitsandbytes"},
      {R"({"quant_method":"fp8","activation_scheme":"dynamic"})", "fp8 with one scale per tensor or channel"},
      {R"({"quant_method":"fp8","weight_block_size":[64,128]})", "fp8 in blocks [64, 128]"},
      {R"({"quant_method":"fp8","weight_block_size":[128,128],"fmt":"e5m2"})", "fp8 e5m2"},
      {R"({"quant_method":"fp8","weight_block_size":[128,128],"activation_scheme":"static"})",
       "fp8 with static activation scales"},
      {ct("pack-quantized", R"({"num_bits":4,"type":"int","strategy":"group","group_size":32,"symmetric":true})",
          "null"),
       "pack-quantized: weights 4-bit int group (group_size 32), activations not quantised"},
      {ct("float-quantized", R"({"num_bits":8,"type":"float","strategy":"channel"})",
          R"({"num_bits":8,"type":"float","strategy":"token","dynamic":true})"),
       "float-quantized: weights 8-bit float channel, activations 8-bit float token"},
      {ct("nvfp4-pack-quantized", R"({"num_bits":4,"type":"float","strategy":"tensor_group","group_size":16})", "null"),
       "nvfp4-pack-quantized"},
      {ct("int-quantized", R"({"num_bits":8,"type":"int","strategy":"tensor"})",
          R"({"num_bits":8,"type":"int","strategy":"token","dynamic":true})"),
       "weights 8-bit int tensor"},
      {ct("int-quantized", int8_channel, R"({"num_bits":8,"type":"int","strategy":"tensor","dynamic":false})"),
       "activations 8-bit int tensor"},
      {ct("int-quantized", int8_channel, R"({"num_bits":8,"type":"int","strategy":"token","dynamic":false})"),
       "with static scales"},
      {ct("int-quantized", R"({"num_bits":8,"type":"int","strategy":"channel","symmetric":false})", "null"),
       "asymmetric"},
  };
  for (const auto& [quant, part] : cases) {
    const Status s = open(concat(base, quant, "}"), {});
    EXPECT_EQ(s.code(), StatusCode::unsupported) << part;
    EXPECT_SAYS(s, part);
    EXPECT_SAYS(s, "read are quant_method fp8");
  }
  EXPECT_SAYS(open(concat(base, R"({"bits":4})", "}"), {}), "\"quantization_config.quant_method\" is missing");
}

}  // namespace
}  // namespace moekit
