// Who multiplies expert outputs by the router weights and sums over k.
#include <gtest/gtest.h>

#include <limits>

#include "support/kit_doubles.hpp"
#include "support/random.hpp"

namespace moekit::testing {
namespace {

constexpr DType kTypes[] = {DType::f32, DType::bf16, DType::f16};

/// M tokens, k slots, K columns of a type, ids and weights.
struct Reduction {
  std::int64_t M, k, K;
  DType in, out;
  std::vector<std::byte> rows, output;
  std::vector<std::int32_t> ids;
  std::vector<float> weights;
  Reduction(std::int64_t tokens, std::int64_t slots, std::int64_t columns, DType from, DType to)
      : M(tokens),
        k(slots),
        K(columns),
        in(from),
        out(to),
        rows(static_cast<std::size_t>(M * k * K * bytes(from))),
        output(static_cast<std::size_t>(M * K * bytes(to)), std::byte{0xff}),
        ids(static_cast<std::size_t>(M * k), 0),
        weights(static_cast<std::size_t>(M * k), 1.0f) {}
  Tensor expert_output() { return Tensor(rows.data(), in, {M * k, K}); }
  Tensor result() { return Tensor(output.data(), out, {M, K}); }
  Routing routing() { return {Tensor(ids.data(), DType::i32, {M, k}), Tensor(weights.data(), DType::f32, {M, k})}; }
  void set(std::int64_t row, std::int64_t c, float value) { numeric::store_f32(rows.data(), in, row * K + c, value); }
  float get(std::int64_t t, std::int64_t c) { return numeric::load_f32(output.data(), out, t * K + c); }
};

Status apply(WeightAndReduce reduce, Reduction& r, bool on_input = false) {
  Tensor result;
  return reduce.apply(r.result(), r.expert_output(), r.routing(), on_input, result);
}

TEST(kit_reduce, sum_of_256_and_seven_ones_is_264_not_256) {
  for (DType type : {DType::bf16, DType::f16}) {
    Reduction r(1, 8, 3, type, type);
    for (std::int64_t j = 0; j < 8; ++j)
      for (std::int64_t c = 0; c < 3; ++c) r.set(j, c, j == 0 ? 256.0f : 1.0f);
    ASSERT_TRUE(apply(WeightAndReduce::contiguous(), r).ok());
    for (std::int64_t c = 0; c < 3; ++c) EXPECT_EQ(r.get(0, c), type == DType::bf16 ? 264.0f : 263.0f);
  }
  // the same through batched rows: one expert per slot
  Reduction r(1, 8, 3, DType::bf16, DType::bf16);
  for (std::int64_t j = 0; j < 8; ++j) {
    r.ids[static_cast<std::size_t>(j)] = static_cast<std::int32_t>(j);
    for (std::int64_t c = 0; c < 3; ++c) r.set(j, c, j == 0 ? 256.0f : 1.0f);
  }
  Tensor result;
  ASSERT_TRUE(WeightAndReduce::naive_batched()
                  .apply(r.result(), Tensor(r.rows.data(), r.in, {8, 1, 3}), r.routing(), false, result)
                  .ok());
  EXPECT_EQ(r.get(0, 2), 264.0f);
}

TEST(kit_reduce, slots_are_added_in_ascending_order) {
  Reduction r(1, 4, 1, DType::f32, DType::f32);
  const float values[] = {1e8f, 1.0f, -1e8f, 1.0f};  // (1e8 + 1) - 1e8 + 1 = 1 in f32; any other order gives 2 or 0
  for (std::int64_t j = 0; j < 4; ++j) r.set(j, 0, values[j]);
  ASSERT_TRUE(apply(WeightAndReduce::contiguous(), r).ok());
  EXPECT_EQ(r.get(0, 0), 1.0f);
}

TEST(kit_reduce, contiguous_equals_the_f64_sum_within_the_roundings_for_every_type) {
  Random random(11);
  for (DType in : kTypes)
    for (DType out : kTypes)
      for (std::int64_t k : {1, 2, 3, 4, 5, 8}) {
        const std::int64_t M = 3, K = 259;  // one block of columns and a tail
        Reduction r(M, k, K, in, out);
        r.rows = normal_values(random, in, M * k * K);
        for (auto& w : r.weights) w = random.normal();
        r.ids[0] = -1;
        const auto rows_before = r.rows;
        const auto weights_before = r.weights;
        ASSERT_TRUE(apply(WeightAndReduce::contiguous(), r).ok());
        EXPECT_EQ(r.rows, rows_before) << "an input was modified";
        EXPECT_EQ(r.weights, weights_before);
        for (std::int64_t t = 0; t < M; ++t)
          for (std::int64_t c = 0; c < K; ++c) {
            double sum = 0, magnitude = 0;
            for (std::int64_t j = 0; j < k; ++j) {
              if (r.ids[static_cast<std::size_t>(t * k + j)] < 0) continue;
              const double term = static_cast<double>(r.weights[static_cast<std::size_t>(t * k + j)]) *
                                  static_cast<double>(numeric::load_f32(r.rows.data(), in, (t * k + j) * K + c));
              sum += term, magnitude += std::abs(term);
            }
            // k products and k additions in f32, then one rounding to `out`
            const double unit = out == DType::f32 ? 0 : out == DType::bf16 ? 0x1p-8 : 0x1p-11;
            const double bound =
                magnitude * static_cast<double>(k + 1) * 0x1p-24 + std::abs(sum) * unit * 1.01 + 0x1p-24;
            ASSERT_NEAR(r.get(t, c), sum, bound)
                << name(in) << " → " << name(out) << " k " << k << " at [" << t << ", " << c << "]";
          }
      }
}

TEST(kit_reduce, rows_of_absent_slots_are_not_read) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  Reduction r(2, 2, 2, DType::f32, DType::f32);
  r.ids = {-1, 0, -1, -1};
  for (std::int64_t row : {0, 2, 3})
    for (std::int64_t c : {0, 1}) r.set(row, c, nan);
  r.set(1, 0, 3.0f), r.set(1, 1, 4.0f);
  r.weights[0] = nan;
  ASSERT_TRUE(apply(WeightAndReduce::contiguous(), r).ok());
  EXPECT_EQ(r.get(0, 0), 3.0f);
  EXPECT_EQ(r.get(0, 1), 4.0f);
  EXPECT_EQ(r.get(1, 0), 0.0f);  // every element is written
  EXPECT_EQ(r.get(1, 1), 0.0f);
}

TEST(kit_reduce, weights_already_on_the_input_are_not_applied_again) {
  Reduction r(2, 1, 1, DType::f32, DType::f32);
  r.weights = {0.5f, 0.25f};
  r.set(0, 0, 8.0f), r.set(1, 0, 8.0f);
  ASSERT_TRUE(apply(WeightAndReduce::contiguous(), r, true).ok());
  EXPECT_EQ(r.get(0, 0), 8.0f);
  ASSERT_TRUE(apply(WeightAndReduce::contiguous(), r, false).ok());
  EXPECT_EQ(r.get(1, 0), 2.0f);
}

TEST(kit_reduce, three_axes_and_strided_rows_are_read_alike) {
  std::vector<float> wide(4 * 8, 99.0f);
  for (std::int64_t row = 0; row < 4; ++row)
    for (std::int64_t c = 0; c < 3; ++c) wide[static_cast<std::size_t>(row * 8 + c)] = static_cast<float>(10 * row + c);
  Reduction r(2, 2, 3, DType::f32, DType::f32);
  Tensor result;
  ASSERT_TRUE(
      WeightAndReduce::contiguous()
          .apply(r.result(), Tensor::strided(wide.data(), DType::f32, {4, 3}, {8, 1}), r.routing(), false, result)
          .ok());
  EXPECT_EQ(r.get(1, 2), 20.0f + 2 + 30 + 2);
  EXPECT_EQ(result.data, r.output.data());
  ASSERT_TRUE(WeightAndReduce::contiguous()
                  .apply(r.result(), Tensor::strided(wide.data(), DType::f32, {2, 2, 3}, {16, 8, 1}), r.routing(),
                         false, result)
                  .ok());
  EXPECT_EQ(r.get(1, 2), 54.0f);
}

TEST(kit_reduce, no_op_returns_its_input_or_copies_it) {
  float in[] = {1, 2, 3, 4}, out[] = {9, 9, 9, 9};
  const Tensor rows(in, DType::f32, {2, 2}), target(out, DType::f32, {2, 2});
  Tensor result;
  ASSERT_TRUE(WeightAndReduce::no_op().apply({}, rows, {}, false, result).ok());
  EXPECT_EQ(result.data, in);
  ASSERT_TRUE(WeightAndReduce::no_op().apply(rows, rows, {}, false, result).ok());
  EXPECT_EQ(result.data, in);
  ASSERT_TRUE(WeightAndReduce::no_op().apply(target, rows, {}, false, result).ok());
  EXPECT_EQ(result.data, out);
  EXPECT_EQ(out[3], 4.0f);
  std::uint16_t narrow[4];
  ASSERT_TRUE(WeightAndReduce::no_op().apply(Tensor(narrow, DType::bf16, {2, 2}), rows, {}, false, result).ok());
  EXPECT_EQ(numeric::bf16_to_f32(narrow[3]), 4.0f);
  EXPECT_EQ(WeightAndReduce::no_op().apply(Tensor(out, DType::f32, {1, 2}), rows, {}, false, result).code(),
            StatusCode::invalid_shape);
}

TEST(kit_reduce, the_same_expert_twice_for_one_token_counts_twice) {
  // contiguous: every slot has its own row
  Reduction r(1, 2, 1, DType::f32, DType::f32);
  r.ids = {3, 3};
  r.weights = {0.25f, 0.5f};
  r.set(0, 0, 0.731059f), r.set(1, 0, 0.731059f);
  ASSERT_TRUE(apply(WeightAndReduce::contiguous(), r).ok());
  EXPECT_FLOAT_EQ(r.get(0, 0), 0.548294f);
  // naive_batched: expert 0 has rows 0 and 1 for token 0, row 2 for token 1
  Reduction b(2, 2, 1, DType::f32, DType::f32);
  b.ids = {0, 0, -1, 0};
  b.weights = {1, 10, 7, 100};
  b.set(0, 0, 1), b.set(1, 0, 2), b.set(2, 0, 3);
  Tensor result;
  ASSERT_TRUE(WeightAndReduce::naive_batched()
                  .apply(b.result(), Tensor(b.rows.data(), b.in, {1, 4, 1}), b.routing(), false, result)
                  .ok());
  EXPECT_EQ(b.get(0, 0), 21.0f);
  EXPECT_EQ(b.get(1, 0), 300.0f);
}

TEST(kit_reduce, naive_batched_adds_only_experts_of_its_rank_and_wide_rows) {
  const std::int64_t K = 300;  // two blocks of columns: both start from the same rows
  std::vector<float> rows(2 * 3 * K), output(2 * K, std::nanf(""));
  for (std::int64_t e = 0; e < 2; ++e)
    for (std::int64_t row = 0; row < 3; ++row)
      for (std::int64_t c = 0; c < K; ++c)
        rows[static_cast<std::size_t>((e * 3 + row) * K + c)] =
            static_cast<float>(100 * e + 10 * row) + (c == K - 1 ? 1.0f : 0.0f);
  std::vector<std::int32_t> ids = {2, 0, 3, 2, 3, 3};  // rank 1 of L = 2: experts 2 and 3
  std::vector<float> weights(6, 1.0f);
  const Routing routing{Tensor(ids.data(), DType::i32, {2, 3}), Tensor(weights.data(), DType::f32, {2, 3})};
  Tensor result;
  ASSERT_TRUE(WeightAndReduce::naive_batched(1)
                  .apply(Tensor(output.data(), DType::f32, {2, K}), Tensor(rows.data(), DType::f32, {2, 3, K}), routing,
                         false, result)
                  .ok());
  EXPECT_EQ(output[0], 0.0f + 100);                                   // rows (0,0), (1,0)
  EXPECT_EQ(output[static_cast<std::size_t>(K)], 10.0f + 110 + 120);  // rows (0,1), (1,1), (1,2)
  EXPECT_EQ(output[static_cast<std::size_t>(2 * K - 1)], 243.0f);     // the last column, of the second block
  const Status full = WeightAndReduce::naive_batched(1).apply(
      Tensor(output.data(), DType::f32, {2, K}), Tensor(rows.data(), DType::f32, {2, 2, K}), routing, false, result);
  EXPECT_NE(full.message().find("2 rows"), std::string::npos) << full.message();
}

TEST(kit_reduce, delegate_cannot_be_applied) {
  Reduction r(1, 1, 1, DType::f32, DType::f32);
  EXPECT_EQ(apply(WeightAndReduce::delegate(), r).code(), StatusCode::invalid_argument);
}

TEST(kit_reduce, equal_by_kind_and_rank) {
  EXPECT_EQ(WeightAndReduce::naive_batched(2), WeightAndReduce::naive_batched(2));
  EXPECT_FALSE(WeightAndReduce::naive_batched(2) == WeightAndReduce::naive_batched(1));
  EXPECT_FALSE(WeightAndReduce::no_op() == WeightAndReduce::contiguous());
  EXPECT_EQ(to_string(WeightAndReduce::naive_batched(3)), "NaiveBatched(3)");
  EXPECT_EQ(to_string(WeightAndReduce::delegate()), "Delegate");
}

TEST(kit_reduce, shapes_and_types_that_do_not_fit_are_named) {
  Reduction r(2, 2, 3, DType::f32, DType::f32);
  Tensor result;
  const auto run = [&](const Tensor& rows) {
    return WeightAndReduce::contiguous().apply(r.result(), rows, r.routing(), false, result);
  };
  EXPECT_NE(run(Tensor(r.rows.data(), DType::f32, {3, 3})).message().find("[3, 3]"), std::string::npos);
  EXPECT_EQ(run(Tensor(r.rows.data(), DType::i8, {4, 3})).code(), StatusCode::invalid_dtype);
  Routing wide = r.routing();
  wide.ids.dtype = DType::i64;
  EXPECT_EQ(WeightAndReduce::contiguous().apply(r.result(), r.expert_output(), wide, false, result).code(),
            StatusCode::invalid_dtype);
}

}  // namespace
}  // namespace moekit::testing
