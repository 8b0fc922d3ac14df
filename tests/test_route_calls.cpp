// How routers may be called: offsets beyond 2^31, many threads, many times, without memory of their own.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <new>
#include <thread>

#include "route/reference.hpp"
#include "support/random.hpp"
#include "support/route_case.hpp"

namespace {
std::atomic<std::int64_t> allocations{0};
}

__attribute__((noinline)) void* operator new(std::size_t size) {
  ++allocations;
  if (void* memory = std::malloc(size ? size : 1)) return memory;
  throw std::bad_alloc();
}
__attribute__((noinline)) void operator delete(void* memory) noexcept { std::free(memory); }
__attribute__((noinline)) void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace moekit::testing {
namespace {

/// Runs everything on the calling thread, last index first, and claims to be `width` threads.
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

RouteCase random_case(std::int64_t M, std::int64_t E, std::int64_t k) {
  Random random(3);
  RouteCase c{.M = M, .E = E, .k = k};
  for (std::int64_t i = 0; i < M * E; ++i) c.logits.push_back(random.normal());
  for (std::int64_t i = 0; i < E; ++i) c.selection_bias.push_back(random.normal() * 0.1f);
  c.config.score = Score::sigmoid, c.config.selection_bias = true, c.config.renormalise = true;
  c.config.num_groups = 4, c.config.keep_groups = 2, c.config.group_score = GroupScore::top2_sum;
  return c;
}

TEST(route_calls, more_than_two_billion_logits_are_addressed) {
  constexpr std::int64_t M = 1048577, E = 2048;  // M · E = 2,147,485,696 through one row
  Random random(2);
  const std::vector<std::byte> row = normal_values(random, DType::f32, E);
  std::vector<std::int32_t> ids(M, 77);
  std::vector<float> weights(M, 77);
  RouterConfig config;
  config.softmax_over = SoftmaxOver::selected;
  RouteArgs args;
  args.logits = Tensor::strided(row.data(), DType::f32, {M, E}, {0, 1});
  args.config = &config;
  args.ids = Tensor(ids.data(), DType::i32, {M, 1}), args.weights = Tensor(weights.data(), DType::f32, {M, 1});
  ASSERT_TRUE(route::make_cpu()->route(args).ok());
  const float* logits = reinterpret_cast<const float*>(row.data());
  const std::int64_t best = std::max_element(logits, logits + E) - logits;
  for (std::int64_t t : {std::int64_t{0}, M / 2, M - 2, M - 1}) {
    EXPECT_EQ(ids[static_cast<std::size_t>(t)], best) << "row " << t;
    EXPECT_EQ(weights[static_cast<std::size_t>(t)], 1.0f) << "row " << t;
  }
}

TEST(route_calls, row_offsets_beyond_two_to_the_thirty_two_are_addressed) {
  constexpr std::int64_t M = 5, E = 32, stride = std::int64_t{1} << 30;  // the last row begins at element 2^32
  const std::size_t size = ((M - 1) * stride + E) * 2;
  void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) GTEST_SKIP() << "8 GiB of address space are not to be had";
  for (std::int64_t t = 0; t < M; ++t) numeric::store_f32(memory, DType::bf16, t * stride + 7 + t, 3.0f);
  const RouterConfig config;
  for (const auto& router : all_routers()) {
    std::int32_t ids[M];
    float weights[M];
    RouteArgs args;
    args.logits = Tensor::strided(memory, DType::bf16, {M, E}, {stride, 1});
    args.config = &config;
    args.ids = Tensor(ids, DType::i32, {M, 1}), args.weights = Tensor(weights, DType::f32, {M, 1});
    ASSERT_TRUE(router->route(args).ok());
    for (std::int64_t t = 0; t < M; ++t) EXPECT_EQ(ids[t], 7 + t) << router->name();
  }
  munmap(memory, size);
}

TEST(route_calls, ties_route_alike_fifty_times) {
  for (std::int64_t groups : {1, 4}) {
    RouteCase c{.M = 4096, .E = 16, .k = 4};
    Random random(9);
    for (std::int64_t i = 0; i < c.M * c.E; ++i) c.logits.push_back(static_cast<float>(random.below(2)));
    c.config.num_groups = groups, c.config.keep_groups = groups == 1 ? 1 : 2;
    const RouteResult want = run_route(*route::make_reference(), c);
    for (const auto& router : all_routers()) {
      if (router->name() == "reference") continue;
      for (int run = 0; run < 50; ++run) {
        const RouteResult got = run_route(*router, c);
        ASSERT_EQ(got.ids, want.ids) << router->name() << " run " << run;
      }
    }
    // equal logits come in ascending order of ids; row 0 has 16 logits of two values, so some are equal
    int equal = 0;
    for (std::size_t j = 1; j < 4; ++j)
      if (want.weights[j - 1] == want.weights[j]) {
        EXPECT_LT(want.ids[j - 1], want.ids[j]);
        ++equal;
      }
    EXPECT_GE(equal, 2);
  }
}

TEST(route_calls, bits_of_a_row_depend_on_that_row_alone) {
  const RouteCase whole = random_case(600, 64, 6);
  for (const auto& router : all_routers()) {
    const RouteResult want = run_route(*router, whole);
    for (int width : {1, 2, 3, 7, 64, 1000}) {
      Backwards executor(width);
      RouteCase c = whole;
      c.executor = &executor;
      const RouteResult got = run_route(*router, c);
      EXPECT_EQ(got.ids, want.ids) << router->name() << " " << width;
      EXPECT_EQ(got.weights, want.weights) << router->name() << " " << width;
    }
    for (std::int64_t row : {0, 1, 299, 599}) {
      RouteCase one = whole;
      one.M = 1, one.logits.assign(whole.logits.begin() + row * 64, whole.logits.begin() + (row + 1) * 64);
      const RouteResult got = run_route(*router, one);
      EXPECT_EQ(got.ids, want.row_ids(row)) << router->name();
      EXPECT_EQ(got.weights, want.row_weights(row)) << router->name();
    }
  }
}

TEST(route_calls, two_threads_share_a_router) {
  const RouteCase c = random_case(300, 64, 6);
  for (const auto& router : all_routers()) {
    const RouteResult want = run_route(*router, c);
    std::atomic<int> wrong{0};
    const auto work = [&] {
      for (int run = 0; run < 20; ++run) {
        const RouteResult got = run_route(*router, c);
        wrong += got.status.ok() && got.ids == want.ids && got.weights == want.weights ? 0 : 1;
      }
    };
    std::thread other(work);
    work();
    other.join();
    EXPECT_EQ(wrong, 0) << router->name();
  }
}

TEST(route_calls, nothing_is_allocated) {
  const RouteCase c = random_case(64, 64, 6);
  const GuardedMemory logits = guarded(c.logits, DType::f32);
  std::vector<std::int32_t> ids(64 * 6);
  std::vector<float> weights(64 * 6), hidden(64 * 40, 1.0f), router_weight(64 * 40, 1.0f), out(64 * 64);
  RouterTensors tensors;
  tensors.selection_bias = Tensor(c.selection_bias.data(), DType::f32, {c.E});
  RouteArgs args;
  args.logits = Tensor(logits.data(), DType::f32, {64, 64});
  args.config = &c.config, args.tensors = &tensors;
  args.ids = Tensor(ids.data(), DType::i32, {64, 6}), args.weights = Tensor(weights.data(), DType::f32, {64, 6});
  for (const auto& router : all_routers()) {
    ASSERT_TRUE(router->route(args).ok());
    const std::int64_t before = allocations;
    ASSERT_TRUE(router->route(args).ok());
    EXPECT_EQ(allocations - before, 0) << router->name();
  }
  const Tensor x(hidden.data(), DType::f32, {64, 40}), w(router_weight.data(), DType::f32, {64, 40});
  ASSERT_TRUE(router_gemm(x, w, Tensor(out.data(), DType::f32, {64, 64}), {}).ok());
  const std::int64_t before = allocations;
  ASSERT_TRUE(router_gemm(x, w, Tensor(out.data(), DType::f32, {64, 64}), {}).ok());
  EXPECT_EQ(allocations - before, 0);
}

/// A router of the caller's own: token t goes to the experts t, t + 1, … with equal weights, whatever the logits.
class Striped : public Router {
 public:
  std::string_view name() const override { return "striped"; }
  Verdict supports(const RouteProblem& problem) const override {
    return problem.config.source == RouterSource::custom ? Verdict::yes() : Verdict::no("custom routing only");
  }
  double estimate_us(const RouteProblem&, const Ceilings&) const override { return 1; }
  Status route(const RouteArgs& args) const override {
    for (std::int64_t t = 0; t < args.ids.shape[0]; ++t)
      for (std::int64_t j = 0; j < args.ids.shape[1]; ++j) {
        args.ids.at<std::int32_t>(t, j) = static_cast<std::int32_t>((t + j) % args.logits.shape[1]);
        args.weights.at<float>(t, j) = 1.0f / static_cast<float>(args.ids.shape[1]);
      }
    return {};
  }
};

TEST(route_calls, a_custom_router_is_an_entry_like_the_others) {
  const RouterEntry entry{"striped", []() -> std::unique_ptr<Router> { return std::make_unique<Striped>(); },
                          [] { return Verdict::yes(); }};
  const std::unique_ptr<Router> router = entry.make();
  RouteProblem problem{.num_tokens = 3, .num_experts = 4, .top_k = 2};
  EXPECT_FALSE(router->supports(problem).ok());
  problem.config.source = RouterSource::custom;
  EXPECT_TRUE(router->supports(problem).ok());
  RouteCase c{.config = problem.config, .M = 3, .logits = std::vector<float>(12, 0.0f)};
  EXPECT_EQ(run_route(*router, c).ids, (std::vector<std::int32_t>{0, 1, 1, 2, 2, 3}));
  for (const auto& ours : all_routers()) {  // ours do not guess what the caller's rule might be
    EXPECT_FALSE(ours->supports(problem).ok());
    EXPECT_EQ(run_route(*ours, c).status.field(), "router.source");
  }
}

TEST(route_calls, wrong_arguments_are_errors_that_name_both_sides) {
  std::vector<float> logits(12), weights(6), bias(4);
  std::vector<std::int32_t> ids(6);
  const RouterConfig config;
  RouterTensors tensors;
  RouteArgs good;
  good.logits = Tensor(logits.data(), DType::f32, {3, 4});
  good.config = &config;
  good.ids = Tensor(ids.data(), DType::i32, {3, 2}), good.weights = Tensor(weights.data(), DType::f32, {3, 2});
  for (const auto& router : all_routers()) {
    const auto fails = [&](auto change, StatusCode code, const char* text) {
      RouteArgs args = good;
      change(args);
      const Status s = router->route(args);
      EXPECT_EQ(s.code(), code) << text;
      EXPECT_NE(s.message().find(text), std::string::npos) << s.to_string();
    };
    EXPECT_TRUE(router->route(good).ok());
    fails(
        [&](RouteArgs& a) {
          a.weights = Tensor(weights.data(), DType::f32, {2, 3});
        },
        StatusCode::invalid_shape, "weights must be [3, 2], got [2, 3]");
    fails(
        [&](RouteArgs& a) {
          a.ids = Tensor(ids.data(), DType::i64, {3, 2});
        },
        StatusCode::invalid_dtype, "ids must be i32, got i64");
    fails(
        [&](RouteArgs& a) {
          a.logits = Tensor(logits.data(), DType::i32, {3, 4});
        },
        StatusCode::invalid_dtype, "logits must be f32, bf16 or f16, got i32");
    fails([&](RouteArgs& a) { a.logits = Tensor(logits.data(), DType::f32, {12}); }, StatusCode::invalid_shape, "[12]");
    fails(
        [&](RouteArgs& a) {
          a.logits = Tensor(logits.data(), DType::f32, {3, 1});
        },
        StatusCode::invalid_argument, "top_k must be in [1, num_experts = 1], got 2");
    fails([&](RouteArgs& a) { a.num_valid = 4; }, StatusCode::invalid_argument, "num_valid must be in [-1, 3], got 4");
    fails([&](RouteArgs& a) { a.ids.stride[0] = 1; }, StatusCode::invalid_shape, "row stride 1, 2 columns");
    fails(
        [&](RouteArgs& a) {
          tensors.selection_bias = Tensor(bias.data(), DType::f32, {4});
          a.tensors = &tensors;
        },
        StatusCode::invalid_argument, "the configuration has no selection_bias, the tensors have one");
    RouteArgs empty = good;
    void* const none = nullptr;
    empty.logits = Tensor(none, DType::f32, {0, 4}), empty.ids = Tensor(none, DType::i32, {0, 2});
    empty.weights = Tensor(none, DType::f32, {0, 2});
    EXPECT_TRUE(router->route(empty).ok());
  }
}

}  // namespace
}  // namespace moekit::testing
