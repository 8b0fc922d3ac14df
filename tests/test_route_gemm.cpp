// logits = hidden · weightᵀ against f64, and the promise that a logit's bits depend on its row and expert alone.
#include <gtest/gtest.h>

#include <cmath>

#include "support/random.hpp"
#include "support/route_case.hpp"

namespace moekit::testing {
namespace {

class Backwards : public Executor {
 public:
  explicit Backwards(int width) : width_(width) {}
  int concurrency() const override { return width_; }
  void run(std::int64_t count, void (*body)(void*, std::int64_t), void* arg) override {
    for (std::int64_t i = count; i-- > 0;) body(arg, i);
  }

 private:
  int width_;
};

struct Matrix {
  GuardedMemory memory;
  Tensor tensor;
};
/// N(0, 1), rows `gap` elements apart, the last element at the end of a page.
Matrix matrix(Random& random, DType type, std::int64_t rows, std::int64_t cols, std::int64_t gap = 0) {
  std::vector<float> values(static_cast<std::size_t>((rows - 1) * (cols + gap) + cols));
  for (float& v : values) v = random.normal();
  GuardedMemory memory = guarded(values, type);
  const Tensor tensor = Tensor::strided(memory.data(), type, {rows, cols}, {cols + gap, 1});
  return {std::move(memory), tensor};
}

std::vector<float> multiply(const route::CpuUnit& unit, const Tensor& hidden, const Tensor& weight,
                            Executor* executor = nullptr) {
  const std::int64_t M = hidden.shape[0], E = weight.shape[0], stride = E + 5;
  std::vector<float> padded(static_cast<std::size_t>(M * stride), std::bit_cast<float>(0xffffffffu)), out;
  CallContext context;
  context.stream.executor = executor;
  const Status s =
      route::gemm_with(unit, hidden, weight, Tensor::strided(padded.data(), DType::f32, {M, E}, {stride, 1}), context);
  EXPECT_TRUE(s.ok()) << s.to_string();
  for (std::int64_t i = 0; i < M; ++i)
    for (std::int64_t j = 0; j < stride; ++j) {
      const float v = padded[static_cast<std::size_t>(i * stride + j)];
      if (j < E)
        out.push_back(v);
      else
        EXPECT_EQ(std::bit_cast<std::uint32_t>(v), 0xffffffffu) << "wrote between the rows";
    }
  return out;
}

TEST(route_gemm, every_shape_and_type_is_within_its_error_bound) {
  Random random(4);
  double worst = 0;
  std::string where;
  for (const route::CpuUnit* unit : all_units())
    for (DType hidden_type : {DType::f32, DType::bf16, DType::f16})
      for (DType weight_type : {DType::f32, DType::bf16, DType::f16})
        for (std::int64_t M : {1, 2, 3, 25, 49})
          for (std::int64_t E : {1, 3, 8, 33, 65})
            for (std::int64_t K : {1, 7, 8, 257, 600}) {
              const Matrix x = matrix(random, hidden_type, M, K, 3), w = matrix(random, weight_type, E, K, 1);
              const std::vector<float> got = multiply(*unit, x.tensor, w.tensor);
              for (std::int64_t i = 0; i < M; ++i)
                for (std::int64_t e = 0; e < E; ++e) {
                  double sum = 0, size = 0;
                  for (std::int64_t k = 0; k < K; ++k) {
                    const double term =
                        static_cast<double>(numeric::load_f32(x.tensor.data, hidden_type, i * (K + 3) + k)) *
                        static_cast<double>(numeric::load_f32(w.tensor.data, weight_type, e * (K + 1) + k));
                    sum += term, size += std::abs(term);
                  }
                  // per lane K/8 sums (and products, without FMA), three levels of lanes
                  const double bound = 0x1p-24 * (static_cast<double>(K) / 8 + 6) * size + 1e-30;
                  const double error =
                      std::abs(static_cast<double>(got[static_cast<std::size_t>(i * E + e)]) - sum) / bound;
                  if (!(error <= worst)) {
                    worst = error;
                    where = std::string(unit->name) + " M" + std::to_string(M) + " E" + std::to_string(E) + " K" +
                            std::to_string(K) + " [" + std::to_string(i) + ", " + std::to_string(e) + "]";
                  }
                }
            }
  EXPECT_LE(worst, 1.0) << where;
}

TEST(route_gemm, bits_do_not_depend_on_batch_threads_or_tile) {
  Random random(5);
  const Matrix x = matrix(random, DType::bf16, 150, 1030), w = matrix(random, DType::bf16, 77, 1030);
  for (const route::CpuUnit* unit : all_units()) {
    const std::vector<float> want = multiply(*unit, x.tensor, w.tensor);
    for (int width : {1, 2, 3, 7, 64}) {
      Backwards executor(width);
      EXPECT_EQ(multiply(*unit, x.tensor, w.tensor, &executor), want) << width;
    }
    for (std::int64_t rows : {1, 2, 5, 47, 48, 149})
      for (int width : {1, 5}) {
        Backwards executor(width);
        const std::vector<float> got = multiply(*unit, x.tensor.slice_rows(150 - rows, 150), w.tensor, &executor);
        EXPECT_TRUE(std::equal(got.begin(), got.end(), want.end() - rows * 77)) << rows << " rows, " << width;
      }
  }
}

TEST(route_gemm, logits_are_not_rounded_to_the_type_of_the_rows) {
  constexpr std::int64_t K = 4096;  // expert 0: 1; expert 1: 1 + 2^-10, all from exact bf16 values
  std::vector<float> hidden(K, 0), weight(2 * K, 0);
  hidden[0] = 1, hidden[K - 1] = 0x1p-10f;
  weight[0] = weight[K] = 1, weight[2 * K - 1] = 1;
  const GuardedMemory x = guarded(hidden, DType::bf16), w = guarded(weight, DType::bf16);
  for (const route::CpuUnit* unit : all_units()) {
    const std::vector<float> logits =
        multiply(*unit, Tensor(x.data(), DType::bf16, {1, K}), Tensor(w.data(), DType::bf16, {2, K}));
    EXPECT_EQ(logits, (std::vector<float>{1.0f, 1.0009765625f}));
    const RouteCase c{.E = 2, .k = 1, .logits = logits};
    for (const auto& router : all_routers()) EXPECT_EQ(run_route(*router, c).ids[0], 1);
  }
}

TEST(route_gemm, a_nan_stays_in_its_row_and_expert) {
  Random random(6);
  for (const route::CpuUnit* unit : all_units()) {
    const Matrix x = matrix(random, DType::f32, 4, 20), w = matrix(random, DType::f32, 5, 20);
    const std::vector<float> clean = multiply(*unit, x.tensor, w.tensor);
    x.tensor.at<float>(2, 19) = std::nanf("");
    const std::vector<float> got = multiply(*unit, x.tensor, w.tensor);
    for (std::size_t i = 0; i < 20; ++i)
      if (i / 5 == 2)
        EXPECT_TRUE(std::isnan(got[i]));
      else
        EXPECT_EQ(got[i], clean[i]);
  }
}

TEST(route_gemm, wrong_shapes_are_errors_and_no_rows_or_columns_are_fine) {
  std::vector<float> memory(64, 0.0f);
  const auto tensor = [&](std::int64_t rows, std::int64_t cols) {
    return Tensor(memory.data(), DType::f32, {rows, cols});
  };
  const Status s = router_gemm(tensor(2, 4), tensor(3, 5), tensor(2, 3), {});
  EXPECT_EQ(s.code(), StatusCode::invalid_shape);
  EXPECT_NE(s.message().find("hidden is [2, 4], weight is [3, 5]"), std::string::npos) << s.message();
  EXPECT_EQ(router_gemm(tensor(2, 4), tensor(3, 4), tensor(3, 2), {}).code(), StatusCode::invalid_shape);
  EXPECT_TRUE(router_gemm(tensor(0, 4), tensor(3, 4), tensor(0, 3), {}).ok());
  std::vector<float> out(6, 1.0f);
  EXPECT_TRUE(router_gemm(tensor(2, 0), tensor(3, 0), Tensor(out.data(), DType::f32, {2, 3}), {}).ok());
  EXPECT_EQ(out, std::vector<float>(6, 0.0f));
}

}  // namespace
}  // namespace moekit::testing
