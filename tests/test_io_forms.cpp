// The forms in which the same layer can be stored: made from the golden checkpoints, they must give the same values.
#include <gtest/gtest.h>

#include <filesystem>
#include <map>

#include <moekit/checkpoint.hpp>

#include "quant/numeric.hpp"
#include "support/golden_edits.hpp"
#include "text.hpp"

namespace moekit {
namespace {
using namespace testing;
using text::concat;
/// FNV-1a over the f32 values of gate, up and down of every expert, row by row as [out, in].
std::uint64_t layer_hash(const Checkpoint& checkpoint, std::int64_t index) {
  std::uint64_t hash = 0xcbf29ce484222325ull;
  const WeightsSource source = checkpoint.source(index);
  const auto add = [&hash](const Tensor& t) {
    for (std::int64_t i = 0; i < t.shape[0]; ++i)
      for (std::int64_t j = 0; j < t.shape[1]; ++j) {
        const float value = numeric::load_f32(t.data, t.dtype, i * t.stride[0] + j * t.stride[1]);
        unsigned char raw[4];
        std::memcpy(raw, &value, 4);
        for (const unsigned char byte : raw) hash = (hash ^ byte) * 0x100000001b3ull;
      }
  };
  for (std::int64_t e = 0; e < checkpoint.layer(index).config.num_experts; ++e) {
    CanonicalExpert expert;
    throw_if_failed(source.expert(e, expert));
    add(expert.gate);
    add(expert.up);
    add(expert.down);
  }
  return hash;
}
std::uint64_t golden_hash(const std::string& family, std::int64_t index) {
  return layer_hash(Checkpoint::open(data_path(concat("golden/", family))), index);
}

/// An f32 matrix [rows, cols] as [cols, rows].
std::string transposed(const std::string& data, std::size_t rows, std::size_t cols) {
  std::string out(data.size(), '\0');
  for (std::size_t i = 0; i < rows; ++i)
    for (std::size_t j = 0; j < cols; ++j) std::memcpy(&out[4 * (j * rows + i)], &data[4 * (i * cols + j)], 4);
  return out;
}

constexpr std::int64_t kE = 16, kI = 48, kH = 64;  // golden/qwen3_moe

/// golden/qwen3_moe with gate and up of all experts in one tensor and down in another.
Tensors fused_qwen3() {
  Tensors tensors = golden("qwen3_moe");
  for (int layer = 0; layer < 2; ++layer) {
    const std::string block = concat("model.layers.", layer, ".mlp.experts.");
    FileTensor gate_up{block + "gate_up_proj", "F32", {kE, 2 * kI, kH}, ""};
    FileTensor down{block + "down_proj", "F32", {kE, kH, kI}, ""};
    for (int e = 0; e < kE; ++e) {
      const auto take = [&](const char* name) {
        return tensors.extract(concat(block, e, ".", name, ".weight")).mapped().data;
      };
      gate_up.data += take("gate_proj");
      gate_up.data += take("up_proj");
      down.data += take("down_proj");
    }
    tensors[gate_up.name] = gate_up;
    tensors[down.name] = down;
  }
  return tensors;
}

TEST(Forms, fused_form_equals_the_per_expert_form) {
  const TempFolder folder;
  write_folder(folder, golden_config("qwen3_moe"), fused_qwen3());
  const Checkpoint checkpoint = Checkpoint::open(folder.path());
  for (int layer = 0; layer < 2; ++layer) EXPECT_EQ(layer_hash(checkpoint, layer), golden_hash("qwen3_moe", layer));
  EXPECT_EQ(checkpoint.layer(0).config, Checkpoint::open(data_path("golden/qwen3_moe")).layer(0).config);
}

TEST(Forms, hashes_of_all_forms_are_those_of_an_independent_reader) {
  const std::map<std::string, std::uint64_t> known = {
      {"mixtral", 0xdcf38fbd4becf4cdull}, {"qwen3_moe", 0x0f0f15ec775bbc97ull}, {"granitemoe", 0x8b3a32b0f5e90429ull},
      {"llama4", 0x48eeaa1dd9861b4aull},  {"gpt_oss", 0x423567a6e84e3caeull},   {"dbrx", 0x4a9e7740ed801760ull}};
  for (const auto& [family, hash] : known) EXPECT_EQ(golden_hash(family, 1), hash) << family;
}

TEST(Forms, fused_tensors_stored_the_other_way_round_are_refused) {
  const TempFolder folder;
  Tensors tensors = fused_qwen3();
  FileTensor& down = tensors["model.layers.0.mlp.experts.down_proj"];
  down.shape = {kE, kI, kH};
  write_folder(folder, golden_config("qwen3_moe"), tensors);
  const Status s = thrown_by([&] { Checkpoint::open(folder.path()); });
  EXPECT_EQ(s.code(), StatusCode::bad_file);
  EXPECT_NE(s.message().find("model.layers.0.mlp.experts.down_proj must be [16, 64, 48]"), std::string::npos)
      << s.message();
  EXPECT_NE(s.message().find("got [16, 48, 64]"), std::string::npos) << s.message();
  EXPECT_NE(s.hint().find("other way round"), std::string::npos) << s.hint();
}

TEST(Forms, module_prefix_of_memory_is_accepted_for_mixtral) {
  Tensors tensors;
  for (const auto& [key, stored] : golden("mixtral")) {
    std::string name = key;
    FileTensor tensor = stored;
    if (const auto at = name.find("block_sparse_moe"); at != std::string::npos) name.replace(at, 16, "mlp");
    tensor.name = name;
    tensors[name] = tensor;
  }
  const TempFolder folder;
  write_folder(folder, golden_config("mixtral"), tensors);
  const Checkpoint checkpoint = Checkpoint::open(folder.path());
  EXPECT_EQ(layer_hash(checkpoint, 1), golden_hash("mixtral", 1));
  EXPECT_EQ(checkpoint.layer(1).module, "model.layers.1.mlp");
}

TEST(Forms, sharded_index_equals_the_single_file) {
  const TempFolder folder;
  std::vector<FileTensor> parts[3];
  std::string map;
  std::size_t n = 0;
  for (const auto& [name, tensor] : golden("deepseek_v3")) {
    const std::size_t shard = n++ % 3;
    parts[shard].push_back(tensor);
    map += concat(map.empty() ? "" : ",", "\"", name, "\":\"model-0000", shard + 1, "-of-00003.safetensors\"");
  }
  for (std::size_t shard = 0; shard < 3; ++shard)
    write_safetensors(folder / concat("model-0000", shard + 1, "-of-00003.safetensors"), parts[shard]);
  write_text(folder / "model.safetensors.index.json", concat("{\"weight_map\":{", map, "}}"));
  write_text(folder / "config.json", golden_config("deepseek_v3"));
  const Checkpoint checkpoint = Checkpoint::open(folder.path());
  for (int layer = 0; layer < 2; ++layer) EXPECT_EQ(layer_hash(checkpoint, layer), golden_hash("deepseek_v3", layer));
  EXPECT_EQ(checkpoint.layer(1).weight_bytes, Checkpoint::open(data_path("golden/deepseek_v3")).layer(1).weight_bytes);

  std::filesystem::resize_file(folder / "model-00002-of-00003.safetensors", 4096);
  const Status s = thrown_by([&] { Checkpoint::open(folder.path()); });
  EXPECT_NE(s.message().find("model-00002-of-00003.safetensors"), std::string::npos) << s.message();
}

TEST(Forms, text_and_image_llama4_is_read_by_its_text_config) {
  Tensors tensors;
  for (const auto& [name, stored] : golden("llama4")) {
    FileTensor& tensor = tensors[concat("language_model.", name)] = stored;
    tensor.name = concat("language_model.", name);
  }
  tensors["vision_model.patch"] = {"vision_model.patch", "C64", {1, 1, 1, 1, 1}, std::string(8, 'x')};
  const TempFolder folder;
  write_folder(folder,
               concat(R"({"model_type":"llama4","vision_config":{"hidden_size":7},"text_config":)",
                      golden_config("llama4"), "}"),
               tensors);
  const Checkpoint checkpoint = Checkpoint::open(folder.path());
  EXPECT_EQ(checkpoint.model_type(), "llama4");
  EXPECT_EQ(checkpoint.family(), "llama4");
  EXPECT_EQ(checkpoint.layer(1).module, "language_model.model.layers.1.feed_forward");
  EXPECT_EQ(layer_hash(checkpoint, 1), golden_hash("llama4", 1));
  write_text(folder / "config.json", R"({"model_type":"llama4"})");
  EXPECT_NE(thrown_by([&] { Checkpoint::open(folder.path()); }).message().find("text_config"), std::string::npos);
}

TEST(Forms, llama4_with_experts_apart_equals_the_stacked_transposed_form) {
  Tensors tensors = golden("llama4");
  constexpr std::size_t E = 8, H = 64, I = 48;
  for (int layer = 0; layer < 2; ++layer) {
    const std::string block = concat("model.layers.", layer, ".feed_forward.experts.");
    const std::string gate_up = tensors.extract(block + "gate_up_proj").mapped().data;
    const std::string down = tensors.extract(block + "down_proj").mapped().data;
    for (std::size_t e = 0; e < E; ++e) {
      const std::string both = transposed(gate_up.substr(4 * e * H * 2 * I, 4 * H * 2 * I), H, 2 * I);
      const auto put = [&](const char* name, std::vector<std::int64_t> shape, std::string data) {
        const std::string full = concat(block, e, ".", name, ".weight");
        tensors[full] = {full, "F32", std::move(shape), std::move(data)};
      };
      put("gate_proj", {I, H}, both.substr(0, 4 * I * H));
      put("up_proj", {I, H}, both.substr(4 * I * H));
      put("down_proj", {H, I}, transposed(down.substr(4 * e * H * I, 4 * H * I), I, H));
    }
  }
  const TempFolder folder;
  write_folder(folder, golden_config("llama4"), tensors);
  EXPECT_EQ(layer_hash(Checkpoint::open(folder.path()), 0), golden_hash("llama4", 0));
}

TEST(Forms, interleaved_gate_and_up_are_told_apart) {
  const Checkpoint checkpoint = Checkpoint::open(data_path("golden/gpt_oss"));
  CanonicalExpert expert;
  ASSERT_TRUE(checkpoint.source(0).expert(5, expert).ok());
  const Tensors tensors = golden("gpt_oss");
  const auto* stored =
      reinterpret_cast<const float*>(tensors.at("model.layers.0.mlp.experts.gate_up_proj").data.data());
  const auto* bias =
      reinterpret_cast<const float*>(tensors.at("model.layers.0.mlp.experts.gate_up_proj_bias").data.data());
  constexpr std::int64_t H = 96, I = 64;
  for (std::int64_t i : {std::int64_t{0}, std::int64_t{1}, I - 1}) {
    EXPECT_EQ((expert.gate.at<float>(i, 7)), stored[(5 * H + 7) * 2 * I + 2 * i]);
    EXPECT_EQ((expert.up.at<float>(i, 7)), stored[(5 * H + 7) * 2 * I + 2 * i + 1]);
    EXPECT_EQ(expert.gate_bias.as<float>()[i * expert.gate_bias.stride[0]], bias[5 * 2 * I + 2 * i]);
    EXPECT_EQ(expert.up_bias.as<float>()[i * expert.up_bias.stride[0]], bias[5 * 2 * I + 2 * i + 1]);
  }
}

}  // namespace
}  // namespace moekit
