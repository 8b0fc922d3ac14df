// Who closes the output: chosen by what the caller asks for, explained, and the same sum whoever does it.
#include <gtest/gtest.h>

#include "support/layers.hpp"

namespace moekit {
namespace {
using testing::Guarded;
using testing::LayerValues;
using testing::Random;
using testing::small_config;

PlanOptions open_options(std::int64_t max_tokens = 64, std::int64_t ceiling = 16) {
  PlanOptions options;
  options.output = OutputKind::open, options.max_tokens = max_tokens, options.tail_max_tokens = ceiling;
  return options;
}

const Candidate* find(const BucketPlan& bucket, std::string_view stage, std::string_view name) {
  for (const Candidate& candidate : bucket.candidates)
    if (candidate.stage == stage && candidate.name == name) return &candidate;
  return nullptr;
}

std::vector<float> normal(std::int64_t n, std::uint64_t seed) {
  Random random(seed);
  std::vector<float> out(static_cast<std::size_t>(n));
  for (float& v : out) v = random.normal();
  return out;
}

/// [M, K] of a layer with a tensor for output, the experts forced; `routing` absent = its own router.
std::vector<float> closed_output(const LayerConfig& config, const std::string& experts, const std::vector<float>& x,
                                 const Routing& routing = {}) {
  const std::int64_t K = config.hidden, M = static_cast<std::int64_t>(x.size()) / K;
  PlanOptions options;
  options.experts = experts;
  const Plan plan = Plan::create({}, config, options);
  const LayerValues values(config);
  const Layer layer(plan, Weights::pack(plan, values.source()));
  std::vector<float> y(x.size(), std::nanf(""));
  Guarded memory(plan.workspace_bytes(M));
  LayerOutput out{.tensor = Tensor(y.data(), DType::f32, {M, K})};
  LayerInput in{.hidden = Tensor(x.data(), DType::f32, {M, K})};
  in.routing = routing;
  throw_if_failed(layer.forward(in, out, {{}, memory.bytes()}));
  return y;
}

/// Σ |w · row| of column c of token t.
double magnitude(const UnfinalizedOutput& open, std::int64_t t, std::int64_t c) {
  double sum = 0;
  for (std::int64_t j = 0; j < open.expanded_to_permuted.shape[1]; ++j) {
    const std::int32_t row = open.expanded_to_permuted.at<std::int32_t>(t, j);
    if (row < 0) continue;
    const double weight = open.expert_weights.at<float>(t, j);
    sum += std::abs(weight * static_cast<double>(open.gemm2_permuted.at<float>(row, c)));
  }
  return sum;
}

TEST(plan_open, asking_for_an_open_output_gives_one_without_forcing_a_name) {
  for (std::int64_t shared : {0, 24})
    for (std::int64_t M : {1, 5, 16}) {
      LayerConfig config = small_config();
      config.shared.intermediate = shared;
      const std::int64_t K = config.hidden;
      const LayerValues values(config);
      const std::vector<float> x = normal(M * K, 5);
      const Plan plan = Plan::create({}, config, open_options());
      EXPECT_EQ(plan.bucket(M).tail, "caller");
      const Layer layer(plan, Weights::pack(plan, values.source()));
      Guarded memory(plan.workspace_bytes(M));
      MoeOutput open;
      LayerOutput out{.open = &open};
      const Status status = layer.forward({.hidden = Tensor(x.data(), DType::f32, {M, K})}, out, {{}, memory.bytes()});
      ASSERT_TRUE(status.ok()) << status.to_string();
      ASSERT_FALSE(open.finalised()) << M;
      EXPECT_TRUE(memory.intact());
      std::vector<float> y(x.size(), std::nanf(""));
      ASSERT_TRUE(close_output(open, Tensor(y.data(), DType::f32, {M, K}), {}).ok());

      std::string inner;  // whose rows these are: "cpu.avx2 slot by slot: …"
      for (const Candidate& c : plan.bucket(M).candidates)
        if (c.stage == "experts" && c.chosen) inner = c.detail.substr(0, c.detail.find(" slot by slot"));
      const std::vector<float> routed = closed_output(small_config(), inner, x);
      std::vector<float> dense(x.size(), 0.0f);
      if (shared > 0) {  // the shared expert alone, by the implementation that the plan names
        const std::vector<std::int32_t> nowhere(static_cast<std::size_t>(2 * M), -1);
        const std::vector<float> weights(nowhere.size(), 1.0f);
        std::string name;
        for (const Candidate& c : plan.bucket(M).candidates)
          if (c.stage == "shared experts") name = c.name;
        dense = closed_output(config, name, x,
                              {Tensor(nowhere.data(), DType::i32, {M, 2}), Tensor(weights.data(), DType::f32, {M, 2})});
      }
      const auto& rows = std::get<UnfinalizedOutput>(open.routed);
      for (std::int64_t i = 0; i < M * K; ++i) {
        const auto at = static_cast<std::size_t>(i);
        const double wanted = static_cast<double>(routed[at]) + static_cast<double>(dense[at]);
        // The same rows (the reference's rounded once); on both sides a product, k sums and the sum with the shared.
        const double terms = magnitude(rows, i / K, i % K) + std::abs(static_cast<double>(dense[at]));
        ASSERT_NEAR(y[at], wanted, 0x1p-24 * (1 + 2 * (1 + 2 + 1)) * terms) << "[" << i / K << ", " << i % K << "]";
      }
    }
}

TEST(plan_open, every_implementation_leaves_open_what_it_would_have_closed) {
  const std::vector<std::int32_t> ids{3, 3, -1, 7, 0, -1, -1, -1, 9, 2};  // twice, nowhere, no such expert
  const std::vector<float> weights{0.25f, 0.5f, 7, 1.5f, -1, 7, 7, 7, 7, 0.125f};
  const LayerConfig config = small_config();
  const std::int64_t K = config.hidden, M = 5;
  const LayerValues values(config);
  const std::vector<float> x = normal(M * K, 6);
  const Routing routing{Tensor(ids.data(), DType::i32, {M, 2}), Tensor(weights.data(), DType::f32, {M, 2})};
  int found = 0;
  for (const ExpertsEntry& entry : experts_implementations()) {
    if ((entry.available && !entry.available()) || !entry.make({})->supports_open_output()) continue;
    ++found;
    PlanOptions options = open_options();
    options.experts = std::string(entry.name);
    const Plan plan = Plan::create({}, config, options);
    const Layer layer(plan, Weights::pack(plan, values.source()));
    Guarded memory(plan.workspace_bytes(M));
    MoeOutput open;
    LayerOutput out{.open = &open};
    LayerInput in{.hidden = Tensor(x.data(), DType::f32, {M, K})};
    in.routing = routing;
    const Status status = layer.forward(in, out, {{}, memory.bytes()});
    ASSERT_TRUE(status.ok()) << entry.name << ": " << status.to_string();
    EXPECT_TRUE(memory.intact()) << entry.name;
    ASSERT_FALSE(open.finalised()) << entry.name;
    std::vector<float> y(x.size(), std::nanf(""));
    ASSERT_TRUE(close_output(open, Tensor(y.data(), DType::f32, {M, K}), {}).ok());
    const std::vector<float> closed = closed_output(config, std::string(entry.name), x, routing);
    const auto& rows = std::get<UnfinalizedOutput>(open.routed);
    for (std::int64_t i = 0; i < M * K; ++i)  // rows rounded once, a product and k sums on both sides
      ASSERT_NEAR(y[static_cast<std::size_t>(i)], closed[static_cast<std::size_t>(i)],
                  0x1p-24 * (1 + 2 * (1 + 2)) * magnitude(rows, i / K, i % K))
          << entry.name << " [" << i / K << ", " << i % K << "]";
  }
  EXPECT_GE(found, 2);
  EXPECT_EQ(Plan::create({}, config, open_options()).bucket(1).experts, "cpu_open");  // and not the slow one
}

TEST(plan_open, every_implementation_that_closes_its_output_says_so) {
  const Plan plan = Plan::create({}, small_config(), open_options());
  const BucketPlan& bucket = plan.bucket(1);
  for (const ExpertsEntry& entry : experts_implementations()) {
    if (!testing::runs_here(entry, small_config().dtype)) continue;
    const Candidate* candidate = find(bucket, "experts", entry.name);
    ASSERT_NE(candidate, nullptr) << entry.name;
    const auto experts = entry.make({});
    if (!experts || experts->activation_formats().in != ActivationFormat::standard) continue;
    if (!experts->supports_open_output())
      EXPECT_NE(candidate->reason.find("closes its output"), std::string::npos) << entry.name << candidate->reason;
  }
}

TEST(plan_open, above_the_ceiling_the_fastest_runs_and_the_layer_closes) {
  const Plan plan = Plan::create({}, small_config(), open_options(64, 10));
  const std::string fastest = Plan::create({}, small_config()).bucket(64).experts;
  EXPECT_EQ(plan.bucket(10).tail, "caller");
  EXPECT_EQ(plan.bucket(11).tail, "layer");
  EXPECT_EQ(plan.bucket(11).experts, fastest);
  EXPECT_NE(plan.explain(11).find("tail_max_tokens = 10"), std::string::npos) << plan.explain(11);
}

TEST(plan_open, a_forced_implementation_that_closes_stays_forced_and_the_reason_is_told) {
  PlanOptions options = open_options();
  options.experts = "cpu.portable";
  const LayerConfig config = small_config();
  const Plan plan = Plan::create({}, config, options);
  EXPECT_EQ(plan.bucket(1).experts, "cpu.portable");
  EXPECT_EQ(plan.bucket(1).tail, "layer");
  const Candidate* caller = find(plan.bucket(1), "tail", "caller");
  ASSERT_NE(caller, nullptr);
  EXPECT_EQ(caller->reason, "cpu.portable closes its output");
  EXPECT_NE(plan.explain(1).find("cpu.portable closes its output"), std::string::npos);

  const LayerValues values(config);
  const Layer layer(plan, Weights::pack(plan, values.source()));
  std::vector<float> x(static_cast<std::size_t>(config.hidden), 0.5f), y(x.size());
  Guarded memory(plan.workspace_bytes(1));
  MoeOutput open;
  LayerOutput out{.tensor = Tensor(y.data(), DType::f32, {1, config.hidden}), .open = &open};
  ASSERT_TRUE(
      layer.forward({.hidden = Tensor(x.data(), DType::f32, {1, config.hidden})}, out, {{}, memory.bytes()}).ok());
  ASSERT_TRUE(open.finalised());
  EXPECT_EQ(std::get<Tensor>(open.routed).data, y.data());
}

/// The built-in dispatcher, which keeps the last reduction to itself.
class Closing final : public PrepareFinalize {
 public:
  std::string_view name() const override { return "closing"; }
  ActivationFormat activation_format() const override { return ActivationFormat::standard; }
  Verdict supports(const InputSpec& input) const override { return inner_->supports(input); }
  std::size_t workspace_bytes(const Problem& p, const InputSpec& i) const override {
    return inner_->workspace_bytes(p, i);
  }
  Status prepare(const PrepareArgs& args, Dispatched& out) override { return inner_->prepare(args, out); }
  Status finalize(const FinalizeArgs& args) override { return inner_->finalize(args); }

