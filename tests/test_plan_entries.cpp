// Entries that callers hand in: whatever they return, the plan answers with a candidate and a reason.
#include <gtest/gtest.h>

#include <limits>

#include "experts/canonical.hpp"
#include "support/layers.hpp"

namespace moekit {
namespace {
using testing::small_config;

template <class Part>
std::unique_ptr<Part> builtin(std::string_view name, const MakeContext& context);
template <>
std::unique_ptr<Experts> builtin(std::string_view name, const MakeContext& context) {
  for (const ExpertsEntry& entry : experts_implementations())
    if (entry.name == name) return entry.make(context);
  return nullptr;
}

double g_estimate = 0;
int g_makes = 0;

/// A format of one's own, which only says so.
class OwnFormat final : public PackFormat {
 public:
  std::string_view id() const override { return "own"; }
  int version() const override { return 1; }
  Verdict supports(const WeightsSpec& spec) const override { return canonical().supports(spec); }
  std::size_t bytes(const WeightsSpec& spec) const override { return canonical().bytes(spec); }
  Status pack_expert(std::byte* dst, const WeightsSpec& spec, const CanonicalExpert& expert) const override {
    return canonical().pack_expert(dst, spec, expert);
  }
  Status unpack_expert(const std::byte* src, const WeightsSpec& spec, const CanonicalExpert& expert) const override {
    return canonical().unpack_expert(src, spec, expert);
  }

 private:
  static const PackFormat& canonical() { return experts::canonical_format(); }
};

/// The reference with the estimate of the test, reading `kOwn` only if asked.
class Estimating : public Experts {
 public:
  Estimating(std::string_view inner, const MakeContext& context, bool own_format)
      : inner_(builtin<Experts>(inner, context)), own_format_(own_format) {}
  std::string_view name() const override { return "estimating"; }
  Verdict supports(const Problem& p) const override { return inner_->supports(p); }
  Formats activation_formats() const override { return inner_->activation_formats(); }
  bool accepts(const PackFormat& format) const override { return !own_format_ || format.id() == "own"; }
  const PackFormat& preferred_format(const WeightsSpec& spec) const override {
    static const OwnFormat own;
    return own_format_ ? own : inner_->preferred_format(spec);
  }
  InputSpec input_spec(const Problem& p) const override { return inner_->input_spec(p); }
  ExpertsWorkspace workspace(const Problem& p, const ExpertTokens* t) const override { return inner_->workspace(p, t); }
  WeightAndReduce weight_and_reduce() const override { return inner_->weight_and_reduce(); }
  bool supports_chunking() const override { return inner_->supports_chunking(); }
  Determinism determinism() const override { return inner_->determinism(); }
  double estimate_us(const Problem&, const Ceilings&) const override { return g_estimate; }
  Status apply(const ExpertsArgs& args, ExpertsResult& result) const override { return inner_->apply(args, result); }

