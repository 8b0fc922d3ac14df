// The conformance suite over every built-in implementation; a failure prints one line with the worst element.
#include <gtest/gtest.h>

#include <moekit/testing/experts_suite.hpp>

#include <map>

namespace moekit {
namespace {

using conformance::CheckResult;
using conformance::SuiteOptions;

class ExpertsSuite : public testing::TestWithParam<const char*> {};

TEST_P(ExpertsSuite, every_implementation_passes_every_check) {
  SuiteOptions options;
  options.schemes = {GetParam()};
  std::map<std::string, int> passed;
  for (const CheckResult& r : run_experts_suite(experts_implementations(), options)) {
    EXPECT_TRUE(r.ok) << to_string(r);
    passed[r.implementation] += r.ok && !r.refused;
  }
  EXPECT_GT(passed["reference"], 100);
  EXPECT_GT(passed["naive_batched"], 50);
}

std::unique_ptr<Experts> standard_only(const MakeContext& context) {
  return context.batched ? nullptr : experts_implementations().back().make(context);
}

TEST(suite, entries_may_make_nothing_for_rows_that_they_do_not_read) {
  SuiteOptions options{.shapes = {"e4k2h8i8 M=3"}, .schemes = {"f32"}, .values_only = true};
  const ExpertsEntry mine[] = {{"mine", &standard_only, nullptr}};
  const auto results = run_experts_suite(mine, options);
  EXPECT_FALSE(results.empty());
  for (const CheckResult& r : results) EXPECT_TRUE(r.ok && !r.refused) << to_string(r);
  const ExpertsEntry hollow[] = {{"hollow", [](const MakeContext&) { return std::unique_ptr<Experts>(); }, nullptr}};
  EXPECT_THROW((void)run_experts_suite(hollow, options), Error);
}

INSTANTIATE_TEST_SUITE_P(schemes, ExpertsSuite, testing::Values("f32", "bf16", "f16", "int8", "fp8_block128"),
                         [](const auto& instance) { return std::string(instance.param); });

}  // namespace
}  // namespace moekit
