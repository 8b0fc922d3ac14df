// Every pack format: the round trip is exact, padding is zero, and what does not fit is refused by name.
#include <gtest/gtest.h>

#include <moekit/kit/implementations.hpp>

#include <algorithm>

#include "experts/canonical.hpp"
#include "support/random.hpp"

namespace moekit::experts {
namespace {

/// An expert with memory of its own for every part that the spec wants.
struct OwnedExpert {
  std::vector<std::vector<std::byte>> memory;
  CanonicalExpert expert;
};
OwnedExpert random_expert(const WeightsSpec& spec, std::uint64_t seed) {
  testing::Random random(seed);
  OwnedExpert out;
  for (const ExpertPart& part : expert_parts(spec)) {
    if (!part.wanted) continue;
    std::vector<std::byte> bytes(static_cast<std::size_t>(part.numel() * moekit::bytes(part.type)));
    if (is_float(part.type))
      bytes = testing::normal_values(random, part.type, part.numel());
    else
      for (std::byte& code : bytes) code = static_cast<std::byte>(random.below(256));
    out.memory.push_back(std::move(bytes));
    void* data = out.memory.back().data();
    out.expert.*part.member = part.rank == 2 ? Tensor(data, part.type, {part.shape[0], part.shape[1]})
                                             : Tensor(data, part.type, {part.shape[0]});
  }
  return out;
}

WeightsSpec spec_of(const char* scheme, bool gated = true, bool bias = false) {
  QuantSpec quant;
  throw_if_failed(quant_from_names(scheme, "", quant));
  WeightsSpec spec;
  spec.num_local = 3, spec.hidden = 200, spec.intermediate = 72;  // blocks of 128: partial ones in both directions
  spec.gated = gated, spec.w1 = quant.w1, spec.w2 = quant.w2, spec.w1_bias = bias, spec.w2_bias = bias;
  return spec;
}

template <class Check>
void for_every_spec(const Check& check) {
  for (const char* scheme : {"f32", "bf16", "f16", "int8", "fp8_block128"})
    for (bool gated : {true, false})
      for (bool bias : {true, false}) {
        SCOPED_TRACE(std::string(scheme) + (gated ? " gated" : " ungated") + (bias ? " bias" : ""));
        check(spec_of(scheme, gated, bias));
      }
}

struct Aligned {
  explicit Aligned(std::size_t n) : bytes(n + 64 + 128, std::byte{0xff}) {
    void* p = bytes.data() + 64;
    std::size_t room = n + 64 + 64;
    data = static_cast<std::byte*>(std::align(64, n, p, room));
  }
  std::vector<std::byte> bytes;
  std::byte* data;
};

TEST(pack, unpacking_gives_back_every_bit_in_every_format) {
  for (const PackFormat* format : pack_formats())
    for_every_spec([&](const WeightsSpec& spec) {
      if (!format->supports(spec).ok()) {
        EXPECT_FALSE(format->supports(spec).reason().empty());
        return;
      }
      const std::size_t n = format->bytes(spec);
      EXPECT_EQ(n % 64, 0u);
      const OwnedExpert in = random_expert(spec, 5);
      OwnedExpert out = random_expert(spec, 6);
      Aligned packed(n);
      ASSERT_TRUE(format->pack_expert(packed.data, spec, in.expert).ok());
      for (std::size_t i = 0; i < 64; ++i) {  // red zones
        ASSERT_EQ(packed.data[-1 - static_cast<std::ptrdiff_t>(i)], std::byte{0xff});
        ASSERT_EQ(packed.data[n + i], std::byte{0xff});
      }
      ASSERT_TRUE(format->unpack_expert(packed.data, spec, out.expert).ok());
      EXPECT_EQ(in.memory, out.memory) << format->id();
    });
}

TEST(pack, packing_twice_gives_the_same_bytes_whatever_was_there) {
  for (const PackFormat* format : pack_formats())
    for_every_spec([&](const WeightsSpec& spec) {
      if (!format->supports(spec).ok()) return;
      const OwnedExpert in = random_expert(spec, 5);
      Aligned first(format->bytes(spec)), second(format->bytes(spec));
      std::fill_n(second.data, format->bytes(spec), std::byte{0});
      ASSERT_TRUE(format->pack_expert(first.data, spec, in.expert).ok());
      ASSERT_TRUE(format->pack_expert(second.data, spec, in.expert).ok());
      EXPECT_TRUE(std::equal(first.data, first.data + format->bytes(spec), second.data)) << format->id();
    });
}

TEST(pack, transposed_and_interleaved_sources_are_read_through_their_strides) {
  const WeightsSpec spec = spec_of("f32");
  const std::int64_t I = spec.intermediate, K = spec.hidden;
  const OwnedExpert dense = random_expert(spec, 9);
  // w1 stored [K, 2I] with gate and up alternating, w2 stored [I, K]
  std::vector<float> w1(static_cast<std::size_t>(2 * I * K)), w2(static_cast<std::size_t>(I * K));
  for (std::int64_t i = 0; i < I; ++i)
    for (std::int64_t k = 0; k < K; ++k) {
      w1[static_cast<std::size_t>(k * 2 * I + 2 * i)] = dense.expert.gate.at<float>(i, k);
      w1[static_cast<std::size_t>(k * 2 * I + 2 * i + 1)] = dense.expert.up.at<float>(i, k);
      w2[static_cast<std::size_t>(i * K + k)] = dense.expert.down.at<float>(k, i);
    }
  CanonicalExpert strided;
  strided.gate = Tensor::strided(w1.data(), DType::f32, {I, K}, {2, 2 * I});
  strided.up = Tensor::strided(w1.data() + 1, DType::f32, {I, K}, {2, 2 * I});
  strided.down = Tensor::strided(w2.data(), DType::f32, {K, I}, {1, K});
  for (const PackFormat* format : pack_formats()) {
    if (!format->supports(spec).ok()) continue;
    Aligned a(format->bytes(spec)), b(format->bytes(spec));
    ASSERT_TRUE(format->pack_expert(a.data, spec, dense.expert).ok());
    ASSERT_TRUE(format->pack_expert(b.data, spec, strided).ok());
    EXPECT_TRUE(std::equal(a.data, a.data + format->bytes(spec), b.data)) << format->id();
  }
}

TEST(pack, float_matrices_are_converted_with_one_rounding) {
  const WeightsSpec spec = spec_of("bf16"), wide = spec_of("f32");
  const OwnedExpert in = random_expert(wide, 9);
  for (const PackFormat* format : pack_formats()) {
    if (!format->supports(spec).ok()) continue;
    Aligned packed(format->bytes(spec));
    ASSERT_TRUE(format->pack_expert(packed.data, spec, in.expert).ok());
    OwnedExpert out = random_expert(spec, 1);
    ASSERT_TRUE(format->unpack_expert(packed.data, spec, out.expert).ok());
    for (std::int64_t i = 0; i < spec.intermediate; ++i)
      EXPECT_EQ(out.expert.up.at<std::uint16_t>(i, 7), numeric::f32_to_bf16(in.expert.up.at<float>(i, 7)));
  }
}

TEST(pack, a_tensor_of_the_wrong_shape_names_itself_and_both_shapes) {
  const WeightsSpec spec = spec_of("bf16", true, true);
  for (const PackFormat* format : pack_formats())
    for (const ExpertPart& part : expert_parts(spec)) {
      if (!part.wanted) continue;
      OwnedExpert in = random_expert(spec, 5);
      Tensor& tensor = in.expert.*part.member;
      tensor.shape[0] -= 1;
      const Status s = format->pack_expert(Aligned(format->bytes(spec)).data, spec, in.expert);
      EXPECT_EQ(s.code(), StatusCode::invalid_shape) << part.name;
      EXPECT_NE(s.message().find(part.name), std::string::npos) << s.message();
      EXPECT_NE(s.message().find(std::to_string(part.shape[0])), std::string::npos) << s.message();
      EXPECT_NE(s.message().find(std::to_string(part.shape[0] - 1)), std::string::npos) << s.message();
      tensor = {};
      EXPECT_NE(format->pack_expert(Aligned(format->bytes(spec)).data, spec, in.expert).message().find("missing"),
                std::string::npos);
    }
}

TEST(pack, a_bias_or_a_gate_that_the_spec_does_not_know_is_refused_instead_of_ignored) {
  const OwnedExpert with_bias = random_expert(spec_of("bf16", true, true), 5);
  const OwnedExpert gated = random_expert(spec_of("bf16"), 5);
  for (const PackFormat* format : pack_formats()) {
    Aligned dst(format->bytes(spec_of("bf16")));
    EXPECT_EQ(format->pack_expert(dst.data, spec_of("bf16"), with_bias.expert).field(), "gate_bias");
    EXPECT_EQ(format->pack_expert(dst.data, spec_of("bf16", false), gated.expert).field(), "gate");
  }
}

TEST(pack, a_scale_that_is_not_finite_is_refused_with_its_position) {
  const WeightsSpec spec = spec_of("fp8_block128");
  for (const PackFormat* format : pack_formats()) {
    if (!format->supports(spec).ok()) continue;
    OwnedExpert in = random_expert(spec, 5);
    in.expert.down_scale.at<float>(1, 0) = std::numeric_limits<float>::infinity();
    const Status s = format->pack_expert(Aligned(format->bytes(spec)).data, spec, in.expert);
    EXPECT_NE(s.message().find("down_scale[1, 0] is inf"), std::string::npos) << s.message();
  }
}

TEST(pack, matrices_of_another_quantised_type_are_refused) {
  OwnedExpert int8 = random_expert(spec_of("int8"), 5);
  const WeightsSpec fp8 = spec_of("fp8_block128");
  for (const PackFormat* format : pack_formats()) {
    if (!format->supports(fp8).ok()) continue;
    const Status s = format->pack_expert(Aligned(format->bytes(fp8)).data, fp8, int8.expert);
    EXPECT_NE(s.message().find("gate must be e4m3, got int8"), std::string::npos) << s.message();
  }
}

TEST(pack, block_scales_of_partial_blocks_have_ceil_extents) {
  const WeightsSpec spec = spec_of("fp8_block128");
  const auto parts = expert_parts(spec);
  EXPECT_EQ(parts[3].shape, (std::array<std::int64_t, 2>{1, 2}));  // gate [72, 200]
  EXPECT_EQ(parts[5].shape, (std::array<std::int64_t, 2>{2, 1}));  // down [200, 72]
}

TEST(pack, canonical_is_last_and_w1_is_one_matrix_gate_rows_first) {
  EXPECT_EQ(pack_formats().back()->id(), "canonical");
  const WeightsSpec spec = spec_of("bf16");
  const OwnedExpert in = random_expert(spec, 5);
  Aligned packed(canonical_format().bytes(spec));
  ASSERT_TRUE(canonical_format().pack_expert(packed.data, spec, in.expert).ok());
  const std::size_t half = in.memory[0].size();
  EXPECT_TRUE(std::equal(in.memory[0].begin(), in.memory[0].end(), packed.data));
  EXPECT_TRUE(std::equal(in.memory[1].begin(), in.memory[1].end(), packed.data + half));
}

}  // namespace
}  // namespace moekit::experts
