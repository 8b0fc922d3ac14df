// Groups: which are kept, ties between them, and what becomes of the experts of dropped ones.
#include <gtest/gtest.h>

#include <cmath>

#include "support/random.hpp"
#include "support/route_case.hpp"

namespace moekit::testing {
namespace {

using Ids = std::vector<std::int32_t>;

template <class Check>
void for_every_router(const RouteCase& c, Check check) {
  for (const auto& router : all_routers()) {
    SCOPED_TRACE(std::string(router->name()));
    const RouteResult result = run_route(*router, c);
    ASSERT_TRUE(result.status.ok()) << result.status.to_string();
    check(result);
  }
}

RouteCase grouped(std::int64_t n, std::int64_t keep, GroupScore score) {
  RouteCase c{.E = 8, .k = 2};
  c.config.score = Score::identity;
  c.config.num_groups = n, c.config.keep_groups = keep, c.config.group_score = score;
  return c;
}

TEST(route_groups, the_best_expert_of_a_dropped_group_is_not_chosen) {
  RouteCase c = grouped(4, 1, GroupScore::top2_sum);
  c.logits = {9, 0, 5, 5, 1, 1, 0, 0};  // sums 9, 10, 2, 0
  for_every_router(c, [](const RouteResult& r) { EXPECT_EQ(r.ids, (Ids{2, 3})); });
  c.config.group_score = GroupScore::max;
  for_every_router(c, [](const RouteResult& r) { EXPECT_EQ(r.ids, (Ids{0, 1})); });
}

TEST(route_groups, top2_sum_counts_scores_and_not_logits) {
  RouteCase c = grouped(2, 1, GroupScore::top2_sum);
  c.config.score = Score::sigmoid;
  c.logits = {9, -9, -9, -9, 1, 1, -9, -9};  // logits: 0 against 2; scores: 1.0000 against 1.4621
  for_every_router(c, [](const RouteResult& r) { EXPECT_EQ(r.ids, (Ids{4, 5})); });
  c.logits = {9, 0, -9, -9, 2, 2, -9, -9};  // logits: 9 against 4; scores: 1.4999 against 1.7616
  for_every_router(c, [](const RouteResult& r) { EXPECT_EQ(r.ids, (Ids{4, 5})); });
}

TEST(route_groups, the_selection_bias_counts_in_the_group_score) {
  RouteCase c = grouped(2, 1, GroupScore::top2_sum);
  c.config.score = Score::sigmoid, c.config.selection_bias = true;
  c.logits = {2, 2, 0, 0, 0, 0, 0, 0};
  c.selection_bias = {0, 0, 0, 0, 0, 0, 0.5f, 0.5f};  // 1.7616 against 2.0
  for_every_router(c, [](const RouteResult& r) {
    EXPECT_EQ(r.ids, (Ids{6, 7}));
    EXPECT_EQ(r.weights, (std::vector<float>{0.5f, 0.5f}));
  });
}

TEST(route_groups, ties_between_groups_go_to_the_lower_group) {
  for (GroupScore score : {GroupScore::max, GroupScore::top2_sum}) {
    RouteCase c = grouped(4, 2, score);
    c.logits = {0, 0, 3, 1, 3, 1, 3, 1};
    c.k = 4;
    for_every_router(c, [](const RouteResult& r) { EXPECT_EQ(r.ids, (Ids{2, 4, 3, 5})); });
  }
}

// The two fills differ only when fewer than k experts of the kept groups have a choice score above 0.
TEST(route_groups, fill_zero_lets_a_dropped_expert_in_only_where_kept_scores_are_not_positive) {
  RouteCase c = grouped(2, 1, GroupScore::max);
  c.config.score = Score::sigmoid, c.config.selection_bias = true;
  c.logits = {0, 0, 0, 0, 0, 0, 0, 0};
  c.selection_bias = {0.5f, -0.9f, -0.8f, -0.7f, 0.2f, 0.1f, 0.1f, 0.1f};  // c of group 0: 1.0 -0.4 -0.3 -0.2
  for_every_router(c, [](const RouteResult& r) { EXPECT_EQ(r.ids, (Ids{0, 3})); });
  c.config.group_fill = GroupFill::zero;
  for_every_router(c, [](const RouteResult& r) {
    EXPECT_EQ(r.ids, (Ids{0, 4}));
    EXPECT_EQ(r.weights, (std::vector<float>{0.5f, 0.5f}));  // weights are unbiased scores, filled or not
  });
  c.selection_bias[3] = -0.4f;  // now two kept experts are above 0
  for (GroupFill fill : {GroupFill::neg_inf, GroupFill::zero}) {
    c.config.group_fill = fill;
    for_every_router(c, [](const RouteResult& r) { EXPECT_EQ(r.ids, (Ids{0, 3})); });
  }
}

TEST(route_groups, fills_agree_wherever_enough_kept_scores_are_positive) {
  Random random(7);
  RouteCase c{.M = 200, .E = 32, .k = 6};
  c.config.score = Score::sigmoid, c.config.selection_bias = true;
  c.config.num_groups = 8, c.config.keep_groups = 4, c.config.group_score = GroupScore::top2_sum;
  for (std::int64_t i = 0; i < c.M * c.E; ++i) c.logits.push_back(random.normal());
  for (std::int64_t i = 0; i < c.E; ++i) c.selection_bias.push_back(std::abs(random.normal()) * 0.2f);
  RouteCase zero = c;
  zero.config.group_fill = GroupFill::zero;
  for (const auto& router : all_routers()) {
    const RouteResult a = run_route(*router, c), b = run_route(*router, zero);
    EXPECT_EQ(a.ids, b.ids);
    EXPECT_EQ(a.weights, b.weights);
  }
}

TEST(route_groups, more_than_the_kept_experts_with_fill_zero_weigh_zero_without_a_bias) {
  RouteCase c{.E = 8, .k = 4, .logits = {5, 4, 3, 3, 9, 0, 1, 1}};
  c.config.num_groups = 4, c.config.keep_groups = 1, c.config.group_fill = GroupFill::zero;
  for_every_router(c, [](const RouteResult& r) {
    EXPECT_EQ(r.ids, (Ids{4, 5, 0, 1}));
    EXPECT_GT(r.weights[1], 0.0f);
    EXPECT_EQ(r.weights[2], 0.0f);
    EXPECT_EQ(r.weights[3], 0.0f);
  });
}

TEST(route_groups, groups_of_one_expert_are_refused_for_top2_sum_and_work_for_max) {
  RouteCase c = grouped(8, 4, GroupScore::max);
  c.logits = {0, 1, 2, 3, 4, 5, 6, 7};
  for_every_router(c, [](const RouteResult& r) { EXPECT_EQ(r.ids, (Ids{7, 6})); });
  c.config.group_score = GroupScore::top2_sum;
  for (const auto& router : all_routers()) {
    const RouteResult r = run_route(*router, c);
    EXPECT_EQ(r.status.code(), StatusCode::invalid_argument);
    EXPECT_NE(r.status.message().find("at least 2 experts a group"), std::string::npos) << r.status.message();
    EXPECT_EQ(r.ids, (Ids{0x7fffffff, 0x7fffffff}));
  }
}

}  // namespace
}  // namespace moekit::testing
