// Routers of twelve model families as Hugging Face transformers runs them: logits, ids and weights.
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <sstream>

#include <nlohmann/json.hpp>

#include "support/route_case.hpp"

namespace moekit::testing {
namespace {

/// As much of a safetensors file as these files need: F32 and I64, everything in memory.
class File {
 public:
  explicit File(const std::string& path) {
    std::ifstream in(path, std::ios::binary);
    std::stringstream text;
    text << in.rdbuf();
    bytes_ = text.str();
    std::uint64_t size = 0;
    if (bytes_.size() < 8) throw std::runtime_error("cannot read " + path);
    std::memcpy(&size, bytes_.data(), 8);
    header_ = nlohmann::json::parse(bytes_.substr(8, size));
    begin_ = 8 + static_cast<std::size_t>(size);
  }
  bool has(const std::string& key) const { return header_.contains(key); }
  template <class T>
  std::vector<T> values(const std::string& key) const {
    const nlohmann::json& entry = header_.at(key);
    if (entry["dtype"] != (sizeof(T) == 8 ? "I64" : "F32")) throw std::runtime_error(key + " has another type");
    const std::size_t first = entry["data_offsets"][0], last = entry["data_offsets"][1];
    std::vector<T> out((last - first) / sizeof(T));
    std::memcpy(out.data(), bytes_.data() + begin_ + first, last - first);
    return out;
  }
  std::int64_t extent(const std::string& key, std::size_t axis) const { return header_.at(key)["shape"][axis]; }

