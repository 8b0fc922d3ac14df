// Quantise and dequantise: the recorded codes of other libraries, the definition, and what must not break it.
#include <gtest/gtest.h>

#include <fstream>
#include <sstream>

#include "quant/quantise.hpp"
#include "support/random.hpp"

namespace moekit::quant {
namespace {

struct Row {
  std::vector<std::int8_t> codes;  // e4m3 codes as bytes
  std::vector<float> scales;
};
Row quantise(const std::vector<float>& x, const RowScheme& scheme) {
  Row out;
  const auto n = static_cast<std::int64_t>(x.size());
  out.codes.resize(x.size(), 0x55);
  out.scales.resize(static_cast<std::size_t>(scheme.num_groups(n)), -1.0f);
  quantise_row({x.data(), DType::f32, n}, scheme, out.codes.data(), out.scales.data());
  return out;
}
constexpr RowScheme kInt8{DType::i8, -1, 127.0f};
constexpr RowScheme kInt8Half{DType::i8, -1, 127.5f};
constexpr RowScheme kE4m3{DType::e4m3, 128};

std::vector<float> read_bits(const std::string& line) {
  std::istringstream in(line);
  std::vector<float> out;
  for (std::uint32_t word; in >> std::hex >> word;) out.push_back(std::bit_cast<float>(word));
  return out;
}

TEST(quantise, codes_and_scales_equal_those_of_the_libraries_that_define_the_formats) {
  std::ifstream file(MOEKIT_SOURCE_DIR "/tests/data/quant/activation_codes.txt");
  std::string line, values, codes, scales;
  int cases = 0;
  while (std::getline(file, line)) {
    if (line.starts_with("#")) continue;
    ASSERT_TRUE(std::getline(file, values) && std::getline(file, codes) && std::getline(file, scales)) << line;
    std::istringstream head(line);
    std::string name, type;
    float divisor;
    head >> name >> type >> divisor;
    const RowScheme scheme = type == "e4m3" ? kE4m3 : RowScheme{DType::i8, -1, divisor};
    const Row row = quantise(read_bits(values), scheme);
    std::istringstream in(codes);
    for (std::size_t i = 0; i < row.codes.size(); ++i) {
      int expected;
      in >> expected;
      EXPECT_EQ(row.codes[i], static_cast<std::int8_t>(expected)) << line << " element " << i;
    }
    EXPECT_EQ(row.scales, read_bits(scales)) << line;
    ++cases;
  }
  EXPECT_EQ(cases, 9);
}

TEST(quantise, an_all_zero_row_has_codes_0_and_a_finite_scale) {
  for (const RowScheme& scheme : {kInt8, kInt8Half, kE4m3}) {
    const Row row = quantise(std::vector<float>(200, -0.0f), scheme);
    for (std::int8_t code : row.codes) EXPECT_EQ(code, 0);
    for (float scale : row.scales) EXPECT_EQ(scale, 1.0f);
  }
}

TEST(quantise, a_tiny_absmax_never_makes_an_infinity_or_a_nan) {
  for (const RowScheme& scheme : {kInt8, kInt8Half, kE4m3})
    for (float absmax : {1e-45f, 6.3e-38f, 1.3e-36f, 5.9e-36f, 6.1e-36f, 1e-30f, 448.0f, 1e30f, 3.4e38f}) {
      const Row row = quantise({0.0f, absmax, -absmax / 2}, scheme);
      ASSERT_TRUE(std::isfinite(row.scales[0])) << absmax;
      EXPECT_GE(row.scales[0], 0x1p-126f) << absmax;  // never subnormal: flushing to zero changes nothing
      const float back = scheme.type == DType::i8
                             ? dequantise_int8(row.codes[1], row.scales[0])
                             : dequantise_e4m3(static_cast<std::uint8_t>(row.codes[1]), row.scales[0]);
      EXPECT_TRUE(std::isfinite(back)) << absmax;
      EXPECT_NEAR(back, absmax, absmax < 1e-35f ? 1e-35 : absmax * 0.01) << absmax;
      EXPECT_EQ(row.codes[0], 0);
    }
}

TEST(quantise, a_nan_or_an_infinity_makes_the_scale_of_its_own_unit_nan) {
  std::vector<float> x(300, 1.0f);
  for (float poison : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    x[130] = poison;
    const Row groups = quantise(x, kE4m3);
    EXPECT_EQ(groups.scales[0], 1.0f / 448.0f);
    EXPECT_TRUE(std::isnan(groups.scales[1]));
    EXPECT_EQ(groups.scales[2], 1.0f / 448.0f);
    EXPECT_EQ(groups.codes[131], 0);
    EXPECT_TRUE(std::isnan(quantise(x, kInt8).scales[0]));
  }
}

TEST(quantise, a_static_scale_saturates_and_is_written_back) {
  RowScheme scheme = kInt8;
  scheme.static_scale = 0.5f;
  const float inf = std::numeric_limits<float>::infinity();
  const Row row = quantise({0.25f, 0.75f, -100.0f, inf, -inf, std::nanf("")}, scheme);
  EXPECT_EQ(row.codes, (std::vector<std::int8_t>{0, 2, -127, 127, -127, 0}));  // 0.5 and 1.5 steps: ties to even
  EXPECT_EQ(row.scales[0], 0.5f);
  scheme.int8_divisor = 127.5f;
  EXPECT_EQ(quantise({-100.0f}, scheme).codes[0], -128);
  scheme = kE4m3, scheme.static_scale = 2.0f;
  EXPECT_EQ(static_cast<std::uint8_t>(quantise({2.0f, 1e9f}, scheme).codes[0]), numeric::f32_to_e4m3(1.0f));
  EXPECT_EQ(static_cast<std::uint8_t>(quantise({2.0f, 1e9f}, scheme).codes[1]), 0x7e);
}

TEST(quantise, every_int8_code_of_the_127_form_is_within_half_a_step_of_its_value) {
  testing::Random random(7);
  for (int trial = 0; trial < 50; ++trial) {
    std::vector<float> x(64);
    const float size = std::ldexp(1.0f, static_cast<int>(random.below(60)) - 30);
    for (float& value : x) value = random.normal() * size;
    for (const RowScheme& scheme : {kInt8, kInt8Half}) {
      const Row row = quantise(x, scheme);
      const double step = row.scales[0];
      for (std::size_t i = 0; i < x.size(); ++i) {
        // 127.5 clamps the largest positive value by half a step
        EXPECT_LE(std::abs(row.codes[i] * step - x[i]), step * (0.5 + 1e-5)) << i;
      }
    }
  }
}

TEST(quantise, the_factor_on_the_input_comes_before_the_scale) {
  const std::vector<float> x{1.0f, -2.0f, 0.5f};
  std::vector<std::int8_t> codes(3);
  float scale = 0;
  quantise_row({x.data(), DType::f32, 3, 0.37f}, kInt8, codes.data(), &scale);
  EXPECT_EQ(scale, 2.0f * 0.37f / 127.0f);
  EXPECT_EQ(codes[1], -127);
}

TEST(quantise, rows_of_every_float_type_and_stride_give_the_same_codes) {
  testing::Random random(3);
  std::vector<float> x(300);
  for (float& value : x) value = numeric::round_to(DType::bf16, numeric::round_to(DType::f16, random.normal()));
  for (const RowScheme& scheme : {kInt8, kE4m3}) {
    const Row expected = quantise(x, scheme);
    for (DType type : {DType::f32, DType::bf16, DType::f16})
      for (std::int64_t stride : {1, 3}) {
        std::vector<std::byte> memory(static_cast<std::size_t>(300 * stride * bytes(type)));
        for (std::int64_t i = 0; i < 300; ++i)
          numeric::store_f32(memory.data(), type, i * stride, x[static_cast<std::size_t>(i)]);
        Row row = expected;
        std::fill(row.codes.begin(), row.codes.end(), std::int8_t{99});
        quantise_row({memory.data(), type, 300, 1.0f, stride}, scheme, row.codes.data(), row.scales.data());
        EXPECT_EQ(row.codes, expected.codes);
        EXPECT_EQ(row.scales, expected.scales);
      }
  }
}

TEST(quantise, partial_weight_blocks_have_scales_of_their_own) {
  std::vector<float> w(200 * 130, 1.0f);
  w[199 * 130 + 129] = 448.0f;
  std::vector<std::uint8_t> codes(w.size());
  std::vector<float> scales(4, -1.0f);
  const Tensor matrix(w.data(), DType::f32, {200, 130});
  ASSERT_TRUE(quantise_weights(matrix, {DType::e4m3, {128, 128}}, Tensor(codes.data(), DType::e4m3, {200, 130}),
                               Tensor(scales.data(), DType::f32, {2, 2}))
                  .ok());
  EXPECT_EQ(scales, (std::vector<float>{1.0f / 448, 1.0f / 448, 1.0f / 448, 1.0f}));
  EXPECT_EQ(dequantise_e4m3(codes[0], scales[0]), 1.0f);
  EXPECT_EQ(dequantise_e4m3(codes.back(), scales[3]), 448.0f);
  EXPECT_EQ(scale_extent(200, 128), 2);
  EXPECT_EQ(scale_extent(128, 128), 1);
  EXPECT_EQ(scale_extent(5, -1), 1);
}

}  // namespace
}  // namespace moekit::quant
