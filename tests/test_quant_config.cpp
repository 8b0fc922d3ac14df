// QuantConfig: its accessors, and combinations of spec and values that do not fit.
#include <gtest/gtest.h>

#include <cmath>

#include <moekit/kit/quant_config.hpp>

namespace moekit {
namespace {

QuantSpec named(const char* weights, const char* activations = "") {
  QuantSpec spec;
  throw_if_failed(quant_from_names(weights, activations, spec));
  return spec;
}
std::string refusal(const QuantSpec& spec, const QuantTensors& tensors) {
  try {
    QuantConfig(spec, tensors);
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

TEST(quant_config, accessors_describe_each_scheme) {
  const QuantConfig plain(named("bf16"), {});
  EXPECT_FALSE(plain.quant_dtype() || plain.block_shape() || plain.per_act_token_quant() || plain.per_out_ch_quant());
  const QuantConfig int8(named("int8"), {});
  EXPECT_EQ(int8.quant_dtype(), DType::i8);
  EXPECT_TRUE(int8.per_act_token_quant() && int8.per_out_ch_quant() && !int8.block_shape());
  const QuantConfig fp8(named("fp8_block128"), {});
  EXPECT_EQ(fp8.quant_dtype(), DType::e4m3);
  EXPECT_EQ(fp8.block_shape(), (Granularity{128, 128}));
  EXPECT_FALSE(fp8.per_act_token_quant() || fp8.per_out_ch_quant());
  const QuantConfig weight_only(named("int8", "bf16"), {});
  EXPECT_FALSE(weight_only.quant_dtype() || weight_only.per_act_token_quant());
  EXPECT_TRUE(weight_only.per_out_ch_quant());
}

TEST(quant_config, a_static_scale_that_is_missing_or_not_announced_is_refused) {
  QuantSpec spec = named("int8");
  const float one = 1.0f;
  QuantTensors tensors;
  tensors.a2_scale = Tensor(&one, DType::f32, {1});
  EXPECT_NE(refusal(spec, tensors).find("a2_scale [1] is given, but a2.static_scale is false"), std::string::npos);
  spec.a2.static_scale = true;
  EXPECT_EQ(refusal(spec, tensors), "");
  EXPECT_NE(refusal(spec, {}).find("a2.static_scale is true, but a2_scale is missing"), std::string::npos);
}

TEST(quant_config, static_scales_must_be_f32_positive_and_finite) {
  QuantSpec spec = named("int8");
  spec.a1.static_scale = true;
  for (float value : {0.0f, -1.0f, std::numeric_limits<float>::infinity(), std::nanf("")}) {
    const float scales[2] = {1.0f, value};
    QuantTensors tensors;
    tensors.a1_scale = Tensor(scales, DType::f32, {2});
    EXPECT_NE(refusal(spec, tensors).find("a1_scale[1] must be above 0"), std::string::npos) << value;
  }
  const std::uint16_t half = 0x3c00;
  QuantTensors tensors;
  tensors.a1_scale = Tensor(&half, DType::f16, {1});
  EXPECT_NE(refusal(spec, tensors).find("a1_scale must be f32, got f16"), std::string::npos);
}

TEST(quant_config, scales_of_float_weights_and_zero_points_without_a_flag_are_refused) {
  const float one = 1.0f;
  QuantTensors tensors;
  tensors.w1_scale = Tensor(&one, DType::f32, {1, 1, 1});
  EXPECT_NE(refusal(named("bf16"), tensors).find("w1_scale [1, 1, 1] is given, but the weights are bf16"),
            std::string::npos);
  EXPECT_EQ(refusal(named("int8"), tensors), "");
  tensors = {};
  tensors.w2_zp = Tensor(&one, DType::f32, {1, 1, 1});
  EXPECT_NE(refusal(named("int8"), tensors).find("w2_zp"), std::string::npos);
  tensors = {};
  tensors.w1_bias = Tensor(&one, DType::f32, {1});
  EXPECT_NE(refusal(named("int8"), tensors).find("w1_bias must be [L, rows], got [1]"), std::string::npos);
}

}  // namespace
}  // namespace moekit
