// Known values of the routing rule, for every implementation of the list.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "support/random.hpp"
#include "support/route_case.hpp"

namespace moekit::testing {
namespace {

using Ids = std::vector<std::int32_t>;
constexpr float kInf = std::numeric_limits<float>::infinity();
const float kNan = std::numeric_limits<float>::quiet_NaN();

/// Runs `check` on the result of each implementation.
template <class Check>
void for_every_router(const RouteCase& c, Check check) {
  for (const auto& router : all_routers()) {
    SCOPED_TRACE(std::string(router->name()));
    const RouteResult result = run_route(*router, c);
    ASSERT_TRUE(result.status.ok()) << result.status.to_string();
    check(result);
  }
}

void expect_row(const RouteResult& result, std::int64_t row, const Ids& ids, const std::vector<double>& weights) {
  EXPECT_EQ(result.row_ids(row), ids) << "row " << row;
  for (std::size_t j = 0; j < weights.size(); ++j)
    EXPECT_NEAR(static_cast<double>(result.row_weights(row)[j]), weights[j], 1e-6) << "row " << row << ", slot " << j;
}

TEST(route_values, renormalise_off_gives_the_softmax_over_all_and_never_raw_logits) {
  RouteCase c{.logits = {2, 1, 0, -1}};
  for_every_router(c, [](const RouteResult& r) { expect_row(r, 0, {0, 1}, {0.643914, 0.236883}); });
  c.config.renormalise = true;
  for_every_router(c, [](const RouteResult& r) { expect_row(r, 0, {0, 1}, {0.731059, 0.268941}); });
}

TEST(route_values, softmax_over_the_selected_is_not_softmax_over_all) {
  RouteCase c{.logits = {2, 1, 0, -1}};
  c.config.softmax_over = SoftmaxOver::selected;
  for_every_router(c, [](const RouteResult& r) { expect_row(r, 0, {0, 1}, {0.731059, 0.268941}); });
}

TEST(route_values, scale_acts_with_and_without_renormalise) {
  RouteCase c{.k = 1, .logits = {2, 1, 0, 0}};
  c.config.scale = 2;
  for_every_router(c, [](const RouteResult& r) { expect_row(r, 0, {0}, {1.220591}); });
  c.config.renormalise = true;
  for_every_router(c, [](const RouteResult& r) { expect_row(r, 0, {0}, {2.0}); });
}

TEST(route_values, sigmoid_underflow_with_selection_bias_gives_zero_weights_and_never_nan) {
  for (float eps : {0.0f, 1e-20f})
    for (RenormEps mode : {RenormEps::add, RenormEps::max}) {
      RouteCase c{.M = 2, .logits = {-120, -120, -120, -120, 0, 0, 0, 0}, .selection_bias = {0.1f, 0.2f, 0.3f, 0.4f}};
      c.config.score = Score::sigmoid, c.config.selection_bias = true;
      c.config.renormalise = true, c.config.renorm_eps = eps, c.config.renorm_eps_mode = mode;
      for_every_router(c, [](const RouteResult& r) {
        EXPECT_EQ(r.row_weights(0), (std::vector<float>{0, 0}));
        expect_row(r, 0, {3, 2}, {0, 0});
        expect_row(r, 1, {3, 2}, {0.5, 0.5});  // the neighbour is not affected
      });
    }
}

TEST(route_values, the_same_values_as_bf16_f16_and_f32_route_alike) {
  Random random(1);
  RouteCase c{.M = 5, .E = 13, .k = 3};
  for (std::int64_t i = 0; i < c.M * c.E; ++i)
    c.logits.push_back(numeric::round_to(DType::bf16, static_cast<float>(random.below(2048) - 1024) / 128.0f));
  for (const auto& router : all_routers()) {
    const RouteResult f32 = run_route(*router, c);
    ASSERT_TRUE(f32.status.ok());
    for (DType type : {DType::bf16, DType::f16}) {
      RouteCase same = c;
      same.dtype = type;
      const RouteResult other = run_route(*router, same);
      EXPECT_EQ(other.ids, f32.ids);
      EXPECT_EQ(other.weights, f32.weights);
    }
  }
}

TEST(route_values, bias_dtype_is_independent_of_the_logits_dtype) {
  for (DType logits : {DType::f32, DType::bf16, DType::f16})
    for (DType bias : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
      RouteCase c{.E = 7,
                  .k = 1,
                  .logits = std::vector<float>(7, 0.5f),
                  .dtype = logits,
                  .selection_bias = {0, 1e-3f, 0, 0, 0, 0, 0},
                  .bias_dtype = bias};
      c.config.score = Score::sigmoid, c.config.selection_bias = true;
      for_every_router(c, [](const RouteResult& r) { expect_row(r, 0, {1}, {0.6224593}); });  // unbiased
      RouteCase last = c;
      last.selection_bias = {0, 0, 0, 0, 0, 0, 1e-3f};
      for_every_router(last, [](const RouteResult& r) { expect_row(r, 0, {6}, {0.6224593}); });
      RouteCase logit = c;
      logit.config = {}, logit.config.logit_bias = true, logit.config.renormalise = true, logit.k = 2;
      logit.logit_bias = {0, 0, 0, 0, 0, 2, 1}, logit.selection_bias = {};
      for_every_router(logit, [](const RouteResult& r) { expect_row(r, 0, {5, 6}, {0.731059, 0.268941}); });
    }
}

TEST(route_values, nan_logits_rank_last_and_stay_in_their_row) {
  RouteCase c{.M = 3, .logits = {kNan, kNan, kNan, kNan, kNan, 1, 2, kNan, 1, 0, 3, 2}};
  c.config.renormalise = true;
  RouteCase clean{.logits = {1, 0, 3, 2}};
  clean.config = c.config;
  for (const auto& router : all_routers()) {
    SCOPED_TRACE(std::string(router->name()));
    const RouteResult r = run_route(*router, c), alone = run_route(*router, clean);
    ASSERT_TRUE(r.status.ok());
    EXPECT_EQ(r.row_ids(0), (Ids{0, 1}));
    EXPECT_EQ(r.row_ids(1), (Ids{2, 1}));
    for (int j = 0; j < 4; ++j) EXPECT_TRUE(std::isnan(r.weights[static_cast<std::size_t>(j)])) << j;
    EXPECT_EQ(r.row_ids(2), alone.ids);
    EXPECT_EQ(r.row_weights(2), alone.weights);
  }
}

TEST(route_values, nan_logits_give_distinct_ids_in_range_whatever_the_rule) {
  for (bool bias : {false, true})
    for (std::int64_t groups : {1, 4}) {
      RouteCase c{.M = 4, .E = 16, .k = 8, .logits = std::vector<float>(64, 1.0f)};
      for (std::size_t i = 0; i < 16; ++i) c.logits[i] = kNan;
      for (std::size_t i = 0; i < 13; ++i) c.logits[16 + i] = kNan;
      for (std::size_t i = 1; i < 16; i += 2) c.logits[32 + i] = kNan;
      if (bias) c.selection_bias = std::vector<float>(16, 0.25f);
      c.config.score = Score::sigmoid, c.config.selection_bias = bias;
      c.config.num_groups = groups, c.config.keep_groups = groups == 1 ? 1 : 2;
      for_every_router(c, [](const RouteResult& r) {
        for (std::int64_t row = 0; row < 4; ++row) {
          Ids ids = r.row_ids(row);
          std::sort(ids.begin(), ids.end());
          EXPECT_EQ(std::adjacent_find(ids.begin(), ids.end()), ids.end()) << "row " << row;
          EXPECT_GE(ids.front(), 0);
          EXPECT_LT(ids.back(), 16);
          EXPECT_EQ(std::isnan(r.row_weights(row)[7]), row < 3);
        }
        EXPECT_EQ(r.row_ids(1)[0], 13);
      });
    }
}

TEST(route_values, checked_mode_names_row_and_expert_of_a_nan_and_writes_nothing) {
  RouteCase c{.M = 2, .logits = {1, 2, 3, 4, 1, 2, kNan, 4}};
  c.checked = true;
  for (const auto& router : all_routers()) {
    const RouteResult r = run_route(*router, c);
    ASSERT_EQ(r.status.code(), StatusCode::invalid_argument);
    EXPECT_NE(r.status.message().find("row 1, expert 2"), std::string::npos) << r.status.message();
    EXPECT_EQ(r.ids, Ids(4, 0x7fffffff));
    for (float w : r.weights) EXPECT_EQ(std::bit_cast<std::uint32_t>(w), 0xffffffffu);
    RouteCase padding = c;
    padding.num_valid = 1;  // the row is not routed: nobody reads it
    EXPECT_TRUE(run_route(*router, padding).status.ok());
  }
}

TEST(route_values, minus_infinity_fills_up_with_distinct_ids_of_weight_zero) {
  RouteCase c{.logits = {-kInf, -kInf, -kInf, 0}};
  for (SoftmaxOver over : {SoftmaxOver::all, SoftmaxOver::selected}) {
    c.config.softmax_over = over;
    for_every_router(c, [](const RouteResult& r) { expect_row(r, 0, {3, 0}, {1, 0}); });
  }
}

TEST(route_values, a_row_without_any_mass_gets_weights_zero) {
  RouteCase c{.logits = std::vector<float>(4, -kInf)};
  for (Score score : {Score::softmax, Score::sigmoid, Score::sqrt_softplus})
    for (bool renormalise : {false, true})
      for (SoftmaxOver over : {SoftmaxOver::all, SoftmaxOver::selected}) {
        if (over == SoftmaxOver::selected && score != Score::softmax) continue;
        c.config = {}, c.config.score = score, c.config.renormalise = renormalise, c.config.softmax_over = over;
        for_every_router(c, [](const RouteResult& r) { expect_row(r, 0, {0, 1}, {0, 0}); });
      }
}

TEST(route_values, plus_infinity_takes_all_the_softmax_mass) {
  RouteCase c{.k = 3, .logits = {3, kInf, -kInf, kInf}};
  for (SoftmaxOver over : {SoftmaxOver::all, SoftmaxOver::selected}) {
    c.config.softmax_over = over;
    for_every_router(c, [](const RouteResult& r) { expect_row(r, 0, {1, 3, 0}, {0.5, 0.5, 0}); });
  }
  c.config = {}, c.config.score = Score::sigmoid;
  for_every_router(c, [](const RouteResult& r) { expect_row(r, 0, {1, 3, 0}, {1, 1, 0.952574}); });
}

TEST(route_values, logits_choose_where_scores_underflow_or_saturate) {
  RouteCase c{.k = 4, .logits = {-2000, -1000, 0, -1500}};
  for_every_router(c, [](const RouteResult& r) { expect_row(r, 0, {2, 1, 3, 0}, {1, 0, 0, 0}); });
  RouteCase high{.logits = {100, 200, 300, 50}};
  high.config.score = Score::sigmoid;
  for_every_router(high, [](const RouteResult& r) { expect_row(r, 0, {2, 1}, {1, 1}); });
}

TEST(route_values, scores_have_their_textbook_values) {
  RouteCase c{.k = 3, .logits = {-1.5f, 2, 0.5f, -30}};
  c.config.score = Score::sigmoid;
  for_every_router(c, [](const RouteResult& r) {
    expect_row(r, 0, {1, 2, 0}, {0.8807970780, 0.6224593312, 0.1824255238});
  });
  c.config.score = Score::sqrt_softplus;
  for_every_router(c, [](const RouteResult& r) { expect_row(r, 0, {1, 2, 0}, {1.4583992, 0.9869531, 0.4487909}); });
  c.config.score = Score::identity;
  for_every_router(c, [](const RouteResult& r) { expect_row(r, 0, {1, 2, 0}, {2, 0.5, -1.5}); });
}

TEST(route_values, scores_are_within_their_bound_over_the_whole_range) {
  // u = 2^-24. e^-|z| to 2.5u (truncation 0.1u, argument 0.5u, the last steps of the polynomial); sigmoid adds a sum
  // and a division: 4.5u. sqrt_softplus: e is a square (5u), log1p 4u, halved by the root, which rounds: 5.5u.
  RouteCase c{.M = 1000, .E = 64, .k = 64};
  for (std::int64_t i = 0; i < c.M * c.E; ++i) c.logits.push_back(-87.0f + 107.0f * static_cast<float>(i) / 64000);
  for (auto [score, bound] : {std::pair{Score::sigmoid, 4.5}, {Score::sqrt_softplus, 5.5}}) {
    c.config.score = score;
    for_every_router(c, [&, kind = score, limit = bound](const RouteResult& r) {
      double worst = 0, at = 0;
      for (std::size_t i = 0; i < r.ids.size(); ++i) {
        const double z = static_cast<double>(c.logits[i / 64 * 64 + static_cast<std::size_t>(r.ids[i])]);
        const double want = kind == Score::sigmoid ? 1 / (1 + std::exp(-z)) : std::sqrt(std::log1p(std::exp(z)));
        const double error = std::abs(static_cast<double>(r.weights[i]) / want - 1) * 0x1p24;
        if (error > worst) worst = error, at = z;
      }
      EXPECT_LE(worst, limit) << "z = " << at;
    });
  }
}

TEST(route_values, a_nan_in_the_selection_bias_ranks_its_expert_last_and_weighs_nothing) {
  RouteCase c{.k = 4, .logits = {3, 2, 1, 0}, .selection_bias = {kNan, 0, 0, 0}};
  c.config.score = Score::sigmoid, c.config.selection_bias = true;
  for_every_router(c, [](const RouteResult& r) {
    expect_row(r, 0, {1, 2, 3, 0}, {0.880797, 0.731059, 0.5, 0.952574});
  });
  c.checked = true;
  for (const auto& router : all_routers())
    EXPECT_NE(run_route(*router, c).status.message().find("selection_bias of expert 0"), std::string::npos);
}

TEST(route_values, renormalise_divides_by_the_p_norm_with_either_epsilon) {
  RouteCase c{.logits = {4, 3, 0, 0}};
  c.config.score = Score::identity, c.config.renormalise = true, c.config.renorm_p = 2;
  for_every_router(c, [](const RouteResult& r) { expect_row(r, 0, {0, 1}, {0.8, 0.6}); });
  c.config.renorm_p = kInf;
  for_every_router(c, [](const RouteResult& r) { expect_row(r, 0, {0, 1}, {1, 0.75}); });
  c.config.renorm_p = 1, c.config.renorm_eps = 1;
  for_every_router(c, [](const RouteResult& r) { expect_row(r, 0, {0, 1}, {0.5, 0.375}); });
  c.config.renorm_eps_mode = RenormEps::max, c.config.renorm_eps = 14;
  for_every_router(c, [](const RouteResult& r) { expect_row(r, 0, {0, 1}, {4.0 / 14, 3.0 / 14}); });
  c.config.renorm_eps = 3;
  for_every_router(c, [](const RouteResult& r) { expect_row(r, 0, {0, 1}, {4.0 / 7, 3.0 / 7}); });
}

TEST(route_values, the_selection_bias_chooses_and_does_not_weigh) {
  RouteCase c{.logits = {2, 1, 0, -1}, .selection_bias = {0, 0, 1, 0.5f}};
  c.config.selection_bias = true;  // c = 0.644 0.237 1.087 0.532
  for_every_router(c, [](const RouteResult& r) { expect_row(r, 0, {2, 0}, {0.087144, 0.643914}); });
  c.config.softmax_over = SoftmaxOver::selected, c.selection_bias = {0, 0, 0, 5};
  for_every_router(c, [](const RouteResult& r) { expect_row(r, 0, {3, 0}, {0.047426, 0.952574}); });
}

TEST(route_values, num_valid_rows_are_routed_and_the_others_cleared) {
  RouteCase c{.M = 3, .logits = {2, 1, 0, -1, kNan, 1, 1, 1, kNan, 0, 0, 0}};
  for (std::int64_t num_valid : {0, 1}) {
    c.num_valid = num_valid;
    for_every_router(c, [&](const RouteResult& r) {
      if (num_valid) expect_row(r, 0, {0, 1}, {0.643914, 0.236883});
      for (std::int64_t row = num_valid; row < 3; ++row) {
        EXPECT_EQ(r.row_ids(row), (Ids{-1, -1}));
        EXPECT_EQ(r.row_weights(row), (std::vector<float>{0, 0}));
      }
    });
  }
}

TEST(route_values, k_is_what_the_ids_have_room_for) {
  const Ids order{1, 3, 2, 0};
  for (std::int64_t k = 1; k <= 4; ++k) {
    RouteCase c{.k = k, .logits = {0, 3, 1, 2}};
    for_every_router(c, [&](const RouteResult& r) { EXPECT_EQ(r.ids, Ids(order.begin(), order.begin() + k)); });
  }
}

}  // namespace
}  // namespace moekit::testing
