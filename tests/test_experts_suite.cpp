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

INSTANTIATE_TEST_SUITE_P(schemes, ExpertsSuite, testing::Values("f32", "bf16", "f16", "int8", "fp8_block128"),
                         [](const auto& instance) { return std::string(instance.param); });

}  // namespace
}  // namespace moekit
