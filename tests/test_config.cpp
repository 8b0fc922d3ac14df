// Configurations that cannot be right are refused with the field to blame.
#include <gtest/gtest.h>

#include <moekit/config.hpp>

namespace moekit {
namespace {

LayerConfig good() {
  LayerConfig config;
  config.num_experts = 8, config.top_k = 2, config.hidden = 64, config.intermediate = 96;
  return config;
}

TEST(config, a_plain_layer_is_valid_and_prints_its_shape_string) {
  EXPECT_TRUE(validate(good()).ok()) << validate(good()).to_string();
  EXPECT_EQ(shape_string(good()), "e8k2h64i96:bf16");
}

TEST(config, where_nothing_is_said_about_quantisation_everything_has_the_layers_type) {
  const LayerConfig config{.num_experts = 8, .top_k = 2, .hidden = 64, .intermediate = 96, .dtype = DType::f32};
  EXPECT_EQ(config.quant, QuantSpec::plain(DType::f32));
  EXPECT_EQ(shape_string(config), "e8k2h64i96:f32");
  EXPECT_EQ(good().quant, QuantSpec::plain(DType::bf16));
}

TEST(config, activations_narrower_than_the_layers_type_are_refused_not_rounded_silently) {
  LayerConfig config = good();
  for (DType type : {DType::f32, DType::f16}) {
    config.dtype = type;  // the quantisation still says bf16
    EXPECT_EQ(validate(config).field(), "quant.a1.type");
    EXPECT_NE(validate(config).message().find("bf16"), std::string::npos) << validate(config).to_string();
    EXPECT_NE(validate(config).message().find(name(type)), std::string::npos) << validate(config).to_string();
    config.quant = QuantSpec::plain(type);
    EXPECT_TRUE(validate(config).ok()) << validate(config).to_string();
    config.quant = QuantSpec::plain(DType::bf16);
  }
  config = good();  // more exact than the rows: legal, and so are weights of another type
  config.quant.a1.type = config.quant.a2.type = DType::f32;
  EXPECT_TRUE(validate(config).ok()) << validate(config).to_string();
  config.dtype = DType::f32;
  EXPECT_TRUE(validate(config).ok()) << validate(config).to_string();
}

TEST(config, top_k_above_num_experts_is_refused) {
  LayerConfig config = good();
  config.top_k = 9;
  EXPECT_EQ(validate(config).code(), StatusCode::invalid_argument);
  EXPECT_EQ(validate(config).field(), "top_k");
}

TEST(config, zero_extents_are_named_errors) {
  for (auto field :
       {&LayerConfig::num_experts, &LayerConfig::top_k, &LayerConfig::hidden, &LayerConfig::intermediate}) {
    LayerConfig config = good();
    config.*field = 0;
    EXPECT_EQ(validate(config).code(), StatusCode::invalid_argument);
  }
}

TEST(config, a_clamp_of_zero_is_refused_and_the_default_does_not_clamp) {
  Activation activation;
  EXPECT_TRUE(validate(activation).ok());
  activation.clamp_up = 0;
  EXPECT_EQ(validate(activation).field(), "activation.clamp_up");
}

TEST(config, top2_group_score_with_one_expert_per_group_is_refused) {
  RouterConfig router;
  router.num_groups = 8, router.keep_groups = 4, router.group_score = GroupScore::top2_sum;
  EXPECT_EQ(validate(router, 8, 2).field(), "router.group_score");
}

TEST(config, scheme_names_round_trip_and_unknown_ones_list_what_there_is) {
  for (const char* weights : {"f32", "bf16", "f16", "int8", "fp8_block128"}) {
    QuantSpec spec;
    ASSERT_TRUE(quant_from_names(weights, "", spec).ok());
    EXPECT_EQ(weights_scheme(spec), weights);
  }
  QuantSpec spec;
  const Status s = quant_from_names("int3", "", spec);
  EXPECT_EQ(s.code(), StatusCode::unsupported);
  EXPECT_NE(s.hint().find("fp8_block128"), std::string::npos);
}

}  // namespace
}  // namespace moekit
