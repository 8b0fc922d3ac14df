#include <gtest/gtest.h>

#include "io/golden.hpp"
#include "support/checkpoint_files.hpp"
#include "text.hpp"

namespace moekit::io {
namespace {
using testing::data_path;
using testing::thrown_by;
using text::concat;

TEST(GoldenFiles, families_give_what_their_routers_returned) {
  struct Expected {
    const char* folder;
    std::int64_t E, k;
    bool ids, scores, ordered;
  };
  constexpr Expected kExpected[] = {
      {"mixtral", 8, 2, true, false, true},       {"qwen2_moe", 12, 4, true, false, true},
      {"qwen3_moe", 16, 4, true, false, true},    {"qwen3_next", 32, 10, true, false, true},
      {"olmoe", 16, 8, true, false, true},        {"deepseek_v2", 16, 4, true, false, false},
      {"deepseek_v3", 32, 6, true, false, false}, {"glm4_moe", 16, 4, true, false, false},
      {"gpt_oss", 8, 4, true, false, true},       {"llama4", 8, 1, false, true, true},
      {"granitemoe", 8, 3, true, false, true},    {"dbrx", 8, 2, false, false, true},
  };
  for (const Expected& x : kExpected) {
    SCOPED_TRACE(x.folder);
    const Golden golden(data_path(concat("golden/", x.folder, "/golden.safetensors")), x.folder);
    EXPECT_EQ(golden.schema(), GoldenSchema::families);
    EXPECT_EQ(golden.tolerances().f32, 1e-5);
    ASSERT_EQ(golden.cases().size(), 4u);
    for (std::size_t i = 0; i < 4; ++i) {
      const GoldenCase& one = golden.cases()[i];
      EXPECT_EQ(one.layer, static_cast<std::int64_t>(i / 2));
      EXPECT_EQ(one.name, i % 2 ? "M37" : "M1");
      EXPECT_EQ(one.ids_ordered, x.ordered);
      const std::int64_t M = i % 2 ? 37 : 1;
      EXPECT_EQ(shape_string(one.logits), concat("[", M, ", ", x.E, "]"));
      EXPECT_EQ(shape_string(one.ids), x.ids ? concat("[", M, ", ", x.k, "]") : "[]");
      EXPECT_EQ(shape_string(one.weights), x.ids ? concat("[", M, ", ", x.k, "]") : "[]");
      EXPECT_EQ(shape_string(one.scores), x.scores ? concat("[", M, ", ", x.E, "]") : "[]");
      EXPECT_EQ(one.in.shape[0], M);
      EXPECT_EQ(one.out.dtype, DType::f32);
      EXPECT_FALSE(one.out_actq.present());
    }
    if (x.ids) {  // weights lie in [0, 1] times the scale, which logits do not
      const GoldenCase& one = golden.cases()[1];
      for (std::int64_t t = 0; t < 37; ++t)
        for (std::int64_t j = 0; j < x.k; ++j) EXPECT_GE((one.weights.at<float>(t, j)), 0.0f);
    }
  }
}

TEST(GoldenFiles, trained_model_has_logits_alone) {
  const Golden golden(data_path("models/tiny-qwen3-moe/golden.safetensors"), "qwen3_moe");
  EXPECT_EQ(golden.schema(), GoldenSchema::model);
  ASSERT_EQ(golden.cases().size(), 2u);
  const GoldenCase& one = golden.cases()[1];
  EXPECT_EQ(one.module, "model.layers.1.mlp");
  EXPECT_EQ(one.layer, 1);
  EXPECT_EQ(one.name, "M2048");
  EXPECT_EQ(shape_string(one.logits), "[2048, 16]");
  EXPECT_FALSE(one.ids.present());
  EXPECT_EQ(golden.tolerances().near_tie, 1e-2);
}

TEST(GoldenFiles, quantised_layers_have_f64_results_with_and_without_quantised_activations) {
  for (const char* folder : {"ct_int8_w8a8", "fp8_block128"}) {
    const Golden golden(data_path(concat("golden_quant/", folder, "/golden.safetensors")), "qwen3_moe");
    EXPECT_EQ(golden.schema(), GoldenSchema::quantised);
    ASSERT_EQ(golden.cases().size(), 2u);
    for (const GoldenCase& one : golden.cases()) {
      EXPECT_EQ(one.module, "model.layers.0.mlp");
      EXPECT_EQ(one.out.dtype, DType::f64);
      EXPECT_EQ(one.out_actq.dtype, DType::f64);
      EXPECT_EQ(shape_string(one.out_actq), shape_string(one.out));
      EXPECT_EQ(one.out_actq_127.present(), std::string(folder) == "ct_int8_w8a8");
      EXPECT_EQ(one.ids.dtype, DType::i64);
      EXPECT_EQ(shape_string(one.weights), shape_string(one.ids));
    }
    EXPECT_TRUE(golden.file().find("model.layers.0.mlp|M1|actq|slot1|mid_q"));
  }
}

TEST(GoldenFiles, malformed_ones_are_errors) {
  const testing::TempFolder folder;
  const auto open = [&](const std::vector<testing::FileTensor>& tensors) {
    testing::write_safetensors(folder / "golden.safetensors", tensors);
    return thrown_by([&] { Golden golden(folder / "golden.safetensors", "mixtral"); });
  };
  const auto in = testing::f32_tensor("model.layers.0.mlp|M1|in", {1, 2}, {1, 2});
  EXPECT_NE(open({}).message().find("holds no case"), std::string::npos);
  EXPECT_NE(open({in}).message().find("out is missing"), std::string::npos);
  const Status s = open({in, testing::f32_tensor("model.layers.0.mlp|M1|out", {2, 1}, {1, 2})});
  EXPECT_NE(s.message().find("model.layers.0.mlp|M1|out is F32 [2, 1]"), std::string::npos) << s.message();
  EXPECT_NE(open({testing::f32_tensor("mlp|M1|in", {1, 2}, {1, 2})}).message().find("names no layer"),
            std::string::npos);
  EXPECT_NE(open({testing::f32_tensor("model.layers.0.mlp|M1|in", {2}, {1, 2})}).message().find("does not fit"),
            std::string::npos);
}

}  // namespace
}  // namespace moekit::io
