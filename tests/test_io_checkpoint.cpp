#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <map>

#include <moekit/checkpoint.hpp>
#include <moekit/kit/implementations.hpp>

#include "io/golden.hpp"
#include "io/json.hpp"
#include "quant/numeric.hpp"
#include "support/checkpoint_files.hpp"
#include "text.hpp"

namespace moekit {
namespace {
using testing::data_path;
using testing::thrown_by;
using text::concat;

double element(const Tensor& t, std::int64_t i, std::int64_t j) {
  return static_cast<double>(numeric::load_f32(t.data, t.dtype, i * t.stride[0] + j * t.stride[1]));
}
double element(const Tensor& t, std::int64_t i) {
  return t.present() ? static_cast<double>(numeric::load_f32(t.data, t.dtype, i * t.stride[0])) : 0.0;
}

// ---- every family -----------------------------------------------------------------------------------------------

struct FamilyCase {
  const char* folder;
  const char* module;  // of layer 1
  std::int64_t E, k, H, I, shared;
  const char* router;
};
constexpr FamilyCase kCases[] = {
    {"mixtral", "model.layers.1.mlp", 8, 2, 64, 96, 0, "softmax, renormalised"},
    {"qwen2_moe", "model.layers.1.mlp", 12, 4, 64, 48, 80, "softmax"},
    {"qwen3_moe", "model.layers.1.mlp", 16, 4, 64, 48, 0, "softmax, renormalised"},
    {"qwen3_next", "model.layers.1.mlp", 32, 10, 64, 32, 32, "softmax, renormalised"},
    {"olmoe", "model.layers.1.mlp", 16, 8, 64, 32, 0, "softmax"},
    {"deepseek_v2", "model.layers.1.mlp", 16, 4, 64, 40, 80, "softmax, best 2 of 4 groups by max, x 2"},
    {"deepseek_v3", "model.layers.1.mlp", 32, 6, 64, 40, 40,
     "sigmoid, selection bias, best 4 of 8 groups by top2 sum, renormalised, x 2.5"},
    {"glm4_moe", "model.layers.1.mlp", 16, 4, 64, 40, 40, "sigmoid, selection bias, renormalised, x 1.5"},
    {"gpt_oss", "model.layers.1.mlp", 8, 4, 96, 64, 0, "softmax over the selected, logit bias"},
    {"llama4", "model.layers.1.feed_forward", 8, 1, 64, 48, 48, "sigmoid, weight on input"},
    {"granitemoe", "model.layers.1.block_sparse_moe", 8, 3, 64, 48, 0, "softmax over the selected"},
    {"dbrx", "transformer.blocks.1.ffn", 8, 2, 64, 96, 0, "softmax, renormalised"},
};

TEST(Families, every_family_loads_with_its_sizes_and_rule) {
  for (const FamilyCase& c : kCases) {
    SCOPED_TRACE(c.folder);
    const Checkpoint checkpoint = Checkpoint::open(data_path(concat("golden/", c.folder)));
    EXPECT_EQ(checkpoint.family(), c.folder);
    ASSERT_EQ(checkpoint.layers().size(), 2u);
    const CheckpointLayer& layer = checkpoint.layer(1);
    EXPECT_EQ(layer.module, c.module);
    EXPECT_EQ(layer.config.num_experts, c.E);
    EXPECT_EQ(layer.config.top_k, c.k);
    EXPECT_EQ(layer.config.hidden, c.H);
    EXPECT_EQ(layer.config.intermediate, c.I);
    EXPECT_EQ(layer.config.shared.intermediate, c.shared);
    EXPECT_EQ(layer.config.dtype, DType::f32);
    EXPECT_EQ(weights_scheme(layer.config.quant), "f32");
    EXPECT_EQ(to_string(layer.config.router), c.router);
    EXPECT_TRUE(validate(layer.config).ok());
    EXPECT_NE(layer.config.hidden, layer.config.intermediate) << "H = I would hide a transposed matrix";
    // gate, up, down of every expert, the router, the shared expert: in f32
    const std::int64_t matrices = 3 * c.E * c.H * c.I + 3 * c.shared * c.H + c.E * c.H;
    EXPECT_GE(layer.weight_bytes, 4 * matrices);
    EXPECT_LE(layer.weight_bytes, 4 * matrices + 4 * c.E * (2 * c.I + c.H + 1) + 4 * c.H);
    const WeightsSource source = checkpoint.source(1);
    CanonicalExpert expert;
    for (std::int64_t e = 0; e < c.E; ++e) {
      ASSERT_TRUE(source.expert(e, expert).ok());
      EXPECT_EQ(shape_string(expert.gate), concat("[", c.I, ", ", c.H, "]"));
      EXPECT_EQ(shape_string(expert.up), concat("[", c.I, ", ", c.H, "]"));
      EXPECT_EQ(shape_string(expert.down), concat("[", c.H, ", ", c.I, "]"));
    }
    EXPECT_EQ(source.expert(c.E, expert).code(), StatusCode::invalid_argument);
  }
}

/// f(gate) · up, in f64.
double activate(const Activation& a, double gate, double up) {
  gate = std::min(gate, static_cast<double>(a.clamp_gate));
  up = std::clamp(up, -static_cast<double>(a.clamp_up), static_cast<double>(a.clamp_up));
  const double alpha = static_cast<double>(a.alpha);
  return gate / (1 + std::exp(-alpha * gate)) * (up + static_cast<double>(a.beta));
}

/// down(f(gate · x) * (up · x)) with biases, in f64.
std::vector<double> evaluate(const CanonicalExpert& e, const Activation& activation, const std::vector<double>& x) {
  const std::int64_t I = e.up.shape[0], H = e.up.shape[1];
  std::vector<double> h(static_cast<std::size_t>(I)), y(static_cast<std::size_t>(H));
  for (std::int64_t i = 0; i < I; ++i) {
    double gate = element(e.gate_bias, i), up = element(e.up_bias, i);
    for (std::int64_t k = 0; k < H; ++k) {
      gate += element(e.gate, i, k) * x[static_cast<std::size_t>(k)];
      up += element(e.up, i, k) * x[static_cast<std::size_t>(k)];
    }
    h[static_cast<std::size_t>(i)] = activate(activation, gate, up);
  }
  for (std::int64_t k = 0; k < H; ++k) {
    double sum = element(e.down_bias, k);
    for (std::int64_t i = 0; i < I; ++i) sum += element(e.down, k, i) * h[static_cast<std::size_t>(i)];
    y[static_cast<std::size_t>(k)] = sum;
  }
  return y;
}

struct Block {
  Block(const Checkpoint& checkpoint, std::int64_t layer)
      : config(checkpoint.layer(layer).config), source(checkpoint.source(layer)) {}
  LayerConfig config;
  WeightsSource source;

