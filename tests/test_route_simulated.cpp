// Simulated routing: the distributions are what they are said to be, and rows do not depend on each other.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include <moekit/kit/router.hpp>

namespace moekit::testing {
namespace {

struct Drawn {
  Status status;
  std::int64_t k;
  std::vector<std::int32_t> ids;
  std::vector<float> weights;
};

Drawn draw(const RouterConfig& config, std::int64_t num_experts, std::int64_t rows, std::int64_t k,
           std::int64_t first_token = 0) {
  Drawn out{{},
            k,
            std::vector<std::int32_t>(static_cast<std::size_t>(rows * k), -7),
            std::vector<float>(static_cast<std::size_t>(rows * k), -7)};
  out.status = simulate_routing(config, num_experts, first_token, Tensor(out.ids.data(), DType::i32, {rows, k}),
                                Tensor(out.weights.data(), DType::f32, {rows, k}));
  return out;
}

RouterConfig simulated(Simulated kind, double a = 1.0, std::int64_t n = 1, std::uint64_t seed = 5) {
  RouterConfig config;
  config.source = RouterSource::simulated, config.simulated = kind;
  config.simulated_a = a, config.simulated_n = n, config.seed = seed;
  return config;
}
constexpr Simulated kAll[] = {Simulated::uniform, Simulated::balanced, Simulated::zipf, Simulated::hot,
                              Simulated::single};

std::vector<double> histogram(const Drawn& d, std::int64_t num_experts) {
  std::vector<double> counts(static_cast<std::size_t>(num_experts), 0.0);
  for (std::int32_t id : d.ids) counts.at(static_cast<std::size_t>(id)) += 1;
  return counts;
}

/// χ² of n - 1 degrees of freedom has mean n - 1 and variance 2 (n - 1); six sigmas are exceeded by chance far less
/// than once in a million seeds, and the seed is fixed.
double chi_square_limit(std::int64_t n) {
  return static_cast<double>(n - 1) + 6 * std::sqrt(2.0 * static_cast<double>(n - 1));
}

TEST(route_simulated, experts_of_a_token_are_distinct_and_weigh_one_kth) {
  for (Simulated kind : kAll)
    for (auto [num_experts, k] :
         {std::pair<std::int64_t, std::int64_t>{1, 1}, {7, 3}, {8, 8}, {256, 100}, {257, 257}, {3000, 70}}) {
      const Drawn d = draw(simulated(kind, 0.7, std::min<std::int64_t>(3, num_experts)), num_experts, 50, k);
      ASSERT_TRUE(d.status.ok()) << d.status.to_string();
      for (std::int64_t t = 0; t < 50; ++t) {
        std::vector<std::int32_t> row(d.ids.begin() + t * k, d.ids.begin() + (t + 1) * k);
        std::sort(row.begin(), row.end());
        ASSERT_EQ(std::adjacent_find(row.begin(), row.end()), row.end()) << static_cast<int>(kind) << " " << t;
        ASSERT_GE(row.front(), 0);
        ASSERT_LT(row.back(), num_experts);
      }
      for (float w : d.weights) ASSERT_EQ(w, 1.0f / static_cast<float>(k));
    }
}

TEST(route_simulated, a_row_depends_on_seed_and_index_alone) {
  for (Simulated kind : kAll) {
    const Drawn whole = draw(simulated(kind, 0.7, 3), 64, 40, 4);
    const Drawn part = draw(simulated(kind, 0.7, 3), 64, 10, 4, 20);
    EXPECT_TRUE(std::equal(part.ids.begin(), part.ids.end(), whole.ids.begin() + 20 * 4)) << static_cast<int>(kind);
    EXPECT_EQ(draw(simulated(kind, 0.7, 3), 64, 40, 4).ids, whole.ids);
    EXPECT_NE(draw(simulated(kind, 0.7, 3, 6), 64, 40, 4).ids, whole.ids) << "the seed is not used";
  }
}

TEST(route_simulated, uniform_loads_every_expert_and_every_slot_alike) {
  constexpr std::int64_t E = 32, k = 4, M = 20000;
  const Drawn d = draw(simulated(Simulated::uniform), E, M, k);
  // An expert's load is binomial (M, k/E); dividing by that variance and by E / (E - 1) makes the sum a χ².
  const double mean = double(M * k) / E, variance = mean * (1 - double(k) / E) * E / (E - 1);
  double chi = 0;
  for (double c : histogram(d, E)) chi += (c - mean) * (c - mean) / variance;
  EXPECT_LT(chi, chi_square_limit(E));
  EXPECT_GT(chi, 1.0) << "too even to be random";
  for (std::int64_t slot = 0; slot < k; ++slot) {
    std::vector<double> counts(E, 0.0);
    for (std::int64_t t = 0; t < M; ++t)
      counts[static_cast<std::size_t>(d.ids[static_cast<std::size_t>(t * k + slot)])] += 1;
    double slot_chi = 0;
    for (double c : counts) slot_chi += (c - double(M) / E) * (c - double(M) / E) / (double(M) / E);
    EXPECT_LT(slot_chi, chi_square_limit(E)) << "slot " << slot;
  }
}

TEST(route_simulated, uniform_draws_every_set_alike) {
  std::vector<double> counts(32, 0.0);  // by bit mask of the set
  const Drawn d = draw(simulated(Simulated::uniform), 5, 20000, 2);
  for (std::size_t t = 0; t < 20000; ++t) counts[(1u << d.ids[2 * t]) | (1u << d.ids[2 * t + 1])] += 1;
  double chi = 0;
  for (unsigned set = 0; set < 32; ++set)
    if (std::popcount(set) == 2) chi += (counts[set] - 2000) * (counts[set] - 2000) / 2000;
  EXPECT_LT(chi, chi_square_limit(10));
}

TEST(route_simulated, balanced_is_exactly_even) {
  for (auto [num_experts, k] : {std::pair<std::int64_t, std::int64_t>{8, 2}, {128, 8}, {60, 4}, {7, 3}, {1, 1}})
    for (std::int64_t first : {0, 5, 1000003})
      for (std::int64_t rows : {num_experts, 3 * num_experts, num_experts + 1, std::int64_t{1}}) {
        const std::vector<double> counts =
            histogram(draw(simulated(Simulated::balanced), num_experts, rows, k, first), num_experts);
        const auto [low, high] = std::minmax_element(counts.begin(), counts.end());
        EXPECT_LE(*high - *low, rows * k % num_experts == 0 ? 0 : 1) << num_experts << " " << rows << " " << first;
      }
}

TEST(route_simulated, zipf_follows_its_exponent) {
  constexpr std::int64_t E = 16, M = 20000;
  for (double a : {0.0, 0.5, 1.0, 1.5}) {
    std::vector<double> p(E);
    for (std::size_t e = 0; e < E; ++e) p[e] = std::pow(double(e + 1), -a);
    const double total = std::accumulate(p.begin(), p.end(), 0.0);
    const std::vector<double> counts = histogram(draw(simulated(Simulated::zipf, a), E, M, 1), E);
    double chi = 0;
    for (std::size_t e = 0; e < E; ++e) chi += std::pow(counts[e] - M * p[e] / total, 2) / (M * p[e] / total);
    EXPECT_LT(chi, chi_square_limit(E)) << "a = " << a;
    // k = 2: P(expert 0) = p0 + Σ_e≠0 p_e · p0 / (1 - p_e)
    double expected = p[0] / total;
    for (std::size_t e = 1; e < E; ++e) expected += p[e] / total * p[0] / (total - p[e]);
    const double got = histogram(draw(simulated(Simulated::zipf, a), E, M, 2), E)[0] / M;
    EXPECT_NEAR(got, expected, 6 * std::sqrt(expected * (1 - expected) / M)) << "a = " << a;
  }
}

TEST(route_simulated, hot_experts_get_their_share) {
  constexpr std::int64_t E = 64, M = 20000, k = 4, n = 8;
  const double share = 0.6;
  const std::vector<double> one = histogram(draw(simulated(Simulated::hot, share, n), E, M, 1), E);
  EXPECT_NEAR(std::accumulate(one.begin(), one.begin() + n, 0.0) / M, share, 6 * std::sqrt(share * (1 - share) / M));
  // n ≥ k and E - n ≥ k: the number of hot routes of a token is binomial and never cut
  const std::vector<double> four = histogram(draw(simulated(Simulated::hot, share, n), E, M, k), E);
  EXPECT_NEAR(std::accumulate(four.begin(), four.begin() + n, 0.0) / (M * k), share,
              6 * std::sqrt(share * (1 - share) / (M * k)));
  const std::vector<double> cut = histogram(draw(simulated(Simulated::hot, 1.0, 1), E, M, k), E);
  EXPECT_EQ(cut[0], M);  // one hot expert takes one route of each token
}

TEST(route_simulated, single_sends_every_token_to_the_same_experts) {
  const Drawn d = draw(simulated(Simulated::single, 1, 1, 63), 64, 10, 2);
  for (std::size_t t = 0; t < 10; ++t) {
    EXPECT_EQ(d.ids[2 * t], 63);
    EXPECT_EQ(d.ids[2 * t + 1], 0);
  }
}

TEST(route_simulated, what_cannot_be_is_an_error_and_nothing_is_written) {
  EXPECT_EQ(draw(simulated(Simulated::uniform), 4, 3, 5).status.field(), "top_k");
  EXPECT_EQ(draw(simulated(Simulated::hot, 0.5, 9), 8, 3, 2).status.field(), "router.simulated_n");
  EXPECT_EQ(draw(RouterConfig{}, 8, 3, 2).status.field(), "router.source");
  EXPECT_EQ(draw(simulated(Simulated::uniform), 8, 3, 2, -1).ids[0], -7);
  EXPECT_TRUE(draw(simulated(Simulated::uniform), 8, 0, 2).status.ok());
}

}  // namespace
}  // namespace moekit::testing
