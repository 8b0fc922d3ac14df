// Every unit that this CPU has, close up: against a plain loop of f64, and bit for bit against itself.
#include <gtest/gtest.h>

#include <cstring>

#include "support/cpu_case.hpp"

namespace moekit {
namespace {
using testing::Case;
using testing::CaseSpec;

std::vector<std::unique_ptr<Experts>> units(const Case& c) {
  std::vector<std::unique_ptr<Experts>> out;
  for (const ExpertsEntry& entry : experts_implementations()) {
    const bool ours = entry.name.starts_with(c.s.batched ? "cpu_batched." : "cpu.");
    if (!ours || !entry.available().ok()) continue;
    MakeContext context;
    if (c.s.batched) context.batched = BatchedShape{c.T, 1};
    auto made = entry.make(context);
    EXPECT_EQ(made->name(), entry.name);
    if (made->supports(c.problem(2)).ok()) out.push_back(std::move(made));
  }
  EXPECT_FALSE(out.empty());
  return out;
}

/// Relative to the terms of the sum: f32 chains and the seam of h (a rounding there moves its term by half an ulp, and
/// near a boundary the f32 value may fall to the other side: a whole one), then the output's rounding.
double tolerance(const CaseSpec& s) {
  double eps = 4e-6 * std::sqrt(static_cast<double>(s.K + s.I));
  if (s.quantised_activations)
    eps += s.weights == DType::i8 ? 1.0 / 127 : 1.0 / 8;
  else if (s.hidden != DType::f32)
    eps += s.hidden == DType::bf16 ? 0x1p-8 : 0x1p-10;
  return eps;
}
double output_step(DType type) { return type == DType::bf16 ? 0x1p-8 : type == DType::f16 ? 0x1p-10 : 0x1p-22; }

void check(const Case& c, const std::vector<float>& got, const std::vector<double>& want, std::string_view name) {
  ASSERT_EQ(got.size(), want.size());
  double worst = 0;
  std::size_t at = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double allowed = tolerance(c.s) * (c.magnitude[i] + 1e-3) + output_step(c.s.output) * std::abs(want[i]);
    const double off = std::abs(got[i] - want[i]) / allowed;
    const double ratio = off == off ? off : 1e300;
    if (ratio > worst) worst = ratio, at = i;
  }
  EXPECT_LE(worst, 1.0) << name << " " << to_string(c.s) << ": [" << at / static_cast<std::size_t>(c.s.K) << ", "
                        << at % static_cast<std::size_t>(c.s.K) << "] is " << got[at] << ", should be " << want[at];
}

void check_all(const CaseSpec& spec) {
  const Case c(spec);
  const auto want = c.reference();
  for (const auto& unit : units(c)) check(c, c.run(*unit, cpu_executor(2)), want, unit->name());
}

struct Scheme {
  DType weights, hidden;
  bool quantised;
};
const Scheme kSchemes[] = {
    {DType::f32, DType::f32, false},  {DType::bf16, DType::bf16, false}, {DType::bf16, DType::f32, false},
    {DType::f16, DType::f16, false},  {DType::f32, DType::bf16, false},  {DType::i8, DType::bf16, true},
    {DType::e4m3, DType::bf16, true}, {DType::i8, DType::f32, false},    {DType::e4m3, DType::f32, false},
};

TEST(CpuExperts, small_odd_shapes_of_every_scheme) {
  const struct {
    std::int64_t E, k, M, K, I;
  } shapes[] = {{1, 1, 1, 1, 1},   {3, 2, 5, 33, 17},  {4, 2, 7, 130, 40}, {2, 1, 3, 257, 129},
                {8, 8, 2, 64, 32}, {2, 2, 20, 65, 15}, {1, 1, 13, 31, 16}};
  for (const Scheme& scheme : kSchemes)
    for (const auto& shape : shapes)
      for (bool batched : {false, true}) {
        CaseSpec s{shape.E, shape.k, shape.M, shape.K, shape.I};
        s.weights = scheme.weights;
        s.hidden = scheme.hidden;
        s.quantised_activations = scheme.quantised;
        s.batched = batched;
        s.seed = static_cast<std::uint64_t>(shape.K * 7 + shape.M);
        check_all(s);
      }
}

TEST(CpuExperts, k_longer_than_a_block_and_more_rows_than_a_tile) {
  for (const Scheme& scheme : kSchemes)
    for (std::int64_t M : {1, 2, 3, 7, 14}) {
      CaseSpec s{2, 2, M, 600, 144};
      s.weights = scheme.weights;
      s.hidden = scheme.hidden;
      s.quantised_activations = scheme.quantised;
      check_all(s);
    }
}

TEST(CpuExperts, every_activation_with_biases_and_clamps) {
  std::vector<Activation> all;
  for (ActivationKind kind :
       {ActivationKind::silu, ActivationKind::gelu, ActivationKind::gelu_tanh, ActivationKind::relu2})
    for (bool gated : {true, false}) {
      Activation a{kind, gated};
      all.push_back(a);
      a.clamp_up = 0.8f;
      if (gated) a.clamp_gate = 0.6f;
      all.push_back(a);
    }
  all.push_back(Activation::swigluoai());
  all.push_back(Activation::swigluoai(0.7f, 1.3f));
  all.push_back({ActivationKind::none, false});
  Activation scaled{};
  scaled.alpha = 1.702f;
  all.push_back(scaled);
  for (const Activation& a : all)
    for (std::int64_t I : {16, 21, 50})
      for (bool bias : {false, true}) {
        CaseSpec s{3, 2, 6, 40, I};
        s.activation = a;
        s.bias = bias;
        check_all(s);
      }
}

TEST(CpuExperts, output_types_strides_and_routes_that_are_not_here) {
  for (DType output : {DType::f32, DType::bf16, DType::f16})
    for (DType hidden : {DType::f32, DType::bf16, DType::f16}) {
      CaseSpec s{4, 3, 9, 50, 33};
      s.output = output;
      s.hidden = hidden;
      s.weights = DType::bf16;
      s.row_padding = 7;
      s.minus_one_percent = 40;
      check_all(s);
      s.batched = true;
      check_all(s);
    }
}

TEST(CpuExperts, weight_on_input_is_not_weighted_again) {
  CaseSpec s{4, 1, 9, 50, 33};
  s.weight_on_input = true;
  check_all(s);
}

TEST(CpuExperts, bits_do_not_depend_on_threads) {
  for (const Scheme& scheme : kSchemes)
    for (std::int64_t M : {1, 4, 33})
      for (bool batched : {false, true}) {
        CaseSpec s{5, 2, M, 200, 90};
        s.weights = scheme.weights;
        s.hidden = scheme.hidden;
        s.quantised_activations = scheme.quantised;
        s.batched = batched;
        const Case c(s);
        for (const auto& unit : units(c)) {
          const auto one = c.run(*unit, cpu_executor(1));
          for (int threads : {2, 3, 8})
            EXPECT_EQ(std::memcmp(one.data(), c.run(*unit, cpu_executor(threads)).data(), one.size() * 4), 0)
                << unit->name() << " " << to_string(s) << ", " << threads << " threads";
        }
      }
}

TEST(CpuExperts, a_row_alone_has_the_bits_it_has_in_a_batch) {
  for (const Scheme& scheme : kSchemes) {
    CaseSpec s{3, 2, 45, 300, 70};
    s.weights = scheme.weights;
    s.hidden = scheme.hidden;
    s.quantised_activations = scheme.quantised;
    const Case c(s);
    for (const auto& unit : units(c)) {
      const auto all = c.run(*unit, cpu_executor(2));
      for (std::int64_t t : {0, 7, 44}) {
        Case alone = c;
        alone.s.M = 1;
        auto cut = [&](auto& v, std::int64_t width) {
          if (v.empty()) return;
          v.erase(v.begin() + (t + 1) * width, v.end());
          v.erase(v.begin(), v.begin() + t * width);
        };
        cut(alone.x, s.K * moekit::bytes(c.codes() ? s.weights : s.hidden));
        cut(alone.x_scale, c.a_groups);
        cut(alone.ids, s.k);
        cut(alone.weights, s.k);
        const auto one = alone.run(*unit, cpu_executor(2));
        EXPECT_EQ(std::memcmp(one.data(), all.data() + t * s.K, one.size() * 4), 0)
            << unit->name() << " " << to_string(s) << ", token " << t;
      }
    }
  }
}

TEST(CpuExperts, int8_sums_are_exact_at_the_ends_of_the_range) {
  for (int w : {-128, 127})
    for (int a : {-128, 127}) {
      CaseSpec s{1, 1, 7, 5000, 3};
      s.weights = DType::i8;
      s.quantised_activations = true;
      s.activation = {ActivationKind::none, false};
      Case c(s);
      std::fill(c.up.begin(), c.up.end(), static_cast<std::byte>(w));
      std::fill(c.x.begin(), c.x.end(), static_cast<std::byte>(a));
      const auto want = c.reference();
      for (const auto& unit : units(c)) check(c, c.run(*unit, cpu_executor(2)), want, unit->name());
    }
}

TEST(CpuExperts, nan_and_infinity_stay_in_their_token) {
  for (const Scheme& scheme : kSchemes)
    for (float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
      CaseSpec s{3, 2, 9, 64, 40};
      s.weights = scheme.weights;
      s.hidden = scheme.hidden;
      s.quantised_activations = scheme.quantised;
      Case c(s);
      for (const auto& unit : units(c)) {
        const auto clean = c.run(*unit, cpu_executor(2));
        Case poisoned = c;
        if (c.codes())
          poisoned.x_scale[static_cast<std::size_t>(4 * c.a_groups)] = bad;
        else
          numeric::store_f32(poisoned.x.data(), s.hidden, 4 * s.K + 3, bad);
        const auto got = poisoned.run(*unit, cpu_executor(2));
        for (std::int64_t t = 0; t < s.M; ++t)
          for (std::int64_t c0 = 0; c0 < s.K; ++c0) {
            const auto i = static_cast<std::size_t>(t * s.K + c0);
            if (t == 4)
              EXPECT_FALSE(std::isfinite(got[i])) << unit->name() << " " << to_string(s);
            else
              EXPECT_EQ(std::memcmp(&got[i], &clean[i], 4), 0) << unit->name() << " " << to_string(s);
          }
      }
    }
}

TEST(CpuExperts, a_nan_weight_shows) {
  CaseSpec s{1, 1, 9, 200, 40};
  s.weights = DType::e4m3;
  s.quantised_activations = true;
  Case c(s);
  c.down[static_cast<std::size_t>(5 * s.I + 39)] = std::byte{0x7f};  // column 5 of the output
  for (const auto& unit : units(c)) {
    const auto got = c.run(*unit, cpu_executor(2));
    for (std::size_t i = 0; i < got.size(); ++i)
      EXPECT_EQ(std::isnan(got[i]), i % static_cast<std::size_t>(s.K) == 5) << unit->name() << " " << i;
  }
}

TEST(CpuExperts, topk_id_out_of_range_reads_nothing) {
  CaseSpec s{4, 2, 6, 40, 24};
  Case c(s);
  for (const auto& unit : units(c)) {
    Case skipped = c, wild = c;
    skipped.ids[3] = skipped.ids[6] = skipped.ids[7] = -1;
    wild.ids[3] = 4;
    wild.ids[6] = std::numeric_limits<std::int32_t>::max();
    wild.ids[7] = std::numeric_limits<std::int32_t>::min();
    EXPECT_EQ(skipped.run(*unit, cpu_executor(2)), wild.run(*unit, cpu_executor(2))) << unit->name();
  }
}

TEST(CpuExperts, the_same_expert_twice_counts_twice) {
  CaseSpec s{4, 3, 6, 40, 24};
  Case c(s);
  std::fill(c.ids.begin(), c.ids.end(), 3);
  const auto want = c.reference();
  for (const auto& unit : units(c)) check(c, c.run(*unit, cpu_executor(2)), want, unit->name());
}

TEST(CpuExperts, workspace_grows_with_rows_and_never_shrinks) {
  CaseSpec s{8, 2, 1, 300, 70};
  const Case c(s);
  for (const auto& unit : units(c)) {
    std::size_t w13 = 0, w2 = 0;
    for (std::int64_t M : {1, 2, 3, 10, 100, 1000, 5000, 16384, 16385, 100000}) {
      Problem p = c.problem(2);
      p.size.M = M;
      const ExpertsWorkspace need = unit->workspace(p);
      EXPECT_GE(need.w13_bytes, w13) << M;
      EXPECT_GE(need.w2_bytes, w2) << M;
      w13 = need.w13_bytes, w2 = need.w2_bytes;
    }
    EXPECT_LT(w13 + w2, std::size_t{200} << 20) << "bounded, however many rows";
  }
}

TEST(CpuExperts, an_executor_with_more_threads_than_planned_works_with_fewer) {
  CaseSpec s{4, 2, 20, 64, 64};
  const Case c(s);
  for (const auto& unit : units(c)) {
    struct Wide final : Executor {
      int concurrency() const override { return calls++ == 0 ? 1 : 8; }  // planned for 1, then 8
      void run(std::int64_t n, void (*body)(void*, std::int64_t), void* arg) override {
        cpu_executor(2).run(n, body, arg);
      }
      mutable int calls = 0;
    } wide;
    EXPECT_EQ(c.run(*unit, wide), c.run(*unit, cpu_executor(1))) << unit->name();
  }
}

}  // namespace
}  // namespace moekit