 private:
  std::unique_ptr<Experts> inner_;
  bool own_format_;
};

/// The fastest for one token alone.
class FastWhenSmall final : public Estimating {
 public:
  explicit FastWhenSmall(const MakeContext& context) : Estimating("reference", context, false) {}
  std::string_view name() const override { return "small"; }
  double estimate_us(const Problem& p, const Ceilings&) const override { return p.size.M == 1 ? 0 : 1e9; }
};

const Candidate* find(const BucketPlan& bucket, std::string_view stage, std::string_view name) {
  for (const Candidate& candidate : bucket.candidates)
    if (candidate.stage == stage && candidate.name == name) return &candidate;
  return nullptr;
}

/// `name` was asked, not taken, and the reason contains `text`.
void expect_refused(const Plan& plan, std::string_view stage, std::string_view name, std::string_view text) {
  for (const BucketPlan& bucket : plan.buckets()) {
    const Candidate* candidate = find(bucket, stage, name);
    ASSERT_NE(candidate, nullptr) << plan.explain(bucket.max_tokens);
    EXPECT_FALSE(candidate->chosen);
    EXPECT_NE(candidate->reason.find(text), std::string::npos) << candidate->reason;
    EXPECT_NE(plan.explain(bucket.max_tokens).find(name), std::string::npos);
  }
}

std::string error_of(const LayerConfig& config, const PlanOptions& options) {
  try {
    (void)Plan::create({}, config, options);
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

TEST(plan_entry, that_is_fastest_for_few_tokens_does_not_break_batch_invariance) {
  const ExpertsEntry entries[] = {
      {"small", [](const MakeContext& c) -> std::unique_ptr<Experts> { return std::make_unique<FastWhenSmall>(c); },
       nullptr}};
  LayerConfig config = small_config();
  config.shared.intermediate = 24;
  PlanOptions options;
  options.extra_experts = entries, options.max_tokens = 64;
  EXPECT_EQ(Plan::create({}, config, options).bucket(1).experts, "small");
  options.determinism = Determinism::batch_invariant;
  const Plan plan = Plan::create({}, config, options);
  for (const BucketPlan& bucket : plan.buckets()) {
    EXPECT_EQ(bucket.experts, plan.bucket(64).experts);
    EXPECT_EQ(bucket.router, plan.bucket(64).router);
  }
  ASSERT_NE(plan.bucket(64).experts, "small");
  EXPECT_NE(find(plan.bucket(1), "experts", "small")->reason.find("batch_invariant: "), std::string::npos);
  for (const Candidate& candidate : plan.bucket(1).candidates)
    if (candidate.stage == "shared experts") EXPECT_NE(candidate.name, "small");
}

TEST(plan_entry, that_makes_nothing_is_a_refused_candidate) {
  const ExpertsEntry experts[] = {{"hollow", [](const MakeContext&) { return std::unique_ptr<Experts>(); }, nullptr},
                                  {"unmade", nullptr, nullptr}};
  const PrepareFinalizeEntry dispatchers[] = {
      {"hollow_engine", [](const MakeContext&) { return std::unique_ptr<PrepareFinalize>(); },
       ActivationFormat::standard},
      {"unmade_engine", nullptr, ActivationFormat::batched_experts}};
  const RouterEntry routers[] = {{"hollow_router", [] { return std::unique_ptr<Router>(); }, nullptr},
                                 {"unmade_router", nullptr, nullptr}};
  LayerConfig config = small_config();
  for (std::int64_t shared : {0, 24}) {
    config.shared.intermediate = shared;
    PlanOptions options;
    options.extra_experts = experts, options.extra_prepare_finalize = dispatchers, options.extra_routers = routers;
    const Plan plan = Plan::create({}, config, options);
    for (const char* name : {"hollow", "unmade"}) expect_refused(plan, "experts", name, "make");
    for (const char* name : {"hollow_engine", "unmade_engine"}) expect_refused(plan, "prepare_finalize", name, "make");
    for (const char* name : {"hollow_router", "unmade_router"}) expect_refused(plan, "router", name, "make");
  }
}

TEST(plan_entry, that_makes_nothing_and_is_forced_is_an_error_with_the_reason) {
  const PrepareFinalizeEntry dispatchers[] = {{"hollow_engine",
                                               [](const MakeContext&) { return std::unique_ptr<PrepareFinalize>(); },
                                               ActivationFormat::standard}};
  const RouterEntry routers[] = {{"hollow_router", [] { return std::unique_ptr<Router>(); }, nullptr}};
  PlanOptions options;
  options.extra_prepare_finalize = dispatchers;
  options.prepare_finalize = "hollow_engine";
  EXPECT_NE(error_of(small_config(), options).find("hollow_engine: makes nothing"), std::string::npos)
      << error_of(small_config(), options);
  options = {};
  options.extra_routers = routers;
  options.router = "hollow_router";
  EXPECT_NE(error_of(small_config(), options).find("hollow_router: makes nothing"), std::string::npos)
      << error_of(small_config(), options);
}

TEST(plan_entry, a_dispatcher_that_speaks_another_format_than_its_entry_is_refused) {
  const PrepareFinalizeEntry dispatchers[] = {{"liar",
                                               [](const MakeContext& c) {
                                                 for (const PrepareFinalizeEntry& entry :
                                                      prepare_finalize_implementations())
                                                   if (entry.format == ActivationFormat::standard) return entry.make(c);
                                                 return std::unique_ptr<PrepareFinalize>();
                                               },
                                               ActivationFormat::batched_experts}};
  PlanOptions options;
  options.extra_prepare_finalize = dispatchers;
  expect_refused(Plan::create({}, small_config(), options), "prepare_finalize", "liar", "standard");
}

TEST(plan_entry, whose_estimate_cannot_be_compared_is_refused_and_never_chosen) {
  const ExpertsEntry experts[] = {{"estimating",
                                   [](const MakeContext& c) -> std::unique_ptr<Experts> {
                                     if (c.batched) return nullptr;
                                     return std::make_unique<Estimating>("reference", c, false);
                                   },
                                   nullptr}};
  PlanOptions options;
  options.extra_experts = experts;
  for (double wrong : {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity(),
                       -std::numeric_limits<double>::infinity(), -1.0}) {
    g_estimate = wrong;
    expect_refused(Plan::create({}, small_config(), options), "experts", "estimating", "estimate");
  }
  options.experts = "estimating";
  EXPECT_NE(error_of(small_config(), options).find("estimate"), std::string::npos);
  g_estimate = 0;  // can be compared
  EXPECT_EQ(Plan::create({}, small_config(), options).bucket(1).experts, "estimating");
}

double g_router_estimate = 0;
class EstimatingRouter final : public Router {
 public:
  std::string_view name() const override { return "estimating_router"; }
  Verdict supports(const RouteProblem&) const override { return Verdict::yes(); }
  double estimate_us(const RouteProblem&, const Ceilings&) const override { return g_router_estimate; }
  Status route(const RouteArgs&) const override { return {}; }
};

TEST(plan_entry, a_router_whose_estimate_cannot_be_compared_is_refused) {
  const RouterEntry routers[] = {
      {"estimating_router", []() -> std::unique_ptr<Router> { return std::make_unique<EstimatingRouter>(); }, nullptr}};
  PlanOptions options;
  options.extra_routers = routers;
  for (double wrong : {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity(), -0.5}) {
    g_router_estimate = wrong;
    expect_refused(Plan::create({}, small_config(), options), "router", "estimating_router", "estimate");
  }
}

TEST(plan_entry, that_is_not_available_is_never_made) {
  const ExpertsEntry experts[] = {{"elsewhere",
                                   [](const MakeContext&) {
                                     ++g_makes;
                                     return std::unique_ptr<Experts>();
                                   },
                                   [] { return Verdict::no("runs on another planet"); }}};
  PlanOptions options;
  options.extra_experts = experts;
  g_makes = 0;
  expect_refused(Plan::create({}, small_config(), options), "experts", "elsewhere", "another planet");
  EXPECT_EQ(g_makes, 0);
}

TEST(plan_entry, batched_experts_bring_their_own_pack_format) {
  const ExpertsEntry experts[] = {{"estimating",
                                   [](const MakeContext& c) -> std::unique_ptr<Experts> {
                                     if (!c.batched) return nullptr;
                                     return std::make_unique<Estimating>("naive_batched", c, true);
                                   },
                                   nullptr}};
  PlanOptions options;
  options.extra_experts = experts;
  options.prepare_finalize = "single_rank_batched";
  options.max_tokens = 16;
  g_estimate = 0;
  const Plan plan = Plan::create({}, small_config(), options);
  EXPECT_EQ(plan.pack_format().id(), "own");
  EXPECT_EQ(plan.bucket(1).experts, "estimating");
}

}  // namespace
}  // namespace moekit
