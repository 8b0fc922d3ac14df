// Narrow number formats against the definition, every code.
#include <gtest/gtest.h>

#include "quant/numeric.hpp"

namespace moekit::numeric {
namespace {

TEST(numeric, e4m3_every_code_decodes_as_defined_and_encodes_back) {
  for (int code = 0; code < 256; ++code) {
    const int exponent = (code >> 3) & 15, mantissa = code & 7;
    const float value = e4m3_to_f32(static_cast<std::uint8_t>(code));
    if ((code & 0x7f) == 0x7f) {
      EXPECT_TRUE(std::isnan(value));
      continue;
    }
    const double magnitude = exponent ? std::ldexp(8 + mantissa, exponent - 10) : std::ldexp(mantissa, -9);
    EXPECT_EQ(value, static_cast<float>(code & 0x80 ? -magnitude : magnitude)) << code;
    EXPECT_EQ(f32_to_e4m3(value), code);
  }
}

TEST(numeric, e4m3_cast_saturates_and_never_makes_a_nan_out_of_a_number) {
  for (float value : {448.0f, 449.0f, 464.0f, 480.0f, 1e30f, INFINITY}) {
    EXPECT_EQ(f32_to_e4m3(value), 0x7e) << value;
    EXPECT_EQ(f32_to_e4m3(-value), 0xfe) << value;
  }
  EXPECT_EQ(f32_to_e4m3(NAN) & 0x7f, 0x7f);
  EXPECT_EQ(f32_to_e4m3(0.0f), 0x00);
}

TEST(numeric, e4m3_rounds_ties_to_even) {
  for (int code = 0; code + 1 < 0x7f; ++code) {
    const float low = e4m3_to_f32(static_cast<std::uint8_t>(code)),
                high = e4m3_to_f32(static_cast<std::uint8_t>(code + 1));
    EXPECT_EQ(f32_to_e4m3((low + high) / 2), code % 2 ? code + 1 : code);
    EXPECT_EQ(f32_to_e4m3(std::nextafter((low + high) / 2, 0.0f)), code);
    EXPECT_EQ(f32_to_e4m3(std::nextafter((low + high) / 2, 1e9f)), code + 1);
  }
}

TEST(numeric, f16_and_bf16_every_code_round_trips) {
  for (int code = 0; code < 65536; ++code) {
    const auto c = static_cast<std::uint16_t>(code);
    if (float v = f16_to_f32(c); !std::isnan(v)) EXPECT_EQ(f32_to_f16(v), c);
    if (float v = bf16_to_f32(c); !std::isnan(v)) EXPECT_EQ(f32_to_bf16(v), c);
  }
  EXPECT_TRUE(std::isnan(f16_to_f32(f32_to_f16(NAN))));
  EXPECT_TRUE(std::isnan(bf16_to_f32(f32_to_bf16(std::bit_cast<float>(0x7f800001u)))));
}

TEST(numeric, f16_rounds_to_nearest_even_and_overflows_to_infinity) {
  for (int code = 0; code < 0x7bff; ++code) {
    const float low = f16_to_f32(static_cast<std::uint16_t>(code)),
                high = f16_to_f32(static_cast<std::uint16_t>(code + 1));
    EXPECT_EQ(f32_to_f16((low + high) / 2), code % 2 ? code + 1 : code);
  }
  EXPECT_EQ(f32_to_f16(65519.0f), 0x7bff);
  EXPECT_EQ(f32_to_f16(65520.0f), 0x7c00);
}

}  // namespace
}  // namespace moekit::numeric
