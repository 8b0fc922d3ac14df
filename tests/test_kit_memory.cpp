// Wrong arguments, and who gets which memory.
#include <gtest/gtest.h>

#include "support/kit_run.hpp"

namespace moekit::testing {
namespace {

// ---- arguments -----------------------------------------------------------------------------------------------------

TEST(kit_kernel, wrong_arguments_are_named_and_nothing_is_written) {
  Case c(3, 4, 2, 4);
  int applied = 0;
  const ModularKernel kernel(make_dispatcher("single_rank"), affine({.seen = [&](const ExpertsArgs&) { ++applied; }}),
                             nullptr, c.problem);
  PoisonedBytes memory(kernel.workspace_bytes(c.M));
  const auto with = [&](auto&& change) {
    KernelInput in = c.input();
    KernelOutput out = c.result();
    CallContext context{.workspace = memory.bytes()};
    change(in, out, context);
    return kernel.forward(in, out, context);
  };
  using In = KernelInput;
  using Out = KernelOutput;
  using Ctx = CallContext;
  has(with([](In& in, Out&, Ctx&) { in.hidden.shape[1] = 5; }).message(), {"[3, 4]", "[3, 5]"});
  has(with([](In& in, Out&, Ctx&) { in.hidden = in.hidden.transposed(); }).message(), {"hidden", "[4, 3]"});
  has(with([&](In& in, Out&, Ctx&) {
        in.hidden = Tensor(c.hidden.data(), DType::f32, {4, 3}).transposed();
      }).message(),
      {"hidden", "stride 3"});
  has(with([](In& in, Out&, Ctx&) { in.hidden.dtype = DType::bf16; }).message(), {"bf16", "f32"});
  has(with([](In& in, Out&, Ctx&) { in.hidden.data = nullptr; }).message(), {"hidden", "null"});
  has(with([](In& in, Out&, Ctx&) { in.routing.ids.dtype = DType::u8; }).message(), {"i32, i64 or u32", "u8"});
  has(with([](In& in, Out&, Ctx&) { in.weights.spec.num_local = 3; }).message(), {"3 experts", "4"});
  has(with([](In& in, Out&, Ctx&) { in.weights.format = nullptr; }).message(), {"pack format"});
  has(with([](In& in, Out&, Ctx&) { in.activation.kind = ActivationKind::gelu; }).message(), {"gelu", "silu"});
  has(with([](In&, Out& out, Ctx&) { out.output.shape[0] = 2; }).message(), {"output", "[3, 4]", "[2, 4]"});
  has(with([](In&, Out& out, Ctx&) { out.output = {}; }).message(), {"output"});
  has(with([](In&, Out&, Ctx& ctx) { ctx.workspace = {}; }).message(), {"needs", "got 0"});
  has(with([](In&, Out&, Ctx& ctx) { ctx.workspace.size -= 1; }).message(), {"needs"});
  has(with([](In&, Out&, Ctx& ctx) { ctx.workspace.data += 8; }).message(), {"256-byte aligned"});
  std::int32_t map[4] = {};
  const Tensor short_map(map, DType::i32, {3});
  has(with([&](In& in, Out&, Ctx&) { in.expert_map = &short_map; }).message(), {"without"});
  EXPECT_EQ(applied, 0);
  EXPECT_TRUE(std::isnan(c.output[0]));
}

TEST(kit_kernel, many_tokens_that_cannot_be_counted_are_an_overflow_not_a_small_number) {
  Case c(3, 4, 2, 4);
  const ModularKernel kernel(make_dispatcher("single_rank"), affine(), nullptr, c.problem);
  has(refusal([&] { (void)kernel.workspace_bytes(std::int64_t{1} << 60); }), {"do not fit 63 bits"});
  EXPECT_GT(kernel.workspace_bytes(std::int64_t{1} << 40), std::size_t{1} << 40);
}

TEST(kit_kernel, a_pool_serves_calls_without_a_workspace_and_grows_only_until_locked) {
  Case small(2, 4, 2, 4), large(64, 4, 2, 4);
  const auto pool = std::make_shared<WorkspacePool>();
  const ModularKernel kernel(make_dispatcher("single_rank"), affine({.reduce = WeightAndReduce::contiguous()}), nullptr,
                             small.problem, {.pool = pool});
  KernelOutput out = small.result();
  ASSERT_TRUE(kernel.forward(small.input(), out, {}).ok());
  expect_routed(small, small.output.data());
  pool->lock();
  const std::size_t held = pool->bytes();
  out = large.result();
  EXPECT_EQ(kernel.forward(large.input(), out, {}).code(), StatusCode::workspace_too_small);
  EXPECT_EQ(pool->bytes(), held);
  out = small.result();
  EXPECT_TRUE(kernel.forward(small.input(), out, {}).ok());
}

TEST(kit_kernel, two_micro_batches_take_different_buffers_of_the_pool) {
  Log log;
  const auto pool = std::make_shared<WorkspacePool>();
  std::vector<const std::byte*> seen;
  Case c(3, 4, 2, 4);
  const auto engine = std::make_shared<AsyncEngine>(make_dispatcher("single_rank"));
  const ModularKernel kernel(engine,
                             affine({.reduce = WeightAndReduce::contiguous(),
                                     .seen = [&](const ExpertsArgs& a) { seen.push_back(a.workspace13.data); }}),
                             nullptr, c.problem, {.pool = pool});
  ASSERT_TRUE(pool->reserve(2, kernel.workspace_bytes(c.M)).ok());
  pool->lock();
  for (int index : {0, 1}) {
    TestUbatch ubatch(log, index);
    KernelOutput out = c.result();
    ASSERT_TRUE(kernel.forward(c.input(), out, {.ubatch = &ubatch}).ok());
  }
  EXPECT_NE(seen[0], seen[1]);
}

TEST(kit_kernel, layers_of_different_sizes_share_one_workspace_without_disturbing_each_other) {
  Case a(5, 16, 2, 4), b(3, 4, 2, 3);
  const ModularKernel first(make_dispatcher("single_rank"), affine({.reduce = WeightAndReduce::contiguous()}), nullptr,
                            a.problem);
  const ModularKernel second(make_dispatcher("single_rank"), affine({.reduce = WeightAndReduce::contiguous()}), nullptr,
                             b.problem);
  PoisonedBytes memory(std::max(first.workspace_bytes(5), second.workspace_bytes(3)));
  for (int round = 0; round < 2; ++round) {
    KernelOutput out = a.result();
    ASSERT_TRUE(first.forward(a.input(), out, {.workspace = memory.bytes()}).ok());
    out = b.result();
    ASSERT_TRUE(second.forward(b.input(), out, {.workspace = memory.bytes()}).ok());
    expect_routed(a, a.output.data());
    expect_routed(b, b.output.data());
  }
}

TEST(kit_kernel, workspace_is_monotone_in_tokens_and_slots) {
  Case c(64, 8, 2, 4);
  for (std::int64_t chunk : {0, 5})
    for (std::int64_t open : {0, 7}) {
      AffineOptions options{.reduce = WeightAndReduce::contiguous(), .open = true};
      const ModularKernel kernel(make_dispatcher("single_rank"), affine(options), std::make_shared<LoggingShared>(),
                                 c.problem, {.chunk = chunk, .open_max_tokens = open});
      std::size_t before = 0;
      for (std::int64_t m = 0; m < 64; ++m) {
        EXPECT_GE(kernel.workspace_bytes(m), before) << m;
        EXPECT_GE(kernel.workspace_bytes(m, 3), kernel.workspace_bytes(m, 2));
        before = kernel.workspace_bytes(m);
      }
    }
}

TEST(kit_kernel, every_token_count_fits_the_workspace_of_the_largest) {
  const std::int64_t largest = 33;
  for (std::int64_t chunk : {0, 4})
    for (bool leave_open : {false, true}) {
      Case sizes(largest, 8, 2, 4);
      AffineOptions options{.reduce = WeightAndReduce::contiguous(), .open = true};
      const ModularKernel kernel(make_dispatcher("single_rank"), affine(options), nullptr, sizes.problem,
                                 {.chunk = chunk, .open_max_tokens = 20});
      PoisonedBytes memory(kernel.workspace_bytes(largest));
      for (std::int64_t m = 1; m <= largest; ++m) {
        Case c(m, 8, 2, 4);
        if (m % 3 == 0) std::fill(c.ids.begin(), c.ids.end(), 2);   // all to one
        if (m % 3 == 1) std::fill(c.ids.begin(), c.ids.end(), -1);  // nobody
        KernelInput in = c.input();
        in.leave_open = leave_open;
        KernelOutput out = c.result();
        ASSERT_TRUE(kernel.forward(in, out, {.workspace = memory.bytes()}).ok()) << m;
        EXPECT_EQ(out.left_open, leave_open && m <= 20);
        EXPECT_TRUE(memory.guard_intact()) << m;
        if (!out.left_open) expect_routed(c, c.output.data());
      }
    }
}

}  // namespace
}  // namespace moekit::testing
