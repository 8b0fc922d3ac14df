// Nothing arrives, routing is replaced, engines are asynchronous, results are left open.
#include <gtest/gtest.h>

#include "support/kit_run.hpp"

namespace moekit::testing {
namespace {

// ---- nothing arrives -----------------------------------------------------------------------------------------------

/// Delivers no rows, whatever the caller has: a rank whose experts nobody chose.
class Nobody final : public PrepareFinalize {
 public:
  std::string_view name() const override { return "nobody"; }
  ActivationFormat activation_format() const override { return ActivationFormat::standard; }
  Verdict supports(const InputSpec&) const override { return Verdict::yes(); }
  std::size_t workspace_bytes(const Problem&, const InputSpec&) const override { return 0; }
  Status prepare(const PrepareArgs& args, Dispatched& out) override {
    out.activations.data = Tensor(args.hidden.data, DType::f32, {0, args.hidden.shape[1]});
    out.routing = args.routing.slice_rows(0, 0);
    return {};
  }
  Status finalize(const FinalizeArgs& args) override {
    shape = shape_string(args.expert_output), type = args.expert_output.dtype, rows = args.routing.num_tokens();
    for (std::int64_t t = 0; t < args.output.rows(); ++t)
      for (std::int64_t c = 0; c < args.output.shape[1]; ++c) args.output.at<float>(t, c) = 7;  // came from elsewhere
    return {};
  }
  std::string shape;
  DType type{};
  std::int64_t rows = -1;
};

TEST(kit_kernel, finalize_runs_when_no_rows_arrive) {
  Case c(16, 4, 2, 4);
  const auto nobody = std::make_shared<Nobody>();
  int applied = 0;
  const ModularKernel kernel(nobody, affine({.seen = [&](const ExpertsArgs&) { ++applied; }}), nullptr, c.problem);
  KernelOutput out = c.result();
  ASSERT_TRUE(run(kernel, c, out).ok());
  EXPECT_EQ(applied, 0);
  EXPECT_EQ(nobody->shape, "[0, 4]");
  EXPECT_EQ(nobody->type, DType::f32);
  EXPECT_EQ(nobody->rows, 0);
  EXPECT_EQ(c.output[63], 7.0f);  // 16 rows come back all the same
}

TEST(kit_kernel, zero_tokens_go_through_every_stage) {
  for (bool async : {false, true}) {
    Log log;
    Case c(0, 4, 2, 4);
    std::shared_ptr<PrepareFinalize> dispatcher = make_dispatcher("single_rank");
    if (async) dispatcher = std::make_shared<AsyncEngine>(dispatcher, &log);
    const ModularKernel kernel(dispatcher, affine(), std::make_shared<LoggingShared>(&log), c.problem);
    KernelOutput out = c.result();
    ASSERT_TRUE(run(kernel, c, out).ok());
    EXPECT_EQ(log.back() == "shared", !async);
    if (async) {
      EXPECT_EQ(log, (Log{"prepare_launch", "prepare_hook", "prepare_receive", "finalize_launch", "shared",
                          "finalize_hook", "finalize_receive"}));
    }
  }
}

TEST(kit_kernel, a_rank_without_experts_returns_zeros) {
  Case c(3, 4, 2, 4, 0);
  c.problem.expert_map = true;
  c.map = {-1, -1, -1, -1};
  const ModularKernel kernel(make_dispatcher("single_rank"), affine(), nullptr, c.problem);
  KernelOutput out = c.result();
  ASSERT_TRUE(run(kernel, c, out).ok());
  EXPECT_EQ(c.output, std::vector<float>(12, 0.0f));
}

// ---- dispatched routing --------------------------------------------------------------------------------------------

/// Delivers the rows in reverse order with ids that are local slots, and puts them back.
class Reversing final : public PrepareFinalize {
 public:
  std::string_view name() const override { return "reversing"; }
  ActivationFormat activation_format() const override { return ActivationFormat::standard; }
  Verdict supports(const InputSpec&) const override { return Verdict::yes(); }
  std::size_t workspace_bytes(const Problem&, const InputSpec&) const override { return 0; }
  Status prepare(const PrepareArgs& args, Dispatched& out) override {
    const std::int64_t M = args.hidden.rows(), K = args.hidden.shape[1], k = args.routing.top_k();
    rows.resize(static_cast<std::size_t>(M * K)), ids.resize(static_cast<std::size_t>(M * k)),
        weights.resize(ids.size());
    for (std::int64_t t = 0; t < M; ++t) {
      for (std::int64_t c = 0; c < K; ++c)
        rows[static_cast<std::size_t>((M - 1 - t) * K + c)] = args.hidden.at<float>(t, c);
      for (std::int64_t j = 0; j < k; ++j) {
        const std::int32_t id = args.routing.ids.at<std::int32_t>(t, j);
        ids[static_cast<std::size_t>((M - 1 - t) * k + j)] =
            args.expert_map ? args.expert_map->as<std::int32_t>()[id] : id;
        weights[static_cast<std::size_t>((M - 1 - t) * k + j)] = args.routing.weights.at<float>(t, j);
      }
    }
    out.activations.data = Tensor(rows.data(), DType::f32, {M, K});
    out.routing =
        Routing{Tensor(ids.data(), DType::i32, {M, k}), Tensor(weights.data(), DType::f32, {M, k}), IdSpace::local};
    return {};
  }
  Status finalize(const FinalizeArgs& args) override {
    got_mine = args.routing.ids.data == ids.data() && args.routing.weights.data == weights.data();
    std::vector<float> sum(rows.size());
    const Tensor reduced(sum.data(), DType::f32, {args.output.rows(), args.output.shape[1]});
    Tensor result;
    if (Status s = args.reduce.apply(reduced, args.expert_output, args.routing, args.weight_on_input, result); !s.ok())
      return s;
    for (std::int64_t t = 0; t < args.output.rows(); ++t)
      for (std::int64_t c = 0; c < args.output.shape[1]; ++c)
        args.output.at<float>(t, c) = result.at<float>(args.output.rows() - 1 - t, c);
    return {};
  }
  std::vector<float> rows, weights;
  std::vector<std::int32_t> ids;
  bool got_mine = false;
};

TEST(kit_kernel, dispatched_routing_replaces_the_callers_for_experts_and_finalize) {
  Case c(5, 4, 2, 6, 3);
  c.problem.expert_map = true;
  c.map = {2, -1, 0, -1, -1, 1};
  for (WeightAndReduce reduce : {WeightAndReduce::no_op(), WeightAndReduce::contiguous()}) {
    const auto engine = std::make_shared<Reversing>();
    // local ids: the map was applied by the engine, and must not be applied again
    const ModularKernel kernel(engine, affine({.reduce = reduce, .expert_map = false}), nullptr, c.problem);
    KernelOutput out = c.result();
    ASSERT_TRUE(run(kernel, c, out).ok());
    EXPECT_TRUE(engine->got_mine);
    expect_routed(c, c.output.data());
  }
}

// ---- asynchronous engines and overlap ------------------------------------------------------------------------------

TEST(kit_kernel, a_synchronous_engine_under_overlap_is_refused_before_any_call) {
  Log log;
  Case c(3, 4, 2, 4);
  TestUbatch ubatch(log, 0);
  const ModularKernel kernel(make_dispatcher("single_rank"), affine(), std::make_shared<LoggingShared>(&log),
                             c.problem);
  KernelOutput out = c.result();
  EXPECT_EQ(run(kernel, c, out, &ubatch).code(), StatusCode::unsupported);
  EXPECT_TRUE(log.empty());
  EXPECT_TRUE(std::isnan(c.output[0]));
}

TEST(kit_kernel, shared_experts_overlap_with_the_combine_of_an_async_engine) {
  for (bool hook : {true, false}) {
    Log log;
    Case c(3, 4, 2, 4);
    const auto engine = std::make_shared<AsyncEngine>(make_dispatcher("single_rank"), &log);
    engine->with_hook = hook;
    const ModularKernel kernel(engine, affine({.seen = [&](const ExpertsArgs&) { log.push_back("experts"); }}),
                               std::make_shared<LoggingShared>(&log), c.problem);
    KernelOutput out = c.result();
    SingleUbatch ubatch;
    ASSERT_TRUE(run(kernel, c, out, &ubatch).ok());
    EXPECT_EQ(log, (hook ? Log{"prepare_launch", "prepare_hook", "prepare_receive", "experts", "finalize_launch",
                               "shared", "finalize_hook", "finalize_receive"}
                         : Log{"prepare_launch", "prepare_receive", "experts", "finalize_launch", "shared",
                               "finalize_receive"}));
    EXPECT_EQ(engine->abandoned, 0);
    expect_routed(c, c.output.data());
  }
}

TEST(kit_kernel, under_overlap_hooks_go_to_the_next_micro_batch) {
  Log log;
  Case c(3, 4, 2, 4);
  TestUbatch ubatch(log, 1);
  const auto engine = std::make_shared<AsyncEngine>(make_dispatcher("single_rank"), &log);
  const ModularKernel kernel(engine, affine(), std::make_shared<LoggingShared>(&log), c.problem);
  KernelOutput out = c.result();
  ASSERT_TRUE(run(kernel, c, out, &ubatch).ok());
  EXPECT_EQ(log, (Log{"maybe_run", "prepare_launch", "register", "yield", "prepare_receive", "finalize_launch",
                      "shared", "register", "yield", "finalize_receive"}));
}

TEST(kit_kernel, failure_of_any_step_propagates_and_abandons_what_is_on_the_wire) {
  for (const auto& [step, abandoned] : std::vector<std::pair<std::string, int>>{{"prepare_launch", 0},
                                                                                {"prepare_hook", 1},
                                                                                {"prepare_receive", 0},
                                                                                {"finalize_launch", 0},
                                                                                {"finalize_hook", 1},
                                                                                {"finalize_receive", 0}}) {
    Case c(3, 4, 2, 4);
    const auto engine = std::make_shared<AsyncEngine>(make_dispatcher("single_rank"));
    engine->fail_at = step;
    const ModularKernel kernel(engine, affine(), nullptr, c.problem);
    KernelOutput out = c.result();
    const Status status = run(kernel, c, out);
    EXPECT_EQ(status.code(), StatusCode::device_error) << step;
    has(status.message(), {step.c_str()});
    EXPECT_EQ(engine->abandoned, abandoned) << step;
    engine->fail_at.clear();
    EXPECT_TRUE(run(kernel, c, out).ok()) << "the kernel is usable afterwards";
  }
}

TEST(kit_kernel, an_aborted_micro_batch_abandons_its_dispatch) {
  Log log;
  Case c(3, 4, 2, 4);
  TestUbatch ubatch(log, 0);
  ubatch.abort = true;
  const auto engine = std::make_shared<AsyncEngine>(make_dispatcher("single_rank"));
  const ModularKernel kernel(engine, affine(), nullptr, c.problem);
  KernelOutput out = c.result();
  EXPECT_EQ(run(kernel, c, out, &ubatch).code(), StatusCode::aborted);
  EXPECT_EQ(engine->abandoned, 1);
}

TEST(kit_kernel, an_aborted_micro_batch_drops_its_hook_before_it_abandons_what_the_hook_waits_for) {
  for (int yields : {1, 2}) {  // aborted behind prepare, behind finalize
    Log log;
    Case c(3, 4, 2, 4);
    const auto engine = std::make_shared<AsyncEngine>(make_dispatcher("single_rank"));
    TestUbatch ubatch(log, 0);
    ubatch.yields_before_abort = yields - 1;
    ubatch.abort = true;
    int abandoned_at_drop = -1;
    ubatch.on_drop = [&] { abandoned_at_drop = engine->abandoned; };
    const ModularKernel kernel(engine, affine(), nullptr, c.problem);
    KernelOutput out = c.result();
    EXPECT_EQ(run(kernel, c, out, &ubatch).code(), StatusCode::aborted);
    EXPECT_TRUE(ubatch.registered.empty()) << "a hook would run on state that is gone";
    EXPECT_EQ(abandoned_at_drop, 0);
    EXPECT_EQ(engine->abandoned, 1);
    EXPECT_EQ(log.back(), "drop");
  }
}

TEST(kit_kernel, failing_experts_stop_the_call) {
  Case c(3, 4, 2, 4);
  const ModularKernel kernel(make_dispatcher("single_rank"),
                             affine({.fail = [] { return Status(StatusCode::device_error, "[double] no"); }}), nullptr,
                             c.problem);
  KernelOutput out = c.result();
  EXPECT_EQ(run(kernel, c, out).code(), StatusCode::device_error);
}

// ---- open output ---------------------------------------------------------------------------------------------------

TEST(kit_kernel, an_open_result_skips_finalize_and_runs_shared_experts) {
  Log log;
  Case c(3, 4, 2, 4);
  c.ids[1] = -1;
  const auto engine = std::make_shared<AsyncEngine>(make_dispatcher("single_rank"), &log);
  const ModularKernel kernel(engine, affine({.reduce = WeightAndReduce::contiguous(), .open = true}),
                             std::make_shared<LoggingShared>(&log), c.problem, {.open_max_tokens = 3});
  PoisonedBytes memory(kernel.workspace_bytes(c.M));
  KernelInput in = c.input();
  in.leave_open = true;
  KernelOutput out;
  out.shared = c.result().shared;
  ASSERT_TRUE(kernel.forward(in, out, {.workspace = memory.bytes()}).ok());
  EXPECT_EQ(log, (Log{"prepare_launch", "prepare_hook", "prepare_receive", "shared"}));
  ASSERT_TRUE(out.left_open);
  ASSERT_FALSE(out.open.finalised());
  const auto& open = std::get<UnfinalizedOutput>(out.open.routed);
  EXPECT_EQ(shape_string(open.expanded_to_permuted), "[3, 2]");
  EXPECT_EQ(open.expanded_to_permuted.at<std::int32_t>(0, 1), -1);
  EXPECT_EQ(out.open.shared.data, c.shared.data());
  EXPECT_EQ(out.open.routed_scaling_factor, 1.0f);
  EXPECT_TRUE(memory.guard_intact());
}

TEST(kit_kernel, above_the_ceiling_and_at_zero_tokens_the_kernel_finalises) {
  for (std::int64_t M : {0, 4}) {
    Case c(M, 4, 2, 4);
    const ModularKernel kernel(make_dispatcher("single_rank"), affine({.open = true}), nullptr, c.problem,
                               {.open_max_tokens = 3});
    PoisonedBytes memory(kernel.workspace_bytes(c.M));
    KernelInput in = c.input();
    in.leave_open = true;
    KernelOutput out = c.result();
    ASSERT_TRUE(kernel.forward(in, out, {.workspace = memory.bytes()}).ok());
    EXPECT_FALSE(out.left_open);
    ASSERT_TRUE(out.open.finalised());
    EXPECT_EQ(std::get<Tensor>(out.open.routed).data, c.output.data());
    expect_routed(c, c.output.data());
  }
}

TEST(kit_kernel, leave_open_without_a_ceiling_is_an_error_that_says_what_to_set) {
  Case c(3, 4, 2, 4);
  const ModularKernel kernel(make_dispatcher("single_rank"), affine({.open = true}), nullptr, c.problem);
  PoisonedBytes memory(kernel.workspace_bytes(c.M));
  KernelInput in = c.input();
  in.leave_open = true;
  KernelOutput out = c.result();
  has(kernel.forward(in, out, {.workspace = memory.bytes()}).hint(), {"open_max_tokens"});
}

TEST(kit_kernel, open_weights_are_one_when_the_input_was_weighted) {
  Case c(3, 4, 1, 4);
  c.problem.weight_on_input = true;
  const ModularKernel kernel(make_dispatcher("single_rank"), affine({.open = true}), nullptr, c.problem,
                             {.open_max_tokens = 3});
  PoisonedBytes memory(kernel.workspace_bytes(c.M));
  KernelInput in = c.input();
  in.leave_open = true;
  KernelOutput out;
  ASSERT_TRUE(kernel.forward(in, out, {.workspace = memory.bytes()}).ok());
  const auto& open = std::get<UnfinalizedOutput>(out.open.routed);
  for (std::int64_t t = 0; t < 3; ++t) EXPECT_EQ(open.expert_weights.at<float>(t, 0), 1.0f);
}

}  // namespace
}  // namespace moekit::testing
