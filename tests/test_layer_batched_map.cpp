// An expert map with batched experts: the dispatcher uses it, the experts never see it.
#include <gtest/gtest.h>

#include <moekit/kit/implementations.hpp>
#include <moekit/kit/modular_kernel.hpp>

#include "support/layers.hpp"

namespace moekit {
namespace {
using testing::Guarded;
using testing::LayerValues;
using testing::Random;
using testing::small_config;

constexpr std::int64_t kTokens = 9;

Problem mapped_problem(const LayerConfig& config) {
  Problem problem;
  problem.size = {8, kTokens, 48, 40, 2};
  problem.num_experts = 8;
  problem.weights = weights_spec(config, 8);
  problem.quant = config.quant;
  problem.activation = config.activation;
  problem.hidden_dtype = DType::f32;
  problem.expert_map = true;
  return problem;
}

std::vector<float> forward(std::string_view dispatcher, const ExpertsEntry& entry, const Tensor& expert_map) {
  const LayerConfig config = small_config();
  Problem problem = mapped_problem(config);
  MakeContext make;
  if (dispatcher == "single_rank_batched") {
    make.batched = problem.batched = BatchedShape{2 * kTokens, 1};
    problem.format = ActivationFormat::batched_experts;
  }
  std::shared_ptr<PrepareFinalize> engine;
  for (const auto& candidate : prepare_finalize_implementations())
    if (candidate.name == dispatcher) engine = candidate.make(make);
  std::shared_ptr<const Experts> experts = entry.make(make);
  const PackFormat& format = experts->preferred_format(problem.weights);
  const std::size_t stride = (format.bytes(problem.weights) + 255) / 256 * 256;
  Guarded pack(8 * stride);
  const LayerValues values(config);
  for (std::int64_t e = 0; e < 8; ++e) {
    CanonicalExpert expert;
    EXPECT_TRUE(values.source().expert(e, expert).ok());
    EXPECT_TRUE(format.pack_expert(pack.data() + static_cast<std::size_t>(e) * stride, problem.weights, expert).ok());
  }
  const ModularKernel kernel(engine, experts, nullptr, problem);
  Random random(5);
  std::vector<float> x(kTokens * 40), y(kTokens * 40, std::nanf("")), weights(kTokens * 2);
  std::vector<std::int32_t> ids(kTokens * 2);
  for (float& v : x) v = random.normal();
  for (std::size_t i = 0; i < ids.size(); ++i) {
    ids[i] = static_cast<std::int32_t>((5 * i + i / 8) % 9) - 1;
    weights[i] = 0.25f + 0.125f * static_cast<float>(i % 5);
  }
  KernelInput in;
  in.hidden = Tensor(x.data(), DType::f32, {kTokens, 40});
  in.routing = {Tensor(ids.data(), DType::i32, {kTokens, 2}), Tensor(weights.data(), DType::f32, {kTokens, 2})};
  in.weights = {&format, problem.weights, pack.data(), stride};
  in.activation = config.activation;
  in.expert_map = &expert_map;
  KernelOutput out;
  out.output = Tensor(y.data(), DType::f32, {kTokens, 40});
  Guarded workspace(kernel.workspace_bytes(kTokens));
  const Status status = kernel.forward(in, out, {{}, workspace.bytes(), nullptr});
  EXPECT_TRUE(status.ok()) << entry.name << ": " << status.to_string();
  return y;
}

TEST(batched_map, gives_what_standard_experts_give_with_it) {
  std::vector<std::int32_t> map{3, 0, -1, 7, 2, 6, 1, 4};
  const Tensor expert_map(map.data(), DType::i32, {8});
  std::vector<float> wanted;
  for (const ExpertsEntry& entry : experts_implementations())
    if (entry.name == "reference") wanted = forward("single_rank", entry, expert_map);
  ASSERT_FALSE(wanted.empty());
  int asked = 0;
  for (const ExpertsEntry& entry : experts_implementations()) {
    if (!testing::runs_here(entry, DType::f32)) continue;
    MakeContext make;
    make.batched = BatchedShape{2 * kTokens, 1};
    const auto experts = entry.make(make);
    if (!experts || experts->activation_formats().in != ActivationFormat::batched_experts) continue;
    ++asked;
    const std::vector<float> got = forward("single_rank_batched", entry, expert_map);
    for (std::size_t i = 0; i < wanted.size(); ++i)
      ASSERT_NEAR(got[i], wanted[i], 2e-5 * (1 + std::abs(wanted[i]))) << entry.name << " [" << i / 40 << "]";
  }
  EXPECT_GE(asked, 2);
}

}  // namespace
}  // namespace moekit
