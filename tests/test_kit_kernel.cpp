// The orchestration: what is refused, what happens in which order, who gets which memory.
#include <gtest/gtest.h>

#include "support/kit_doubles.hpp"

namespace moekit::testing {
namespace {

using Log = std::vector<std::string>;

class LoggingShared final : public SharedExperts {
 public:
  explicit LoggingShared(Log* log = nullptr) : log_(log) {}
  std::size_t workspace_bytes(std::int64_t max_tokens) const override {
    return static_cast<std::size_t>(max_tokens) * 4;
  }
  Status apply(const Tensor& hidden, const Tensor& output, const CallContext& context) const override {
    if (log_) log_->push_back("shared");
    std::memset(context.workspace.data, 0x77, workspace_bytes(hidden.rows()));
    for (std::int64_t t = 0; t < hidden.rows(); ++t)
      for (std::int64_t c = 0; c < hidden.shape[1]; ++c) output.at<float>(t, c) = 2.0f * hidden.at<float>(t, c);
    return {};
  }

 private:
  Log* log_;
};

/// A micro-batch that is overlapped with another: hooks go to a list that only the test runs.
class TestUbatch final : public UbatchContext {
 public:
  TestUbatch(Log& log, int index) : log_(log), index_(index) {}
  int index() const override { return index_; }
  bool enabled() const override { return true; }
  Status yield() override {
    log_.push_back("yield");
    return abort ? Status(StatusCode::aborted, "[ubatch] another micro-batch failed") : Status();
  }
  Status register_recv_hook(Status (*hook)(void*), void* state) override {
    log_.push_back("register");
    (void)hook, (void)state;
    return {};
  }
  Status maybe_run_recv_hook() override { return log_.push_back("maybe_run"), Status(); }
  Status switch_to(Lane) override { return {}; }
  bool abort = false;

 private:
  Log& log_;
  int index_;
};

std::shared_ptr<const Experts> affine(AffineOptions options = {}) {
  return std::make_shared<AffineExperts>(std::move(options));
}

Status run(const ModularKernel& kernel, Case& c, KernelOutput& out, UbatchContext* ubatch = nullptr,
           Executor* executor = nullptr) {
  static SerialExecutor serial;
  PoisonedBytes memory(kernel.workspace_bytes(c.M, c.k));
  CallContext context;
  context.workspace = memory.bytes();
  context.ubatch = ubatch;
  context.stream.executor = executor ? executor : &serial;
  const Status status = kernel.forward(c.input(), out, context);
  EXPECT_TRUE(memory.guard_intact()) << "something behind workspace_bytes() was written";
  return status;
}

void expect_routed(Case& c, const float* y) {
  for (std::int64_t t = 0; t < c.M; ++t)
    for (std::int64_t col = 0; col < c.K; ++col)
      ASSERT_FLOAT_EQ(y[t * c.K + col], static_cast<float>(c.expected(t, col))) << "[" << t << ", " << col << "]";
}

template <class Build>
std::string refusal(Build&& build) {
  try {
    build();
  } catch (const Error& error) {
    return error.status().message();
  }
  return "was built";
}

bool has(const std::string& text, std::initializer_list<const char*> words) {
  for (const char* word : words)
    if (text.find(word) == std::string::npos) return ADD_FAILURE() << "no '" << word << "' in: " << text, false;
  return true;
}

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
