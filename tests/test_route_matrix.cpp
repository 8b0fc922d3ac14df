// Every implementation against the f64 reference: routing rules of model families x E x k x logit types. Logits end at
// an unreadable page.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "route/reference.hpp"
#include "support/random.hpp"
#include "support/route_case.hpp"

namespace moekit::testing {
namespace {

struct Family {
  const char* name;
  RouterConfig config;
};

std::vector<Family> families() {
  RouterConfig softmax, renormalised, selected, gpt_oss, llama4, v2, v3, glm4, ernie, dbrx, lfm2, v4, zero_fill, plain;
  renormalised.renormalise = true;
  selected.softmax_over = SoftmaxOver::selected;
  gpt_oss = selected, gpt_oss.logit_bias = true;
  llama4.score = Score::sigmoid, llama4.weight_on_input = true;
  v2.num_groups = 4, v2.keep_groups = 2, v2.group_fill = GroupFill::zero, v2.scale = 2;
  v3.score = Score::sigmoid, v3.selection_bias = true, v3.num_groups = 8, v3.keep_groups = 4;
  v3.group_score = GroupScore::top2_sum, v3.renormalise = true, v3.renorm_eps = 1e-20f, v3.scale = 2.5f;
  glm4 = v3, glm4.num_groups = glm4.keep_groups = 1, glm4.scale = 1.5f;
  ernie.selection_bias = true, ernie.renormalise = true;
  ernie.renorm_eps = 1e-12f, ernie.renorm_eps_mode = RenormEps::max;
  dbrx.renormalise = true, dbrx.renorm_p = 2;
  lfm2 = glm4, lfm2.renorm_eps = 1e-6f;
  v4.score = Score::sqrt_softplus, v4.selection_bias = true, v4.renormalise = true, v4.scale = 1.5f;
  zero_fill = v3, zero_fill.group_fill = GroupFill::zero, zero_fill.selection_bias = false;
  plain.score = Score::identity;
  return {{"mixtral, qwen3_moe", renormalised},
          {"qwen2_moe, olmoe", softmax},
          {"granitemoe", selected},
          {"gpt_oss", gpt_oss},
          {"llama4", llama4},
          {"deepseek_v2", v2},
          {"deepseek_v3", v3},
          {"glm4_moe", glm4},
          {"ernie4_5_moe", ernie},
          {"dbrx p = 2", dbrx},
          {"lfm2_moe", lfm2},
          {"sqrt_softplus", v4},
          {"top2 of scores, fill 0", zero_fill},
          {"identity", plain}};
}

constexpr std::int64_t kExperts[] = {1, 2, 3, 7, 8, 15, 16, 17, 64, 100, 128, 160, 255, 256, 257, 384, 512, 2048};
constexpr double kUnit = 0x1p-24;

/// Rows: three N(0, 3), one of few values (ties), one with -inf, one with NaN.
RouteCase make_case(const RouterConfig& config, std::int64_t E, std::int64_t k, DType dtype) {
  Random random(static_cast<std::uint64_t>(E * 100 + k));
  RouteCase c{.config = config, .M = 6, .E = E, .k = k, .dtype = dtype};
  for (std::int64_t row = 0; row < c.M; ++row)
    for (std::int64_t e = 0; e < E; ++e) {
      float z = numeric::round_to(dtype, random.normal() * 3);
      if (row == 3) z = std::round(z);
      if (row == 4 && random.below(3) == 0) z = -std::numeric_limits<float>::infinity();
      if (row == 5 && random.below(3) == 0) z = std::numeric_limits<float>::quiet_NaN();
      c.logits.push_back(z);
    }
  for (std::int64_t e = 0; e < E && config.logit_bias; ++e) c.logit_bias.push_back(random.normal());
  for (std::int64_t e = 0; e < E && config.selection_bias; ++e) c.selection_bias.push_back(random.normal() * 0.2f);
  return c;
}

double logit(const RouteCase& c, std::int64_t row, std::int32_t e) {
  const double z = static_cast<double>(c.logits[static_cast<std::size_t>(row * c.E + e)]);
  return c.logit_bias.empty() ? z : z + static_cast<double>(c.logit_bias[static_cast<std::size_t>(e)]);
}

/// What chooses among kept experts, in f64.
double choice(const RouteCase& c, std::int64_t row, std::int32_t e) {
  const double z = logit(c, row, e);
  if (c.selection_bias.empty()) return z;
  double s = z, sum = 0;
  if (c.config.score == Score::sigmoid) s = 1 / (1 + std::exp(-z));
  if (c.config.score == Score::sqrt_softplus) s = std::sqrt(std::log1p(std::exp(z)));
  if (c.config.score == Score::softmax) {
    for (std::int32_t other = 0; other < c.E; ++other) sum += std::exp(logit(c, row, other));
    s = std::exp(z) / sum;
  }
  return s + static_cast<double>(c.selection_bias[static_cast<std::size_t>(e)]);
}

/// The stated bounds: z and scores of a row whose finite |z| are at most `top` (|z - m| ≤ 2 top).
double score_bound(const RouteCase& c, double top) {
  const double mass = c.config.score == Score::softmax ? 2 * top + static_cast<double>(c.E) / 32 + 8 : 0;
  return kUnit * (12 + mass + (c.logit_bias.empty() ? 0 : top));
}
double choice_bound(const RouteCase& c, double top, double value) {
  if (c.selection_bias.empty()) return c.logit_bias.empty() ? 0 : kUnit * std::abs(value);
  return score_bound(c, top) * (std::abs(value) + 1) + kUnit * std::abs(value);
}

struct Worst {
  double fraction = 0;
  std::string where;
};

void compare(const RouteCase& c, const RouteResult& got, const RouteResult& want, const std::string& what,
             Worst& worst) {
  for (std::int64_t row = 0; row < c.M; ++row) {
    double top = 0;
    for (std::int32_t e = 0; e < c.E; ++e)
      if (std::isfinite(logit(c, row, e))) top = std::max(top, std::abs(logit(c, row, e)));
    // weights of a softmax over a sum: numerator and sum each carry the score's error, then three roundings
    const double relative = 2 * score_bound(c, top) + 3 * kUnit;
    for (std::int64_t j = 0; j < c.k; ++j) {
      const std::size_t at = static_cast<std::size_t>(row * c.k + j);
      const std::string where = what + " row " + std::to_string(row) + " slot " + std::to_string(j);
      if (got.ids[at] != want.ids[at]) {
        ASSERT_TRUE(got.ids[at] >= 0 && got.ids[at] < c.E) << where;
        const double a = choice(c, row, got.ids[at]), b = choice(c, row, want.ids[at]);
        ASSERT_LE(std::abs(a - b), choice_bound(c, top, a) + choice_bound(c, top, b))
            << where << ": " << got.ids[at] << " instead of " << want.ids[at];
        continue;
      }
      const double a = static_cast<double>(got.weights[at]), b = static_cast<double>(want.weights[at]);
      ASSERT_EQ(std::isnan(a), std::isnan(b)) << where;
      if (std::isnan(a) || a == b) continue;
      const double bound = relative * std::abs(b) + 0x1p-120;
      if (std::abs(a - b) / bound > worst.fraction) worst = {std::abs(a - b) / bound, where};
    }
  }
}

TEST(route_matrix, every_implementation_agrees_with_the_reference) {
  const std::unique_ptr<Router> reference = route::make_reference();
  int cases = 0;
  Worst worst;
  for (const Family& family : families())
    for (std::int64_t E : kExperts) {
      std::vector<std::int64_t> ks = {1, 2, E / 2, E};
      std::sort(ks.begin(), ks.end());
      ks.erase(std::unique(ks.begin(), ks.end()), ks.end());
      for (std::int64_t k : ks)
        for (DType dtype : {DType::f32, DType::bf16, DType::f16}) {
          if (!validate(family.config, E, k).ok()) continue;
          const RouteCase c = make_case(family.config, E, k, dtype);
          const RouteResult want = run_route(*reference, c);
          ASSERT_TRUE(want.status.ok()) << want.status.to_string();
          for (const auto& router : all_routers()) {
            if (router->name() == "reference") continue;
            const std::string what = std::string(family.name) + " e" + std::to_string(E) + "k" + std::to_string(k) +
                                     " " + name(dtype) + " " + std::string(router->name());
            const RouteResult got = run_route(*router, c);
            ASSERT_TRUE(got.status.ok()) << what << got.status.to_string();
            ASSERT_NO_FATAL_FAILURE(compare(c, got, want, what, worst));
            ++cases;
          }
        }
    }
  EXPECT_GT(cases, 1500);
  EXPECT_LE(worst.fraction, 1.0) << worst.where;
  RecordProperty("worst_fraction_of_bound", std::to_string(worst.fraction) + " at " + worst.where);
  std::printf("%d cases, worst error %.3f of its bound: %s\n", cases, worst.fraction, worst.where.c_str());
}

TEST(route_matrix, group_counts_from_one_to_thirty_two_equal_the_reference) {
  const std::unique_ptr<Router> reference = route::make_reference();
  for (std::int64_t n : {1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 96, 192, 384})
    for (GroupScore score : {GroupScore::max, GroupScore::top2_sum})
      for (bool bias : {false, true}) {
        RouterConfig config;
        config.score = Score::sigmoid, config.selection_bias = bias, config.group_score = score;
        config.num_groups = n, config.keep_groups = (n + 1) / 2;
        if (!validate(config, 384, 8).ok()) continue;
        const RouteCase c = make_case(config, 384, 8, DType::f32);
        Worst worst;
        for (const auto& router : all_routers())
          compare(c, run_route(*router, c), run_route(*reference, c), std::to_string(n) + " groups", worst);
        EXPECT_LE(worst.fraction, 1.0) << worst.where;
      }
}

TEST(route_matrix, top_k_above_ten_is_right_for_every_score) {
  const std::unique_ptr<Router> reference = route::make_reference();
  for (std::int64_t k : {9, 10, 11, 22, 33, 63, 64})
    for (Score score : {Score::softmax, Score::sigmoid, Score::sqrt_softplus, Score::identity}) {
      RouterConfig config;
      config.score = score;
      const RouteCase c = make_case(config, 512, k, DType::f32);
      Worst worst;
      for (const auto& router : all_routers()) {
        const RouteResult got = run_route(*router, c), want = run_route(*reference, c);
        EXPECT_EQ(got.ids, want.ids);  // the logits choose: exactly the same
        compare(c, got, want, "k " + std::to_string(k), worst);
      }
      EXPECT_LE(worst.fraction, 1.0) << worst.where;
    }
}

TEST(route_matrix, limits_are_refused_by_name) {
  RouteCase c{.E = 2049, .k = 2, .logits = std::vector<float>(2049, 0.0f)};
  RouteCase wide{.E = 128, .k = 65, .logits = std::vector<float>(128, 0.0f)};
  for (const auto& router : all_routers()) {
    EXPECT_EQ(run_route(*router, c).status.code(), StatusCode::unsupported);
    EXPECT_EQ(run_route(*router, wide).status.field(), "top_k");
    EXPECT_FALSE(router->supports({.num_tokens = 1, .num_experts = 128, .top_k = 65}).reason().empty());
    RouteProblem custom{.num_tokens = 1, .num_experts = 128, .top_k = 8};
    EXPECT_TRUE(router->supports(custom).ok());
    custom.config.source = RouterSource::custom;
    EXPECT_FALSE(router->supports(custom).ok());
  }
}

}  // namespace
}  // namespace moekit::testing
