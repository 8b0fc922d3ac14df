// The oracle against other people's results, and the constants and steps of its error model against brute force.
#include <gtest/gtest.h>

#include <cmath>

#include <moekit/checkpoint.hpp>

#include "experts/activation.hpp"
#include "experts/canonical.hpp"
#include "experts/error_bound.hpp"
#include "experts/oracle.hpp"
#include "io/safetensors.hpp"
#include "support/random.hpp"
#include "text.hpp"

namespace moekit::oracle {
namespace {

struct GoldenCase {
  const char *folder, *activations, *expected;
  float divisor;
  double tolerance;
};

/// y of golden.safetensors for `rows` tokens from its weights, ids and router weights, as max |y - out| / max |out|.
double distance_to_golden(const GoldenCase& golden, const std::string& rows) {
  const std::string folder = text::concat(MOEKIT_SOURCE_DIR "/tests/data/golden_quant/", golden.folder);
  const Checkpoint checkpoint = Checkpoint::open(folder);
  LayerConfig config = checkpoint.layers()[0].config;
  throw_if_failed(quant_from_names(weights_scheme(config.quant), golden.activations, config.quant));
  config.quant.int8_divisor = golden.divisor;
  const WeightsSpec spec = weights_spec(config, config.num_experts);
  const WeightsSource source = checkpoint.source(checkpoint.layers()[0].index);
  const PackFormat& format = experts::canonical_format();
  std::vector<std::byte> pack(format.bytes(spec) * static_cast<std::size_t>(spec.num_local));
  for (std::int64_t e = 0; e < spec.num_local; ++e) {
    CanonicalExpert expert;
    throw_if_failed(source.expert(e, expert));
    throw_if_failed(format.pack_expert(pack.data() + static_cast<std::size_t>(e) * format.bytes(spec), spec, expert));
  }

  const io::SafetensorsFile file(text::concat(folder, "/golden.safetensors"));
  auto tensor = [&](const char* key) {
    return file.get(text::concat(checkpoint.layers()[0].module, "|", rows, "|", key)).view();
  };
  const Tensor in = tensor("in"), ids64 = tensor("topk_ids"), out = tensor(golden.expected);
  std::vector<std::int32_t> ids;
  for (std::int64_t i = 0; i < ids64.numel(); ++i)
    ids.push_back(static_cast<std::int32_t>(ids64.as<std::int64_t>()[i]));
  ExpertsArgs args;
  const QuantConfig quant(config.quant, {});
  args.quant = &quant;
  args.weights = {&format, spec, pack.data(), format.bytes(spec)};
  args.activation = config.activation;
  args.num_experts = config.num_experts;
  args.routing = {Tensor(ids.data(), DType::i32, {ids64.shape[0], ids64.shape[1]}), tensor("topk_weights"), {}};
  args.activations.data = in;
  std::vector<std::byte> codes(static_cast<std::size_t>(in.numel()));
  std::vector<float> scales;
  if (const QuantDesc& a1 = config.quant.a1; !is_float(a1.type)) {
    const quant::RowScheme scheme{a1.type, a1.granularity.cols, config.quant.int8_divisor};
    const std::int64_t groups = scheme.num_groups(in.shape[1]);
    scales.resize(static_cast<std::size_t>(in.shape[0] * groups));
    for (std::int64_t t = 0; t < in.shape[0]; ++t)
      quant::quantise_row({&in.at<float>(t, 0), DType::f32, in.shape[1]}, scheme, codes.data() + t * in.shape[1],
                          scales.data() + t * groups);
    args.activations = {Tensor(codes.data(), a1.type, {in.shape[0], in.shape[1]}),
                        Tensor(scales.data(), DType::f32, {in.shape[0], groups}), a1.granularity};
  }
  const Rounded rounded{};
  const Expected expected = ask(args, {&rounded, 1}, sample_rows(in.shape[0], in.shape[0], 1), cpu_executor(1));
  double worst = 0, largest = 0;
  for (std::int64_t i = 0; i < out.numel(); ++i) {
    worst = std::max(worst, std::abs(out.as<double>()[i] - expected.value[static_cast<std::size_t>(i)]));
    largest = std::max(largest, std::abs(out.as<double>()[i]));
  }
  return worst / largest;
}

TEST(oracle, agrees_with_published_quantised_layers) {
  for (const GoldenCase& golden : {GoldenCase{"ct_int8_w8a8", "int8_token", "out_actq", 127.5f, 1e-6},
                                   GoldenCase{"ct_int8_w8a8", "int8_token", "out_actq_127", 127.0f, 1e-6},
                                   GoldenCase{"ct_int8_w8a8", "f32", "out", 127.0f, 1e-7},
                                   GoldenCase{"fp8_block128", "fp8_group128", "out_actq", 127.0f, 1e-6},
                                   GoldenCase{"fp8_block128", "f32", "out", 127.0f, 1e-7}})
    for (const char* rows : {"M1", "M37"})
      EXPECT_LT(distance_to_golden(golden, rows), golden.tolerance) << golden.folder << " " << golden.expected << rows;
}

TEST(error_model, unit_roundoffs_are_the_largest_relative_errors_of_the_conversions) {
  for (DType type : {DType::bf16, DType::f16}) {
    double worst = 0;
    for (int i = 0; i < 1 << 20; ++i) {
      const float x = 1.0f + static_cast<float>(i) * 0x1p-20f;
      worst = std::max(worst, std::abs(static_cast<double>(numeric::round_to(type, x)) - x) / x);
    }
    EXPECT_LE(worst, unit_roundoff(type));
    EXPECT_GT(worst, unit_roundoff(type) * 0.99) << name(type);  // not looser than it must be
  }
  EXPECT_EQ(unit_roundoff(DType::bf16), 0x1p-8);  // 8 significant bits
  EXPECT_EQ(unit_roundoff(DType::f16), 0x1p-11);
  for (float x = 0x1p-30f; x < 0x1p-14f; x *= 1.0009f)
    EXPECT_LE(std::abs(static_cast<double>(numeric::round_to(DType::f16, x)) - x), smallest_error(DType::f16));
}

TEST(error_model, moving_gate_and_up_within_their_errors_moves_h_within_its_bound) {
  testing::Random random(17);
  std::vector<Activation> all{Activation::swigluoai(), Activation::swigluoai(0.5f)};
  for (ActivationKind kind :
       {ActivationKind::silu, ActivationKind::gelu, ActivationKind::gelu_tanh, ActivationKind::relu2})
    for (bool gated : {true, false}) all.push_back(Activation{kind, gated});
  for (const Activation& activation : all) {
    const ErrorModel model({}, nullptr, activation);
    double tightest = 1e9;
    for (int trial = 0; trial < 20000; ++trial) {
      const double gate = random.normal() * 3, up = random.normal() * 3;
      const double gate_error = std::abs(random.normal()) * 0.01, up_error = std::abs(random.normal()) * 0.01;
      const double bound = model.activate(gate, gate_error, up, up_error);
      const double exact = experts::activate(activation, gate, up);
      for (double side : {-1.0, 1.0})
        for (double other : {-1.0, 1.0}) {
          const double moved = experts::activate(activation, gate + side * gate_error, up + other * up_error);
          EXPECT_LE(std::abs(moved - exact), bound) << to_string(activation) << " " << gate << " " << up;
          if (moved != exact) tightest = std::min(tightest, bound / std::abs(moved - exact));
        }
      const float single = experts::activate(activation, static_cast<float>(gate), static_cast<float>(up));
      const double rounded = experts::activate(activation, static_cast<double>(static_cast<float>(gate)),
                                               static_cast<double>(static_cast<float>(up)));
      EXPECT_LE(std::abs(single - rounded), model.activate(gate, 0, up, 0)) << to_string(activation) << " " << gate;
    }
    EXPECT_LT(tightest, 1.3) << to_string(activation);  // the bound is attained
  }
}

TEST(error_model, any_h_within_its_error_gets_codes_and_scales_within_the_bound) {
  testing::Random random(23);
  const quant::RowScheme schemes[] = {{DType::i8, -1, 127.0f},
                                      {DType::i8, -1, 127.5f},
                                      {DType::e4m3, 16},
                                      {DType::i8, -1, 127.0f, 0.01f},
                                      {DType::e4m3, 16, 127.0f, 0.01f}};
  for (const quant::RowScheme& scheme : schemes)
    for (int trial = 0; trial < 300; ++trial) {
      constexpr std::int64_t n = 40;
      const double size = std::pow(2.0, random.uniform() * 40 - 30),
                   relative = std::pow(10.0, -1 - 6 * random.uniform());
      std::vector<double> h(n), error(n), moved(n);
      for (std::size_t i = 0; i < n; ++i) {
        h[i] = random.normal() * size;
        error[i] = std::abs(random.normal()) * size * relative + std::abs(h[i]) * 0x1p-23;
      }
      std::vector<double> ours = h, bound = error;
      std::span<double> spans[] = {std::span<double>(bound)};
      quantise_h(scheme, ours, spans);
      for (int other = 0; other < 4; ++other) {
        std::vector<float> theirs(n);
        for (std::size_t i = 0; i < n; ++i)
          theirs[i] = static_cast<float>(h[i] + error[i] * 0.99 * (other == 0 ? 1 : 2 * random.uniform() - 1));
        std::vector<std::uint8_t> codes(n);
        std::vector<float> scales(n);
        quant::quantise_row({theirs.data(), DType::f32, n}, scheme, codes.data(), scales.data());
        for (std::int64_t i = 0; i < n; ++i) {
          const double value = static_cast<double>(numeric::load_f32(codes.data(), scheme.type, i)) *
                               scales[static_cast<std::size_t>(quant::scale_index(i, scheme.group))];
          const auto at = static_cast<std::size_t>(i);
          ASSERT_LE(std::abs(value - ours[at]), bound[at]) << "h " << h[at] << " ± " << error[at];
        }
      }
    }
}

TEST(error_model, more_lanes_and_exact_dots_make_the_bound_smaller) {
  QuantSpec int8;
  throw_if_failed(quant_from_names("int8", "", int8));
  const ErrorModel plain({}, &int8, {}), lanes({.sum_lanes = 8}, &int8, {}), exact({.integer_dots = true}, &int8, {});
  EXPECT_NEAR(plain.dot(2880, 1, 50), 2885 * 0x1p-24 / (1 - 2885 * 0x1p-24) * 50, 1e-12);
  EXPECT_LT(lanes.dot(2880, 1, 50), plain.dot(2880, 1, 50) / 7);
  EXPECT_LT(exact.dot(2880, 1, 50), plain.dot(2880, 1, 50) / 100);
}

TEST(oracle, sampled_rows_hold_the_first_and_the_last_and_no_row_twice) {
  const auto rows = sample_rows(1000, 32, 5);
  EXPECT_EQ(rows.size(), 34u);
  EXPECT_EQ(rows.front(), 0);
  EXPECT_EQ(rows.back(), 999);
  for (std::size_t i = 1; i < rows.size(); ++i) EXPECT_LT(rows[i - 1], rows[i]);
  EXPECT_EQ(sample_rows(10, 32, 5).size(), 10u);
  EXPECT_TRUE(sample_rows(0, 32, 5).empty());
}

TEST(oracle, a_number_where_there_must_be_none_and_the_other_way_round_is_infinitely_wrong) {
  Expected expected{1, {0}, {std::nan("")}, {{1.0}}};
  float value = 0;
  const Tensor output(&value, DType::f32, {1, 1});
  EXPECT_FALSE(compare(output, expected, 0).ok);
  value = INFINITY;
  EXPECT_TRUE(compare(output, expected, 0).ok);
  expected.value[0] = 1.0;
  EXPECT_FALSE(compare(output, expected, 0).ok);
  expected.value[0] = 1e39;  // does not fit f32
  EXPECT_TRUE(compare(output, expected, 0).ok);
}

}  // namespace
}  // namespace moekit::oracle
