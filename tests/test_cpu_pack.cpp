// The pack cpu32.
#include <gtest/gtest.h>

#include <algorithm>

#include "experts/cpu/pack.hpp"
#include "support/cpu_case.hpp"

namespace moekit {
namespace {
using testing::Case;
using testing::CaseSpec;

TEST(CpuPack, unpack_of_pack_is_exact) {
  for (DType type : {DType::f32, DType::bf16, DType::f16, DType::i8, DType::e4m3})
    for (bool gated : {true, false})
      for (std::int64_t K : {1, 31, 32, 33, 130, 257})
        for (std::int64_t I : {1, 15, 16, 17, 129}) {
          CaseSpec s{2, 1, 1, K, I};
          s.weights = type;
          s.bias = true;
          s.activation.gated = gated;
          const Case c(s);
          std::vector<std::byte> storage;
          const WeightsView view = c.packed(cpu::cpu32_format(), storage);
          EXPECT_EQ(view.expert_stride % 64, 0u);
          Case back = c;
          for (auto* bytes : {&back.gate, &back.up, &back.down})
            std::fill(bytes->begin(), bytes->end(), std::byte{0xee});
          for (auto* floats :
               {&back.gate_scale, &back.up_scale, &back.down_scale, &back.gate_bias, &back.up_bias, &back.down_bias})
            std::fill(floats->begin(), floats->end(), -99.0f);
          for (std::int64_t e = 0; e < s.E; ++e)
            ASSERT_TRUE(view.format->unpack_expert(view.expert(e), view.spec, back.expert(e)).ok());
          EXPECT_EQ(back.up, c.up) << to_string(s);
          EXPECT_EQ(back.down, c.down) << to_string(s);
          EXPECT_EQ(back.up_scale, c.up_scale);
          EXPECT_EQ(back.down_scale, c.down_scale);
          EXPECT_EQ(back.up_bias, c.up_bias);
          EXPECT_EQ(back.down_bias, c.down_bias);
          if (!gated) continue;
          EXPECT_EQ(back.gate, c.gate) << to_string(s);
          EXPECT_EQ(back.gate_scale, c.gate_scale);
          EXPECT_EQ(back.gate_bias, c.gate_bias);
        }
}

TEST(CpuPack, packing_writes_every_byte_and_padding_is_zero) {
  CaseSpec s{1, 1, 1, 33, 17};
  s.weights = DType::bf16;
  const Case c(s);
  const WeightsSpec spec = c.problem(1).weights;
  const std::size_t bytes = cpu::cpu32_format().bytes(spec);
  std::vector<std::byte> a(bytes + 64, std::byte{0xff}), b(bytes + 64, std::byte{0x00});
  auto aligned = [](std::vector<std::byte>& v) {
    return v.data() + (64 - reinterpret_cast<std::uintptr_t>(v.data()) % 64) % 64;
  };
  ASSERT_TRUE(cpu::cpu32_format().pack_expert(aligned(a), spec, c.expert(0)).ok());
  ASSERT_TRUE(cpu::cpu32_format().pack_expert(aligned(b), spec, c.expert(0)).ok());
  EXPECT_TRUE(std::equal(aligned(a), aligned(a) + bytes, aligned(b)));
}

TEST(CpuPack, strides_of_the_source_do_not_matter) {
  CaseSpec s{1, 1, 1, 40, 24};
  const Case c(s);
  const WeightsSpec spec = c.problem(1).weights;
  std::vector<float> turned(static_cast<std::size_t>(s.K * s.I));
  for (std::int64_t i = 0; i < s.I; ++i)
    for (std::int64_t k = 0; k < s.K; ++k)
      turned[static_cast<std::size_t>(k * s.I + i)] = numeric::load_f32(c.up.data(), DType::f32, i * s.K + k);
  CanonicalExpert expert = c.expert(0);
  std::vector<std::byte> storage;
  const WeightsView plain = c.packed(cpu::cpu32_format(), storage);
  expert.up = Tensor::strided(turned.data(), DType::f32, {s.I, s.K}, {1, s.I});
  std::vector<std::byte> other(plain.expert_stride + 64);
  auto* begin = other.data() + (64 - reinterpret_cast<std::uintptr_t>(other.data()) % 64) % 64;
  ASSERT_TRUE(cpu::cpu32_format().pack_expert(begin, spec, expert).ok());
  EXPECT_TRUE(std::equal(begin, begin + plain.expert_stride, plain.data));
}

TEST(CpuPack, a_line_of_bf16_is_sixteen_columns_by_two_k) {
  CaseSpec s{1, 1, 1, 4, 32};
  s.weights = DType::bf16;
  s.activation = {ActivationKind::none, false};
  const Case c(s);
  std::vector<std::byte> storage;
  const WeightsView view = c.packed(cpu::cpu32_format(), storage);
  const auto* up = reinterpret_cast<const std::uint16_t*>(c.up.data());
  const auto* packed = reinterpret_cast<const std::uint16_t*>(view.data);
  for (int k = 0; k < 4; ++k)
    for (int column = 0; column < 32; ++column)
      EXPECT_EQ(packed[(k / 2 * 32 + column) * 2 + k % 2], up[column * 4 + k]);
}

}  // namespace
}  // namespace moekit
