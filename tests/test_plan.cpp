// Plans: choices with reasons, forcing by name, sizes asked before anything is allocated.
#include <gtest/gtest.h>

#include "support/layers.hpp"

namespace moekit {
namespace {
using testing::small_config;

TEST(plan, every_refusal_and_every_loser_has_a_reason) {
  const Plan plan = Plan::create({}, small_config());
  for (const BucketPlan& bucket : plan.buckets())
    for (const Candidate& candidate : bucket.candidates)
      if (!candidate.chosen) EXPECT_FALSE(candidate.reason.empty()) << candidate.stage << " " << candidate.name;
  const std::string text = plan.explain(1);
  for (const ExpertsEntry& entry : experts_implementations())
    EXPECT_NE(text.find(entry.name), std::string::npos) << entry.name;
}

TEST(plan, forcing_by_name_takes_effect_in_every_bucket) {
  for (const ExpertsEntry& entry : experts_implementations()) {
    if (!testing::runs_here(entry, small_config().dtype)) continue;
    PlanOptions options;
    options.experts = std::string(entry.name);
    options.max_tokens = 64;
    const Plan plan = Plan::create({}, small_config(), options);
    for (const BucketPlan& bucket : plan.buckets()) EXPECT_EQ(bucket.experts, entry.name);
  }
}

TEST(plan, forcing_something_unknown_lists_what_there_is) {
  PlanOptions options;
  options.experts = "cpu.mmx";
  try {
    Plan::create({}, small_config(), options);
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), StatusCode::invalid_argument);
    EXPECT_NE(std::string(error.what()).find("reference"), std::string::npos) << error.what();
  }
}

TEST(plan, forcing_what_cannot_run_is_an_error_with_its_reason_and_never_a_fallback) {
  PlanOptions options;
  options.experts = "reference";
  options.exact_activations = true;
  LayerConfig config = small_config(DType::bf16);
  ASSERT_TRUE(quant_from_names("int8", "", config.quant).ok());
  EXPECT_THROW(Plan::create({}, config, options), Error);
}

TEST(plan, workspace_is_monotone_in_tokens_and_zero_tokens_are_legal) {
  PlanOptions options;
  options.max_tokens = 300;
  const Plan plan = Plan::create({}, small_config(), options);
  std::size_t last = plan.workspace_bytes(0);
  for (std::int64_t m = 1; m <= 300; ++m) {
    const std::size_t bytes = plan.workspace_bytes(m);
    EXPECT_GE(bytes, last) << m;
    last = bytes;
  }
  EXPECT_THROW((void)plan.workspace_bytes(301), Error);
}

TEST(plan, absurd_max_tokens_is_an_error_and_not_a_wrapped_small_number) {
  PlanOptions options;
  options.max_tokens = std::int64_t{1} << 40;
  EXPECT_THROW(Plan::create({}, small_config(), options), Error);
}

TEST(plan, a_fingerprint_tells_plans_with_different_configurations_apart) {
  LayerConfig other = small_config();
  other.activation.kind = ActivationKind::gelu;
  EXPECT_NE(Plan::create({}, small_config()).fingerprint(), Plan::create({}, other).fingerprint());
  EXPECT_EQ(Plan::create({}, small_config()).fingerprint(), Plan::create({}, small_config()).fingerprint());
}

TEST(plan, batch_invariance_can_be_demanded) {
  PlanOptions options;
  options.determinism = Determinism::batch_invariant;
  const Plan plan = Plan::create({}, small_config(DType::bf16), options);
  EXPECT_EQ(plan.features().determinism, Determinism::batch_invariant);
}

TEST(plan, a_cuda_device_is_refused_by_name) {
  try {
    Plan::create({DeviceType::cuda, 0}, small_config());
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), StatusCode::unsupported);
    EXPECT_NE(std::string(error.what()).find("cuda:0"), std::string::npos);
  }
}

}  // namespace
}  // namespace moekit