 private:
  std::unique_ptr<PrepareFinalize> inner_ = prepare_finalize_implementations()[0].make({});
};

TEST(plan_open, a_dispatcher_that_must_close_is_passed_over_or_if_forced_named_as_the_reason) {
  const PrepareFinalizeEntry mine[] = {
      {"closing", [](const MakeContext&) -> std::unique_ptr<PrepareFinalize> { return std::make_unique<Closing>(); },
       ActivationFormat::standard}};
  PlanOptions options = open_options();
  options.extra_prepare_finalize = mine;
  EXPECT_EQ(Plan::create({}, small_config(), options).bucket(1).prepare_finalize, "single_rank");
  options.prepare_finalize = "closing";
  const Plan plan = Plan::create({}, small_config(), options);
  EXPECT_EQ(plan.bucket(1).tail, "layer");
  EXPECT_EQ(plan.bucket(1).experts, Plan::create({}, small_config()).bucket(1).experts);
  EXPECT_EQ(find(plan.bucket(1), "tail", "caller")->reason.find("an open"), std::string::npos);
  EXPECT_NE(find(plan.bucket(1), "tail", "caller")->reason.find("close"), std::string::npos);
}

TEST(plan_open, explain_lists_who_could_close_the_output_for_every_kind) {
  for (OutputKind kind : {OutputKind::tensor, OutputKind::open, OutputKind::tail}) {
    PlanOptions options;
    options.output = kind;
    const Plan plan = Plan::create({}, small_config(), options);
    for (const BucketPlan& bucket : plan.buckets()) {
      int chosen = 0;
      for (const char* name : {"caller", "cpu", "layer"}) {
        const Candidate* candidate = find(bucket, "tail", name);
        ASSERT_NE(candidate, nullptr) << name;
        EXPECT_TRUE(candidate->chosen || !candidate->reason.empty()) << name;
        if (candidate->chosen) EXPECT_EQ(bucket.tail, name);
        chosen += candidate->chosen;
      }
      EXPECT_EQ(chosen, 1);
    }
    const char* expected = kind == OutputKind::tensor ? "layer" : kind == OutputKind::open ? "caller" : "cpu";
    EXPECT_EQ(plan.bucket(1).tail, expected);
    EXPECT_NE(plan.explain(1).find(std::string("tail\n")), std::string::npos) << plan.explain(1);
  }
}

}  // namespace
}  // namespace moekit
