// Every implementation × shapes/edge.txt × every scheme against the oracle, within the derived bound.
// MOEKIT_FULL=1 in the environment compares every row instead of a sample, and takes shapes/models.txt as well.
#include <gtest/gtest.h>

#include <cstdlib>
#include <map>

#include <moekit/testing/experts_suite.hpp>

#include "shapes.hpp"

namespace moekit {
namespace {

using conformance::CheckResult;
using conformance::SuiteOptions;

bool full() { return std::getenv("MOEKIT_FULL") != nullptr; }

std::vector<std::string> lines_of(const char* file, std::int64_t tokens) {
  std::vector<ShapeLine> lines;
  throw_if_failed(read_shapes(std::string(MOEKIT_SOURCE_DIR "/shapes/") + file, lines));
  std::vector<std::string> out;
  for (const ShapeLine& line : lines)
    out.push_back(to_string(line.shape) + " M=" + std::to_string(tokens > 0 ? tokens : line.tokens));
  return out;
}

void run(const SuiteOptions& options, int at_least) {
  std::map<std::string, int> passed;
  for (const CheckResult& r : run_experts_suite(experts_implementations(), options)) {
    EXPECT_TRUE(r.ok) << to_string(r);
    passed[r.implementation] += r.ok && !r.refused;
  }
  EXPECT_GE(passed["reference"], at_least);
}

class ExpertsEdge : public testing::TestWithParam<const char*> {};

TEST_P(ExpertsEdge, every_implementation_is_within_its_bound) {
  SuiteOptions options;
  options.schemes = {GetParam()};
  options.shapes = lines_of("edge.txt", 0);
  options.values_only = true;
  if (full()) options.sampled_rows = 0;
  run(options, static_cast<int>(options.shapes.size()));
}

TEST_P(ExpertsEdge, layers_of_published_models) {
  if (!full()) GTEST_SKIP() << "set MOEKIT_FULL=1 for the layers of shapes/models.txt";
  const std::string scheme = GetParam();
  if (scheme == "f32" || scheme == "f16") GTEST_SKIP() << "published in bf16; twice packed, f32 takes 18 GiB";
  SuiteOptions options;
  options.schemes = {GetParam()};
  options.shapes = lines_of("models.txt", 34);
  options.values_only = true;
  run(options, 1);
}

INSTANTIATE_TEST_SUITE_P(schemes, ExpertsEdge, testing::Values("f32", "bf16", "f16", "int8", "fp8_block128"),
                         [](const auto& instance) { return std::string(instance.param); });

}  // namespace
}  // namespace moekit
