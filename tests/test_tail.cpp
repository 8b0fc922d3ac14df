// The last reduction left open, and closed by a consumer: alone, and together with residual and RMSNorm.
#include <gtest/gtest.h>

#include <cmath>

#include "support/kit_doubles.hpp"
#include "support/random.hpp"
#include "tail/tail.hpp"

namespace moekit::testing {
namespace {

std::unique_ptr<Experts> make_experts(const char* name) {
  for (const ExpertsEntry& entry : experts_implementations())
    if (entry.name == name) return entry.make({});
  return nullptr;
}

/// An open output with values that a test chooses: token t, slot j lies in row order[t * k + j].
struct Open {
  std::int64_t M, k, K, rows;
  DType type;
  std::vector<std::byte> gemm2;
  std::vector<float> weights, shared, residual, gamma, y, norm, residual_out;
  std::vector<std::int32_t> map;
  MoeOutput moe;

  Open(std::int64_t tokens, std::int64_t slots, std::int64_t columns, DType t = DType::f32, std::uint64_t seed = 1)
      : M(tokens), k(slots), K(columns), rows(tokens * slots + 3), type(t) {
    Random random(seed);
    gemm2 = normal_values(random, type, rows * K);
    const auto fill = [&](std::vector<float>& v, std::int64_t n) {
      v.resize(static_cast<std::size_t>(n));
      for (float& x : v) x = random.normal();
    };
    fill(weights, M * k), fill(shared, M * K), fill(residual, M * K), fill(gamma, K);
    y.assign(shared.size(), std::nanf("")), norm = residual_out = y;
    for (std::int64_t i = 0; i < M * k; ++i) map.push_back(static_cast<std::int32_t>((i * 5 + 2) % rows));
    UnfinalizedOutput open;
    open.gemm2_permuted = Tensor(gemm2.data(), type, {rows, K});
    open.expert_weights = Tensor(weights.data(), DType::f32, {M, k});
    open.expanded_to_permuted = Tensor(map.data(), DType::i32, {M, k});
    moe.routed = open;
  }
  void with_shared() { moe.shared = Tensor(shared.data(), DType::f32, {M, K}); }
  Tail tail(float eps = 1e-6f) {
    return {Tensor(residual.data(), DType::f32, {M, K}), Tensor(gamma.data(), DType::f32, {K}), eps,
            Tensor(norm.data(), DType::f32, {M, K}), Tensor(residual_out.data(), DType::f32, {M, K})};
  }
  /// f64, and Σ of magnitudes
  std::pair<double, double> routed(std::int64_t t, std::int64_t c) const {
    double sum = 0, magnitude = 0;
    for (std::int64_t j = 0; j < k; ++j) {
      const std::int32_t row = map[static_cast<std::size_t>(t * k + j)];
      if (row < 0) continue;
      const double term = static_cast<double>(weights[static_cast<std::size_t>(t * k + j)]) *
                          static_cast<double>(numeric::load_f32(gemm2.data(), type, row * K + c));
      sum += term, magnitude += std::abs(term);
    }
    sum *= moe.routed_scaling_factor, magnitude *= std::abs(moe.routed_scaling_factor);
    if (moe.shared.present()) {
      const double s = shared[static_cast<std::size_t>(t * K + c)];
      sum += s, magnitude += std::abs(s);
    }
    return {sum, magnitude};
  }
};

TEST(tail, closing_equals_the_f64_sum_within_k_roundings) {
  for (DType type : {DType::f32, DType::bf16, DType::f16})
    for (std::int64_t K : {1, 7, 256, 300})
      for (bool shared : {false, true}) {
        Open o(5, 3, K, type, static_cast<std::uint64_t>(K));
        o.map[1] = o.map[4] = -1;
        o.moe.routed_scaling_factor = 2.5f;
        if (shared) o.with_shared();
        ASSERT_TRUE(close_output(o.moe, Tensor(o.y.data(), DType::f32, {5, K}), {}).ok());
        for (std::int64_t t = 0; t < 5; ++t)
          for (std::int64_t c = 0; c < K; ++c) {
            const auto [value, magnitude] = o.routed(t, c);  // k products, k + 2 sums, one scaling
            ASSERT_NEAR(o.y[static_cast<std::size_t>(t * K + c)], value, magnitude * 6 * 0x1p-24)
                << "[" << t << ", " << c << "]";
          }
      }
}

TEST(tail, sum_of_256_and_seven_ones_is_264_not_256) {
  Open o(1, 8, 2, DType::bf16);
  for (std::int64_t i = 0; i < 22; ++i) numeric::store_f32(o.gemm2.data(), DType::bf16, i, i < 2 ? 256.0f : 1.0f);
  std::fill(o.weights.begin(), o.weights.end(), 1.0f);
  for (std::int32_t j = 0; j < 8; ++j) o.map[static_cast<std::size_t>(j)] = j;
  std::uint16_t y[2];
  ASSERT_TRUE(close_output(o.moe, Tensor(y, DType::bf16, {1, 2}), {}).ok());
  EXPECT_EQ(numeric::bf16_to_f32(y[0]), 264.0f);
}

TEST(tail, slots_with_minus_one_are_skipped_and_their_weights_not_read) {
  Open o(2, 2, 3);
  o.map = {-1, 0, -1, -1};
  o.weights[0] = o.weights[2] = o.weights[3] = std::nanf("");
  ASSERT_TRUE(close_output(o.moe, Tensor(o.y.data(), DType::f32, {2, 3}), {}).ok());
  for (std::int64_t c = 0; c < 3; ++c) {
    EXPECT_FLOAT_EQ(o.y[static_cast<std::size_t>(c)], o.weights[1] * numeric::load_f32(o.gemm2.data(), DType::f32, c));
    EXPECT_EQ(o.y[static_cast<std::size_t>(3 + c)], 0.0f);
  }
}

TEST(tail, the_scaling_factor_applies_to_the_routed_sum_alone_and_once) {
  Open o(1, 1, 1);
  numeric::store_f32(o.gemm2.data(), DType::f32, 0, 1.0f);
  o.map = {0}, o.weights = {1.0f}, o.shared = {1.0f};
  o.with_shared();
  o.moe.routed_scaling_factor = 2.5f;
  ASSERT_TRUE(close_output(o.moe, Tensor(o.y.data(), DType::f32, {1, 1}), {}).ok());
  EXPECT_EQ(o.y[0], 3.5f);
}

TEST(tail, weights_are_read_in_the_type_that_they_have) {
  Open o(3, 2, 4);
  std::vector<std::byte> narrow(6 * 2);
  for (std::int64_t i = 0; i < 6; ++i) {
    numeric::store_f32(narrow.data(), DType::bf16, i, o.weights[static_cast<std::size_t>(i)]);
    o.weights[static_cast<std::size_t>(i)] = numeric::load_f32(narrow.data(), DType::bf16, i);
  }
  std::vector<float> wide(12);
  ASSERT_TRUE(close_output(o.moe, Tensor(wide.data(), DType::f32, {3, 4}), {}).ok());
  std::get<UnfinalizedOutput>(o.moe.routed).expert_weights = Tensor(narrow.data(), DType::bf16, {3, 2});
  ASSERT_TRUE(close_output(o.moe, Tensor(o.y.data(), DType::f32, {3, 4}), {}).ok());
  EXPECT_EQ(o.y, wide);
}

TEST(tail, residual_and_norm_equal_the_unfused_steps_within_the_derived_bound) {
  for (std::int64_t K : {1, 16, 257, 1000})
    for (bool shared : {false, true}) {
      Open o(4, 3, K, DType::f32, 7);
      o.map[5] = -1;
      if (shared) o.with_shared();
      ASSERT_TRUE(tail::add_and_norm(o.moe, o.tail(), {}).ok());
      for (std::int64_t t = 0; t < 4; ++t) {
        std::vector<double> r, error;
        double squares = 0;
        for (std::int64_t c = 0; c < K; ++c) {
          const auto [value, magnitude] = o.routed(t, c);
          const double x = o.residual[static_cast<std::size_t>(t * K + c)];
          r.push_back(value + x);
          error.push_back((magnitude + std::abs(x)) * 7 * 0x1p-24);
          squares += r.back() * r.back();
        }
        const double factor = 1 / std::sqrt(squares / static_cast<double>(K) + 1e-6);
        double relative = 0x1p-24 * (static_cast<double>(K) / 16 + 24);  // lanes, blocks, sqrt, division
        double carried = 0;
        for (std::int64_t c = 0; c < K; ++c)
          carried += std::abs(r[static_cast<std::size_t>(c)]) * error[static_cast<std::size_t>(c)];
        relative += carried / squares;
        for (std::int64_t c = 0; c < K; ++c) {
          const auto i = static_cast<std::size_t>(t * K + c), col = static_cast<std::size_t>(c);
          ASSERT_NEAR(o.residual_out[i], r[col], error[col]) << "[" << t << ", " << c << "]";
          const double wanted = r[col] * factor * static_cast<double>(o.gamma[col]);
          const double bound = std::abs(wanted) * (relative + 3 * 0x1p-24) +
                               error[col] * factor * std::abs(static_cast<double>(o.gamma[col]));
          ASSERT_NEAR(o.norm[i], wanted, bound) << "[" << t << ", " << c << "]";
        }
      }
    }
}

TEST(tail, residual_may_be_updated_in_place_and_norm_may_not_alias) {
  Open apart(3, 2, 300), in_place(3, 2, 300);
  ASSERT_TRUE(tail::add_and_norm(apart.moe, apart.tail(), {}).ok());
  Tail same = in_place.tail();
  same.residual_out = same.residual;
  ASSERT_TRUE(tail::add_and_norm(in_place.moe, same, {}).ok());
  EXPECT_EQ(in_place.residual, apart.residual_out);
  EXPECT_EQ(in_place.norm, apart.norm);
  same.norm_out = same.residual;
  EXPECT_NE(tail::add_and_norm(in_place.moe, same, {}).message().find("norm_out"), std::string::npos);
}

TEST(tail, the_norm_is_over_the_columns_that_exist_not_over_padding) {
  const std::int64_t K = 2880, pitch = 3072;
  std::vector<float> residual(static_cast<std::size_t>(pitch), 1.0f), norm(residual.size(), 7.0f),
      out(residual.size(), 7.0f), zero(static_cast<std::size_t>(K)), gamma(static_cast<std::size_t>(K), 1.0f);
  const auto padded = [&](std::vector<float>& v) { return Tensor::strided(v.data(), DType::f32, {1, K}, {pitch, 1}); };
  MoeOutput moe;
  moe.routed = Tensor(zero.data(), DType::f32, {1, K});
  const Tail tail{padded(residual), Tensor(gamma.data(), DType::f32, {K}), 0.0f, padded(norm), padded(out)};
  ASSERT_TRUE(tail::add_and_norm(moe, tail, {}).ok());
  EXPECT_EQ(norm[0], 1.0f);
  EXPECT_EQ(norm[static_cast<std::size_t>(K - 1)], 1.0f);
  EXPECT_EQ(norm[static_cast<std::size_t>(K)], 7.0f);
  EXPECT_EQ(out[static_cast<std::size_t>(K)], 7.0f);
}

TEST(tail, bits_do_not_depend_on_threads_or_on_other_tokens) {
  Open o(40, 4, 2048);
  o.with_shared();
  SerialExecutor one(1), seven(7);
  ASSERT_TRUE(tail::add_and_norm(o.moe, o.tail(), {.stream = {.executor = &one}}).ok());
  const std::vector<float> norm = o.norm, sum = o.residual_out;
  ASSERT_TRUE(tail::add_and_norm(o.moe, o.tail(), {.stream = {.executor = &seven}}).ok());
  EXPECT_EQ(o.norm, norm);
  EXPECT_EQ(o.residual_out, sum);
  // token 17 alone
  UnfinalizedOutput& open = std::get<UnfinalizedOutput>(o.moe.routed);
  open.expert_weights = open.expert_weights.slice_rows(17, 18);
  open.expanded_to_permuted = open.expanded_to_permuted.slice_rows(17, 18);
  o.moe.shared = o.moe.shared.slice_rows(17, 18);
  Tail tail = o.tail();
  for (Tensor Tail::*t : {&Tail::residual, &Tail::norm_out, &Tail::residual_out})
    tail.*t = (tail.*t).slice_rows(17, 18);
  std::fill(o.norm.begin(), o.norm.end(), 0.0f);
  ASSERT_TRUE(tail::add_and_norm(o.moe, tail, {}).ok());
  for (std::int64_t c = 0; c < 2048; ++c)
    ASSERT_EQ(o.norm[static_cast<std::size_t>(17 * 2048 + c)], norm[static_cast<std::size_t>(17 * 2048 + c)]);
}

TEST(tail, arguments_that_do_not_fit_are_named) {
  Open o(3, 2, 4);
  Tail tail = o.tail();
  tail.gamma.shape[0] = 3;
  EXPECT_NE(tail::add_and_norm(o.moe, tail, {}).message().find("gamma must be [4]"), std::string::npos);
  tail = o.tail(-1.0f);
  EXPECT_NE(tail::add_and_norm(o.moe, tail, {}).message().find("eps"), std::string::npos);
  std::get<UnfinalizedOutput>(o.moe.routed).expanded_to_permuted.dtype = DType::i64;
  EXPECT_NE(tail::add_and_norm(o.moe, o.tail(), {}).message().find("i32"), std::string::npos);
}

// ---- the whole way: ModularKernel(leave_open) → MoeOutput → tail, against the finalised path ------------------------

/// Weights of `L` experts, canonical, f32.
struct Layer {
  WeightsSpec spec;
  std::vector<std::byte> packed;
  WeightsView view;
  Layer(std::int64_t L, std::int64_t K, std::int64_t I) {
    spec = {.num_local = L, .hidden = K, .intermediate = I};
    spec.w1.type = spec.w2.type = DType::f32;
    const PackFormat& format = *pack_formats().back();
    const std::size_t bytes = format.bytes(spec);
    packed.resize(static_cast<std::size_t>(L) * bytes + 64);
    std::byte* data = packed.data() + (64 - reinterpret_cast<std::uintptr_t>(packed.data()) % 64) % 64;
    Random random(99);
    for (std::int64_t e = 0; e < L; ++e) {
      const auto gate = normal_values(random, DType::f32, I * K, 0.3f),
                 up = normal_values(random, DType::f32, I * K, 0.3f),
                 down = normal_values(random, DType::f32, K * I, 0.3f);
      CanonicalExpert expert;
      expert.gate = Tensor(gate.data(), DType::f32, {I, K});
      expert.up = Tensor(up.data(), DType::f32, {I, K});
      expert.down = Tensor(down.data(), DType::f32, {K, I});
      throw_if_failed(format.pack_expert(data + static_cast<std::size_t>(e) * bytes, spec, expert));
    }
    view = {&format, spec, data, bytes};
  }
};

TEST(tail, leaving_open_and_closing_equals_the_finalised_path) {
  for (bool on_input : {false, true})
    for (std::int64_t M : {1, 5}) {
      const std::int64_t K = 24, k = on_input ? 1 : 3;
      Layer layer(3, K, 10);
      Case c(M, K, k, 5, 3);
      Random random(static_cast<std::uint64_t>(M));
      for (float& x : c.hidden) x = random.normal();
      c.problem.weights = layer.spec;
      c.problem.size.N = layer.spec.w1_rows();
      c.problem.weight_on_input = on_input;
      c.problem.expert_map = true;
      c.problem.quant.w1.type = c.problem.quant.w2.type = c.problem.quant.a1.type = c.problem.quant.a2.type =
          DType::f32;
      c.map = {2, -1, 0, 1, -1};
      if (M > 1) c.ids[static_cast<std::size_t>(k)] = -1;
      const ModularKernel kernel(make_dispatcher("single_rank"), make_experts("reference_open"), nullptr, c.problem,
                                 {.open_max_tokens = M});
      PoisonedBytes memory(kernel.workspace_bytes(M));
      KernelInput in = c.input();
      in.weights = layer.view;
      KernelOutput closed = c.result();
      Status status = kernel.forward(in, closed, {.workspace = memory.bytes()});
      ASSERT_TRUE(status.ok()) << status.to_string();
      in.leave_open = true;
      KernelOutput open;
      open.shared = {};
      status = kernel.forward(in, open, {.workspace = memory.bytes()});
      ASSERT_TRUE(status.ok()) << status.to_string();
      ASSERT_TRUE(open.left_open);
      EXPECT_TRUE(memory.guard_intact());
      const auto& rows = std::get<UnfinalizedOutput>(open.open.routed);
      std::vector<float> y(c.output.size(), std::nanf(""));
      ASSERT_TRUE(close_output(open.open, Tensor(y.data(), DType::f32, {M, K}), {}).ok());
      for (std::int64_t t = 0; t < M; ++t)
        for (std::int64_t col = 0; col < K; ++col) {
          double magnitude = 0;
          for (std::int64_t j = 0; j < k; ++j) {
            if (on_input) EXPECT_EQ(rows.expert_weights.at<float>(t, j), 1.0f);
            if (const std::int32_t row = rows.expanded_to_permuted.at<std::int32_t>(t, j); row >= 0)
              magnitude += std::abs(static_cast<double>(rows.expert_weights.at<float>(t, j)) *
                                    static_cast<double>(rows.gemm2_permuted.at<float>(row, col)));
          }
          // closed: one rounding of an f64 sum. open: each row rounded to f32, k products and k sums in f32
          const double bound = magnitude * static_cast<double>(k + 3) * 0x1p-24;
          ASSERT_NEAR(y[static_cast<std::size_t>(t * K + col)], c.output[static_cast<std::size_t>(t * K + col)], bound)
              << "[" << t << ", " << col << "]";
        }
      // and through the fused tail: residual and norm of the closed sum
      std::vector<float> residual(y.size(), 0.5f), gamma(static_cast<std::size_t>(K), 1.5f), fused(y.size()),
          sum(y.size()), plain(y.size()), plain_sum(y.size());
      Tail tail{Tensor(residual.data(), DType::f32, {M, K}), Tensor(gamma.data(), DType::f32, {K}), 1e-6f,
                Tensor(fused.data(), DType::f32, {M, K}), Tensor(sum.data(), DType::f32, {M, K})};
      ASSERT_TRUE(tail::add_and_norm(open.open, tail, {}).ok());
      MoeOutput finalised;
      finalised.routed = Tensor(y.data(), DType::f32, {M, K});
      tail.norm_out = Tensor(plain.data(), DType::f32, {M, K}),
      tail.residual_out = Tensor(plain_sum.data(), DType::f32, {M, K});
      ASSERT_TRUE(tail::add_and_norm(finalised, tail, {}).ok());
      EXPECT_EQ(fused, plain) << "f32 in between: fusing changes no bit";
      EXPECT_EQ(sum, plain_sum);
    }
}

TEST(tail, zero_tokens_stay_finalised) {
  Layer layer(3, 8, 4);
  Case c(0, 8, 2, 3);
  c.problem.weights = layer.spec;
  c.problem.quant.w1.type = c.problem.quant.w2.type = c.problem.quant.a1.type = c.problem.quant.a2.type = DType::f32;
  const ModularKernel kernel(make_dispatcher("single_rank"), make_experts("reference_open"), nullptr, c.problem,
                             {.open_max_tokens = 4});
  PoisonedBytes memory(kernel.workspace_bytes(0));
  KernelInput in = c.input();
  in.weights = layer.view;
  in.leave_open = true;
  KernelOutput out = c.result();
  ASSERT_TRUE(kernel.forward(in, out, {.workspace = memory.bytes()}).ok());
  EXPECT_FALSE(out.left_open);
  EXPECT_TRUE(out.open.finalised());
  EXPECT_TRUE(close_output(out.open, out.output, {}).ok());
  Open o(0, 2, 8);
  EXPECT_TRUE(tail::add_and_norm(o.moe, o.tail(), {}).ok());
}

}  // namespace
}  // namespace moekit::testing
