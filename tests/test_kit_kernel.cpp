// What a kernel refuses to be built from, and what one call does.
#include <gtest/gtest.h>

#include "support/kit_run.hpp"

namespace moekit::testing {
namespace {

// ---- build ---------------------------------------------------------------------------------------------------------

TEST(kit_kernel, construction_refuses_mismatched_formats_and_names_both) {
  Case c(4, 8, 2, 3);
  const std::string text =
      refusal([&] { ModularKernel(make_dispatcher("single_rank"), affine({.batched = true}), nullptr, c.problem); });
  has(text, {"single_rank", "standard", "affine", "batched_experts"});
}

TEST(kit_kernel, construction_refuses_an_output_that_does_not_fit_its_reduce) {
  class WrongShape final : public Experts {
   public:
    std::string_view name() const override { return "wrong_shape"; }
    Verdict supports(const Problem&) const override { return Verdict::yes(); }
    Formats activation_formats() const override { return {}; }
    bool accepts(const PackFormat&) const override { return true; }
    const PackFormat& preferred_format(const WeightsSpec&) const override { return *pack_formats().back(); }
    InputSpec input_spec(const Problem&) const override { return {.dtype = DType::f32}; }
    ExpertsWorkspace workspace(const Problem& p, const ExpertTokens*) const override {
      return {0, 0, {DType::f32, 2, {p.size.M * p.size.k, p.size.K}}};
    }
    WeightAndReduce weight_and_reduce() const override { return WeightAndReduce::no_op(); }
    Determinism determinism() const override { return Determinism::fast; }
    double estimate_us(const Problem&, const Ceilings&) const override { return 1; }
    Status apply(const ExpertsArgs&, ExpertsResult&) const override { return {}; }
  };
  Case c(4, 8, 2, 3);
  has(refusal(
          [&] { ModularKernel(make_dispatcher("single_rank"), std::make_shared<WrongShape>(), nullptr, c.problem); }),
      {"wrong_shape", "[8, 8]", "NoOp", "[M, K]"});
}

TEST(kit_kernel, construction_refuses_an_input_spec_that_the_dispatcher_cannot_deliver) {
  Case c(4, 8, 2, 3);
  AffineOptions o;
  o.input = {.dtype = DType::i8, .granularity = {-1, -1}};
  has(refusal([&] { ModularKernel(make_dispatcher("single_rank"), affine(o), nullptr, c.problem); }),
      {"single_rank", "affine", "per tensor"});
  o.input = {.dtype = DType::e4m3, .granularity = {1, 128}, .scale_layout = InputSpec::ScaleLayout::packed_ue8m0};
  has(refusal([&] { ModularKernel(make_dispatcher("single_rank"), affine(o), nullptr, c.problem); }), {"row-major"});
}

TEST(kit_kernel, construction_refuses_an_open_output_that_nobody_can_leave) {
  Case c(4, 8, 2, 3);
  has(refusal(
          [&] { ModularKernel(make_dispatcher("single_rank"), affine(), nullptr, c.problem, {.open_max_tokens = 4}); }),
      {"open_max_tokens = 4", "affine"});
}

TEST(kit_kernel, construction_refuses_weight_on_input_with_more_than_one_slot) {
  Case c(4, 8, 2, 3);
  c.problem.weight_on_input = true;
  has(refusal([&] { ModularKernel(make_dispatcher("single_rank"), affine(), nullptr, c.problem); }),
      {"k = 1", "k = 2"});
}

TEST(kit_kernel, construction_refuses_batched_shapes_that_differ) {
  Case c(4, 8, 2, 3);
  c.problem.format = ActivationFormat::batched_experts;
  c.problem.batched = BatchedShape{8, 1};
  const auto dispatcher = make_dispatcher("single_rank_batched", {.batched = BatchedShape{4, 1}});
  has(refusal([&] {
        ModularKernel(dispatcher, affine({.reduce = WeightAndReduce::delegate(), .batched = true}), nullptr, c.problem);
      }),
      {"T = 4", "T = 8"});
}

// ---- one call ------------------------------------------------------------------------------------------------------

TEST(kit_kernel, every_combination_of_dispatcher_and_reduce_gives_the_weighted_sum) {
  for (std::int64_t M : {1, 2, 7}) {
    Case c(M, 9, 3, 5);
    c.ids[0] = -1;
    if (M > 1) c.ids[3] = c.ids[4];  // the same expert twice
    for (WeightAndReduce reduce :
         {WeightAndReduce::no_op(), WeightAndReduce::contiguous(), WeightAndReduce::delegate()}) {
      const ModularKernel kernel(make_dispatcher("single_rank"), affine({.reduce = reduce}), nullptr, c.problem);
      KernelOutput out = c.result();
      ASSERT_TRUE(run(kernel, c, out).ok());
      expect_routed(c, c.output.data());
    }
    Case b = c;
    b.problem.format = ActivationFormat::batched_experts;
    b.problem.batched = BatchedShape{16, 1};
    for (WeightAndReduce reduce : {WeightAndReduce::naive_batched(), WeightAndReduce::delegate()}) {
      const auto dispatcher = make_dispatcher("single_rank_batched", {.batched = b.problem.batched});
      const ModularKernel kernel(dispatcher, affine({.reduce = reduce, .batched = true}), nullptr, b.problem);
      KernelOutput out = b.result();
      ASSERT_TRUE(run(kernel, b, out).ok());
      expect_routed(b, b.output.data());
    }
  }
}

TEST(kit_kernel, shared_experts_run_after_a_synchronous_finalize) {
  Log log;
  Case c(3, 4, 2, 4);
  const auto experts = affine({.seen = [&](const ExpertsArgs&) { log.push_back("experts"); }});
  const ModularKernel kernel(make_dispatcher("single_rank"), experts, std::make_shared<LoggingShared>(&log), c.problem);
  KernelOutput out = c.result();
  ASSERT_TRUE(run(kernel, c, out).ok());
  EXPECT_EQ(log, (Log{"experts", "shared"}));
  expect_routed(c, c.output.data());
  EXPECT_EQ(c.shared[5], 2 * c.hidden[5]);  // beside the routed sum, not in it
}

TEST(kit_kernel, in_place_writes_over_the_input) {
  Case c(3, 4, 2, 4), before = c;
  const ModularKernel kernel(make_dispatcher("single_rank"), affine(), nullptr, c.problem);
  PoisonedBytes memory(kernel.workspace_bytes(c.M));
  KernelInput in = c.input();
  in.in_place = true;
  KernelOutput out;  // none is needed
  SerialExecutor serial;
  ASSERT_TRUE(kernel.forward(in, out, {.stream = {.executor = &serial}, .workspace = memory.bytes()}).ok());
  EXPECT_EQ(out.output.data, c.hidden.data());
  expect_routed(before, c.hidden.data());
}

TEST(kit_kernel, in_place_is_ignored_with_shared_experts) {
  Case c(3, 4, 2, 4), before = c;
  const ModularKernel kernel(make_dispatcher("single_rank"), affine(), std::make_shared<LoggingShared>(), c.problem);
  PoisonedBytes memory(kernel.workspace_bytes(c.M));
  KernelInput in = c.input();
  in.in_place = true;
  KernelOutput out = c.result();
  SerialExecutor serial;
  ASSERT_TRUE(kernel.forward(in, out, {.stream = {.executor = &serial}, .workspace = memory.bytes()}).ok());
  EXPECT_EQ(out.output.data, c.output.data());
  EXPECT_EQ(c.hidden, before.hidden);  // shared experts saw the input, not the routed sum
  EXPECT_EQ(c.shared[1], 2 * before.hidden[1]);
  out.output = in.hidden;
  has(kernel.forward(in, out, {.stream = {.executor = &serial}, .workspace = memory.bytes()}).message(),
      {"output overlaps hidden"});
}

TEST(kit_kernel, output_that_overlaps_the_input_is_refused_unless_in_place_was_asked) {
  Case c(3, 4, 2, 4), before = c;
  const ModularKernel kernel(make_dispatcher("single_rank"), affine(), nullptr, c.problem);
  KernelOutput out;
  out.output = Tensor(c.hidden.data(), DType::f32, {3, 4});
  const Status status = run(kernel, c, out);
  has(status.message(), {"output overlaps hidden"});
  has(status.hint(), {"in_place"});
  EXPECT_EQ(c.hidden, before.hidden);
  // halves of one wide buffer do not overlap
  std::vector<float> wide(3 * 8);
  for (std::int64_t t = 0; t < 3; ++t)
    std::copy_n(&before.hidden[static_cast<std::size_t>(t * 4)], 4, &wide[static_cast<std::size_t>(t * 8)]);
  KernelInput in = c.input();
  in.hidden = Tensor::strided(wide.data(), DType::f32, {3, 4}, {8, 1});
  out.output = Tensor::strided(wide.data() + 4, DType::f32, {3, 4}, {8, 1});
  PoisonedBytes memory(kernel.workspace_bytes(c.M));
  SerialExecutor serial;
  ASSERT_TRUE(kernel.forward(in, out, {.stream = {.executor = &serial}, .workspace = memory.bytes()}).ok());
  EXPECT_FLOAT_EQ(out.output.at<float>(2, 3), static_cast<float>(before.expected(2, 3)));
}

TEST(kit_kernel, no_op_results_go_to_the_callers_output_only_where_that_is_safe) {
  Case c(3, 4, 2, 4);
  const void* written = nullptr;
  const auto experts = affine({.seen = [&](const ExpertsArgs& args) { written = args.output.data; }});
  const auto go = [&](std::shared_ptr<PrepareFinalize> dispatcher, KernelOutput out) {
    const ModularKernel kernel(dispatcher, experts, nullptr, c.problem);
    EXPECT_TRUE(run(kernel, c, out).ok());
    for (std::int64_t t = 0; t < 3; ++t)
      EXPECT_FLOAT_EQ(out.output.at<float>(t, 1), static_cast<float>(c.expected(t, 1)));
    return written;
  };
  EXPECT_EQ(go(make_dispatcher("single_rank"), c.result()), c.output.data());
  EXPECT_NE(go(std::make_shared<AsyncEngine>(make_dispatcher("single_rank")), c.result()),
            c.output.data());  // did not say so
  std::vector<float> wide(3 * 6);
  KernelOutput strided;
  strided.output = Tensor::strided(wide.data(), DType::f32, {3, 4}, {6, 1});
  EXPECT_NE(go(make_dispatcher("single_rank"), strided), wide.data());
}

TEST(kit_kernel, weight_on_input_weights_a_copy_and_nobody_weights_again) {
  for (WeightAndReduce reduce : {WeightAndReduce::no_op(), WeightAndReduce::contiguous()}) {
    Case c(5, 4, 1, 4), before = c;
    c.problem.weight_on_input = true;
    const ModularKernel kernel(make_dispatcher("single_rank"), affine({.reduce = reduce}),
                               std::make_shared<LoggingShared>(), c.problem);
    KernelOutput out = c.result();
    ASSERT_TRUE(run(kernel, c, out).ok());
    expect_routed(c, c.output.data());
    EXPECT_EQ(c.hidden, before.hidden);
    EXPECT_EQ(c.shared[7], 2 * before.hidden[7]);  // unweighted
  }
}

TEST(kit_kernel, weight_on_input_with_two_slots_is_an_error_before_anything_runs) {
  Case c(3, 4, 1, 4), two(3, 4, 2, 4);
  c.problem.weight_on_input = two.problem.weight_on_input = true;
  int applied = 0;
  const ModularKernel kernel(make_dispatcher("single_rank"), affine({.seen = [&](const ExpertsArgs&) { ++applied; }}),
                             nullptr, c.problem);
  KernelOutput out = two.result();
  has(run(kernel, two, out).message(), {"k = 1", "k = 2"});
  EXPECT_EQ(applied, 0);
  EXPECT_TRUE(std::isnan(two.output[0]));
}

TEST(kit_kernel, num_experts_of_minus_one_means_the_local_ones) {
  Case c(3, 4, 2, 4);
  std::int64_t seen = 0;
  const ModularKernel kernel(make_dispatcher("single_rank"),
                             affine({.seen = [&](const ExpertsArgs& a) { seen = a.num_experts; }}), nullptr, c.problem);
  PoisonedBytes memory(kernel.workspace_bytes(c.M));
  KernelInput in = c.input();
  in.num_experts = -1;
  KernelOutput out = c.result();
  ASSERT_TRUE(kernel.forward(in, out, {.workspace = memory.bytes()}).ok());
  EXPECT_EQ(seen, 4);
  in.num_experts = 5;
  has(kernel.forward(in, out, {.workspace = memory.bytes()}).message(), {"5", "4"});
}

TEST(kit_kernel, routes_that_are_not_local_contribute_exactly_zero) {
  Case c(6, 5, 3, 8, 2);
  c.problem.expert_map = true;
  c.map = {-1, 0, -1, -1, -1, -1, 1, -1};
  c.ids = {0, 2, 3, 1, 6, 1, -1, 6, 8, 0x7fffffff, -2, 1, 4, 5, 7, 6, 6, 6};
  for (WeightAndReduce reduce : {WeightAndReduce::no_op(), WeightAndReduce::contiguous()}) {
    const ModularKernel kernel(make_dispatcher("single_rank"), affine({.reduce = reduce}), nullptr, c.problem);
    KernelOutput out = c.result();
    ASSERT_TRUE(run(kernel, c, out).ok());
    expect_routed(c, c.output.data());
    for (std::int64_t col = 0; col < c.K; ++col) EXPECT_EQ(c.output[static_cast<std::size_t>(col)], 0.0f);
  }
}

TEST(kit_kernel, an_expert_map_needs_experts_that_take_one) {
  Case c(3, 4, 2, 4, 2);
  c.problem.expert_map = true;
  c.map = {0, 1, -1, -1};
  const ModularKernel kernel(make_dispatcher("single_rank"), affine({.expert_map = false}), nullptr, c.problem);
  KernelOutput out = c.result();
  has(run(kernel, c, out).message(), {"affine", "expert map"});
}

TEST(kit_kernel, ids_of_every_type_give_the_same_bits) {
  Case c(4, 4, 2, 4);
  c.ids[2] = -1;
  c.ids[5] = 4;  // out of range: skipped
  const std::vector<std::int64_t> wide(c.ids.begin(), c.ids.end());
  const std::vector<std::uint32_t> unsigned_ids(c.ids.begin(), c.ids.end());
  for (const char* dispatcher : {"single_rank", "single_rank_batched"}) {
    Case b = c;
    const bool batched = dispatcher != std::string("single_rank");
    if (batched) b.problem.format = ActivationFormat::batched_experts, b.problem.batched = BatchedShape{8, 1};
    const AffineOptions options{.reduce = batched ? WeightAndReduce::delegate() : WeightAndReduce::no_op(),
                                .batched = batched};
    const ModularKernel kernel(make_dispatcher(dispatcher, {.batched = b.problem.batched}), affine(options), nullptr,
                               b.problem);
    KernelOutput out = b.result();
    ASSERT_TRUE(run(kernel, b, out).ok());
    const std::vector<float> plain = b.output;
    for (const Tensor& ids :
         {Tensor(wide.data(), DType::i64, {4, 2}), Tensor(unsigned_ids.data(), DType::u32, {4, 2})}) {
      PoisonedBytes memory(kernel.workspace_bytes(b.M));
      KernelInput in = b.input();
      in.routing.ids = ids;
      std::fill(b.output.begin(), b.output.end(), std::nanf(""));
      ASSERT_TRUE(kernel.forward(in, out, {.workspace = memory.bytes()}).ok());
      EXPECT_EQ(b.output, plain) << name(ids.dtype);
    }
  }
}

}  // namespace
}  // namespace moekit::testing