 private:
  std::string bytes_;
  nlohmann::json header_;
  std::size_t begin_ = 0;
};

struct Family {
  const char* folder;
  const char* module;  ///< %d = layer
  const char* router;  ///< prefix of the router's tensors
  std::int64_t k;
  RouterConfig config;
  int logits = 0, weights = 1, ids = 2;  ///< which of the router's results; -1 = not in the file
};

std::vector<Family> families() {
  RouterConfig softmax, renormalised, selected, v2, v3, glm4, gpt_oss, llama4;
  renormalised.renormalise = true;
  selected.softmax_over = SoftmaxOver::selected;
  v2.num_groups = 4, v2.keep_groups = 2, v2.group_fill = GroupFill::zero, v2.scale = 2;
  v3.score = Score::sigmoid, v3.selection_bias = true, v3.num_groups = 8, v3.keep_groups = 4;
  v3.group_score = GroupScore::top2_sum, v3.renormalise = true, v3.renorm_eps = 1e-20f, v3.scale = 2.5f;
  glm4 = v3, glm4.num_groups = glm4.keep_groups = 1, glm4.scale = 1.5f;
  llama4.score = Score::sigmoid, llama4.weight_on_input = true;
  const char *mlp = "model.layers.%.mlp", *gate = "model.layers.%.mlp.gate.";
  return {
      {"mixtral", mlp, "model.layers.%.block_sparse_moe.gate.", 2, renormalised},
      {"qwen2_moe", mlp, gate, 4, softmax},
      {"qwen3_moe", mlp, gate, 4, renormalised},
      {"qwen3_next", mlp, gate, 10, renormalised},
      {"olmoe", mlp, gate, 8, softmax},
      {"deepseek_v2", mlp, gate, 4, v2},
      {"deepseek_v3", mlp, gate, 6, v3},
      {"glm4_moe", mlp, gate, 4, glm4},
      {"gpt_oss", mlp, "model.layers.%.mlp.router.", 4, selected},
      {"llama4", "model.layers.%.feed_forward", "model.layers.%.feed_forward.router.", 1, llama4, 1, 0, -1},
      {"granitemoe", "model.layers.%.block_sparse_moe", "model.layers.%.block_sparse_moe.router.layer.", 3, selected, 2,
       1, 0},
      {"dbrx", "transformer.blocks.%.ffn", "transformer.blocks.%.ffn.router.layer.", 2, renormalised, 0, -1, -1},
  };
}

std::string numbered(std::string pattern, int layer) {
  return pattern.replace(pattern.find('%'), 1, std::to_string(layer));
}
std::string path(const Family& family, const char* file) {
  return std::string(MOEKIT_SOURCE_DIR "/tests/data/golden/") + family.folder + "/" + file;
}

/// Weight by id of every row; llama4's file has them spread over all experts.
std::vector<std::map<std::int64_t, float>> expected(const Family& family, const File& golden, const std::string& key,
                                                    std::int64_t E) {
  const std::vector<float> weights = golden.values<float>(key + std::to_string(family.weights));
  std::vector<std::map<std::int64_t, float>> out;
  if (family.ids < 0) {
    for (std::size_t i = 0; i < weights.size(); ++i) {
      if (i % static_cast<std::size_t>(E) == 0) out.emplace_back();
      if (weights[i] != 0) out.back()[static_cast<std::int64_t>(i) % E] = weights[i];
    }
    return out;
  }
  const std::vector<std::int64_t> ids = golden.values<std::int64_t>(key + std::to_string(family.ids));
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (i % static_cast<std::size_t>(family.k) == 0) out.emplace_back();
    out.back()[ids[i]] = weights[i];
  }
  return out;
}

TEST(route_golden, ids_and_weights_of_the_families) {
  int rows_checked = 0;
  for (const Family& family : families()) {
    if (family.weights < 0) continue;  // dbrx's file has logits alone
    const File golden(path(family, "golden.safetensors")), model(path(family, "model.safetensors"));
    for (int layer : {0, 1})
      for (std::int64_t M : {1, 37}) {
        const std::string key = numbered(family.module, layer) + "|M" + std::to_string(M) + "|router";
        RouteCase c{.config = family.config, .M = M, .k = family.k};
        c.E = golden.extent(key + std::to_string(family.logits), 1);
        c.logits = golden.values<float>(key + std::to_string(family.logits));
        if (c.config.selection_bias)
          c.selection_bias = model.values<float>(numbered(family.router, layer) + "e_score_correction_bias");
        const auto want = expected(family, golden, key, c.E);
        for (const auto& router : all_routers()) {
          SCOPED_TRACE(key + " " + family.folder + " " + std::string(router->name()));
          const RouteResult got = run_route(*router, c);
          ASSERT_TRUE(got.status.ok()) << got.status.to_string();
          ASSERT_EQ(want.size(), static_cast<std::size_t>(M));
          for (std::int64_t row = 0; row < M; ++row) {
            const auto& weights = want[static_cast<std::size_t>(row)];
            ASSERT_EQ(weights.size(), static_cast<std::size_t>(c.k));
            for (std::int64_t j = 0; j < c.k; ++j) {
              const std::int32_t id = got.row_ids(row)[static_cast<std::size_t>(j)];
              ASSERT_TRUE(weights.count(id)) << "row " << row << " chose " << id;
              EXPECT_NEAR(got.row_weights(row)[static_cast<std::size_t>(j)], weights.at(id), 1e-5) << "row " << row;
            }
            ++rows_checked;
          }
        }
      }
  }
  EXPECT_EQ(rows_checked, 11 * 2 * 38 * static_cast<int>(all_routers().size()));
}

TEST(route_golden, the_router_gemm_gives_the_logits_of_the_families) {
  for (const Family& family : families()) {
    const File golden(path(family, "golden.safetensors")), model(path(family, "model.safetensors"));
    for (int layer : {0, 1})
      for (std::int64_t M : {1, 37}) {
        const std::string key = numbered(family.module, layer) + "|M" + std::to_string(M) + "|";
        const std::string prefix = numbered(family.router, layer);
        const std::vector<float> x = golden.values<float>(key + "in"), w = model.values<float>(prefix + "weight");
        const std::int64_t K = golden.extent(key + "in", 1), E = model.extent(prefix + "weight", 0);
        std::vector<float> want = golden.values<float>(key + "router" + std::to_string(family.logits));
        if (model.has(prefix + "bias")) {
          const std::vector<float> bias = model.values<float>(prefix + "bias");  // the file's logits contain it
          for (std::size_t i = 0; i < want.size(); ++i) want[i] -= bias[i % bias.size()];
        }
        for (const route::CpuUnit* unit : all_units()) {
          std::vector<float> got(want.size());
          ASSERT_TRUE(route::gemm_with(*unit, Tensor(x.data(), DType::f32, {M, K}),
                                       Tensor(w.data(), DType::f32, {E, K}), Tensor(got.data(), DType::f32, {M, E}), {})
                          .ok());
          for (std::size_t i = 0; i < got.size(); ++i)
            ASSERT_NEAR(got[i], want[i], 1e-5) << family.folder << " " << key << " " << unit->name << " " << i;
        }
      }
  }
}

}  // namespace
}  // namespace moekit::testing