  /// Ids and weights as the checkpoint's rule gives them, from logits computed here.
  void route(const io::GoldenCase& c, std::vector<std::int32_t>& ids, std::vector<float>& weights) const {
    const std::int64_t M = c.in.shape[0], E = config.num_experts, k = config.top_k;
    std::vector<float> logits(static_cast<std::size_t>(M * E));
    for (std::int64_t t = 0; t < M; ++t)
      for (std::int64_t e = 0; e < E; ++e) {
        double sum = 0;
        for (std::int64_t i = 0; i < config.hidden; ++i)
          sum += element(c.in, t, i) * element(source.router.weight, e, i);
        logits[static_cast<std::size_t>(t * E + e)] = static_cast<float>(sum);
      }
    ids.assign(static_cast<std::size_t>(M * k), -7);
    weights.assign(static_cast<std::size_t>(M * k), NAN);
    RouteArgs args;
    args.logits = Tensor(logits.data(), DType::f32, {M, E});
    args.config = &config.router;
    args.tensors = &source.router;
    args.ids = Tensor(ids.data(), DType::i32, {M, k});
    args.weights = Tensor(weights.data(), DType::f32, {M, k});
    const RouterEntry& reference = router_implementations().back();
    ASSERT_EQ(reference.name, "reference");
    const Status s = reference.make()->route(args);
    ASSERT_TRUE(s.ok()) << s.to_string();
  }

  std::vector<double> row(const io::GoldenCase& c, std::int64_t t, const std::int32_t* ids,
                          const float* weights) const {
    std::vector<double> x, y(static_cast<std::size_t>(config.hidden));
    for (std::int64_t i = 0; i < config.hidden; ++i) x.push_back(element(c.in, t, i));
    for (std::int64_t j = 0; j < config.top_k; ++j) {
      CanonicalExpert expert;
      EXPECT_TRUE(source.expert(ids[j], expert).ok());
      const double w = static_cast<double>(weights[j]);
      std::vector<double> scaled = x;
      if (config.router.weight_on_input)
        for (double& v : scaled) v *= w;
      const std::vector<double> part = evaluate(expert, config.activation, scaled);
      for (std::size_t i = 0; i < y.size(); ++i) y[i] += (config.router.weight_on_input ? 1.0 : w) * part[i];
    }
    if (config.shared.intermediate > 0) {
      double gate = 1;
      if (config.shared.sigmoid_gate) {
        double z = 0;
        for (std::size_t i = 0; i < x.size(); ++i)
          z += element(source.shared.gate_vector, 0, static_cast<std::int64_t>(i)) * x[i];
        gate = 1 / (1 + std::exp(-z));
      }
      const std::vector<double> part = evaluate(source.shared.expert, config.shared.activation, x);
      for (std::size_t i = 0; i < y.size(); ++i) y[i] += gate * part[i];
    }
    return y;
  }
};

TEST(Families, outputs_equal_those_of_the_families_own_modules) {
  for (const FamilyCase& c : kCases) {
    SCOPED_TRACE(c.folder);
    const std::string folder = data_path(concat("golden/", c.folder));
    const Checkpoint checkpoint = Checkpoint::open(folder);
    const io::Golden golden(folder + "/golden.safetensors", checkpoint.model_type());
    ASSERT_EQ(golden.cases().size(), 4u);
    for (const io::GoldenCase& one : golden.cases()) {
      ASSERT_EQ(one.module, checkpoint.layer(one.layer).module);
      const Block block(checkpoint, one.layer);
      std::vector<std::int32_t> ids;
      std::vector<float> weights;
      ASSERT_NO_FATAL_FAILURE(block.route(one, ids, weights));
      double largest = 0, worst = 0;
      std::string where;
      for (std::int64_t t = 0; t < one.in.shape[0]; ++t) {
        if (one.name == "M37" && t % 6 != 0) continue;  // a sample: the f64 loop is slow
        const auto y =
            block.row(one, t, &ids[static_cast<std::size_t>(t * c.k)], &weights[static_cast<std::size_t>(t * c.k)]);
        for (std::int64_t i = 0; i < c.H; ++i) {
          largest = std::max(largest, std::abs(element(one.out, t, i)));
          const double difference = std::abs(y[static_cast<std::size_t>(i)] - element(one.out, t, i));
          if (!(difference <= worst)) worst = difference, where = concat("[", t, ", ", i, "]");
        }
      }
      EXPECT_LE(worst, 2e-6 * largest) << one.name << " layer " << one.layer << " at " << where;
    }
  }
}

TEST(Families, known_values_of_each_form) {
  struct Known {
    const char* folder;
    double gate, up, down;  // element [1, 2] of expert 3 of layer 0, read with an independent reader
  };
  constexpr Known kKnown[] = {
      {"mixtral", -0.0264371987, -0.0710383058, 0.0188069083},    {"qwen3_moe", 0.122196756, -0.181405902, 0.013691742},
      {"granitemoe", -0.105717517, 0.0501711667, -0.00446579838}, {"llama4", -0.174495608, 0.0432301685, 0.0613330603},
      {"gpt_oss", 0.240534216, -0.332487643, 0.0067272},          {"dbrx", -0.105717517, -0.0246335492, 0.183042139}};
  for (const Known& known : kKnown) {
    SCOPED_TRACE(known.folder);
    const Checkpoint checkpoint = Checkpoint::open(data_path(concat("golden/", known.folder)));
    CanonicalExpert expert;
    ASSERT_TRUE(checkpoint.source(0).expert(3, expert).ok());
    EXPECT_FLOAT_EQ(static_cast<float>(element(expert.gate, 1, 2)), static_cast<float>(known.gate));
    EXPECT_FLOAT_EQ(static_cast<float>(element(expert.up, 1, 2)), static_cast<float>(known.up));
    EXPECT_FLOAT_EQ(static_cast<float>(element(expert.down, 1, 2)), static_cast<float>(known.down));
  }
}

TEST(Families, trained_model_is_bf16) {
  const Checkpoint checkpoint = Checkpoint::open(data_path("models/tiny-qwen3-moe"));
  EXPECT_EQ(shape_string(checkpoint.layer(0).config), "e16k4h128i64:bf16");
  EXPECT_EQ(checkpoint.layer(0).config.dtype, DType::bf16);
  EXPECT_EQ(checkpoint.layers().size(), 2u);
}

TEST(CheckpointObject, unknown_layer_lists_what_there_is_and_sources_outlive_the_object) {
  WeightsSource source;
  {
    const Checkpoint checkpoint = Checkpoint::open(data_path("golden/mixtral"));
    const Status s = thrown_by([&] { checkpoint.layer(2); });
    EXPECT_EQ(s.code(), StatusCode::invalid_argument);
    EXPECT_NE(s.message().find("layer 2"), std::string::npos);
    EXPECT_EQ(s.hint(), "there are: 0 1");
    EXPECT_EQ(thrown_by([&] { checkpoint.source(-1); }).code(), StatusCode::invalid_argument);
    source = checkpoint.source(1);
  }
  CanonicalExpert expert;
  ASSERT_TRUE(source.expert(7, expert).ok());
  EXPECT_TRUE(std::isfinite(element(expert.down, 63, 95)));
  EXPECT_TRUE(std::isfinite(element(source.router.weight, 7, 63)));
}

// ---- malformed folders ------------------------------------------------------------------------------------------

TEST(BadFolders, each_is_refused_as_its_description_says) {
  int refused = 0, sound = 0;
  for (const auto& entry : std::filesystem::directory_iterator(data_path("golden_quant/bad"))) {
    const std::string folder = entry.path().string(), name = entry.path().filename().string();
    SCOPED_TRACE(name);
    const io::Json expected = io::read_json(folder + "/expected.json");
    const Status s = thrown_by([&] {
      const Checkpoint checkpoint = Checkpoint::open(folder);
      for (const CheckpointLayer& layer : checkpoint.layers()) checkpoint.source(layer.index);
    });
    if (name.find("gguf") != std::string::npos || name.find("gptq") != std::string::npos) {
      EXPECT_EQ(s.code(), StatusCode::unsupported) << s.to_string();
      const std::string format = name.find("gguf") != std::string::npos ? "GGUF" : "gptq";
      EXPECT_NE(s.message().find(format), std::string::npos) << s.message();
      ++refused;
    } else if (*expected.find("must")->string() == "ok") {
      EXPECT_TRUE(s.ok()) << s.to_string();
      ++sound;
    } else {
      EXPECT_EQ(s.code(), StatusCode::bad_file) << s.to_string();
      std::vector<std::string> names = {*expected.find("names")->string()};
      if (const io::Json* any = expected.find("names_any"))
        for (const io::Json& one : *any->array()) names.push_back(*one.string());
      const bool named = std::any_of(names.begin(), names.end(), [&](const std::string& one) {
        return s.message().find(one) != std::string::npos;
      });
      EXPECT_TRUE(named) << names[0] << " | " << s.message();
      ++refused;
    }
  }
  EXPECT_EQ(refused, 17);
  EXPECT_EQ(sound, 2);
}

TEST(BadFolders, what_is_no_checkpoint_is_said_so) {
  const testing::TempFolder folder;
  const auto open = [](const std::string& path) { return thrown_by([&] { Checkpoint::open(path); }); };
  EXPECT_NE(open(folder / "none").message().find("no such folder"), std::string::npos);
  testing::write_text(folder / "model.gguf", "GGUF");
  EXPECT_EQ(open(folder / "model.gguf").code(), StatusCode::unsupported);
  EXPECT_EQ(open(folder.path()).code(), StatusCode::unsupported);
  testing::write_text(folder / "config.json", R"({"model_type":"qwen3_moe"})");
  EXPECT_EQ(open(folder / "config.json").code(), StatusCode::bad_file);
}

}  // namespace
}  // namespace moekit
