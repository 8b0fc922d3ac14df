#include "plan_problem.hpp"

#include <algorithm>

namespace moekit::inline v0 {

Problem routed_problem(const Plan::Impl& plan, std::int64_t tokens) {
  const LayerConfig& config = plan.config;
  Problem problem;
  problem.device = plan.device;
  problem.size = {config.num_experts, tokens, config.w1_rows(), config.hidden, config.top_k};
  problem.num_experts = config.num_experts;
  problem.weights = plan.spec;
  problem.quant = config.quant;
  problem.activation = config.activation;
  problem.activation.layout = GateLayout::halves;  // packs put gate and up where kernels want them
  problem.hidden_dtype = config.dtype;
  problem.out_dtype = plan.options.expert_out_dtype;
  problem.determinism = plan.options.determinism;
  problem.weight_on_input = config.router.weight_on_input;
  problem.threads = plan.executor->concurrency();
  return problem;
}

Problem shared_problem(const Plan::Impl& plan, std::int64_t tokens) {
  const LayerConfig& config = plan.config;
  Problem problem = routed_problem(plan, tokens);
  problem.size = {1, tokens, plan.shared_spec.w1_rows(), config.hidden, 1};
  problem.num_experts = 1;
  problem.weights = plan.shared_spec;
  problem.quant.w1 = plan.shared_spec.w1;
  problem.quant.w2 = plan.shared_spec.w2;
  if (!config.shared.quantised) problem.quant.a1 = problem.quant.a2 = {config.dtype, {}};
  problem.activation = config.shared.activation;
  problem.activation.layout = GateLayout::halves;
  problem.weight_on_input = false;
  problem.out_dtype = DType::f32;  // added to the routed sum in f32
  return problem;
}

double floor_us(const Problem& p, const Ceilings& ceilings) {
  const double experts = static_cast<double>(p.size.L), k = static_cast<double>(std::min(p.size.k, p.size.L));
  const double rows = static_cast<double>(p.size.M);
  const double hit = experts * (1 - std::pow(1 - k / experts, rows));  // expected, uniform routing
  const double weights = static_cast<double>(p.size.N * p.size.K + p.size.K * p.weights.intermediate);
  const double bytes =
      hit * weights * bits(p.weights.w1.type) / 8 + 2 * rows * static_cast<double>(p.size.K) * bits(p.hidden_dtype) / 8;
  const double operations = 2 * rows * static_cast<double>(p.size.k) * weights;
  const bool int8 = p.quant.a1.type == DType::i8;
  const double peak =
      int8 ? ceilings.int8_gops
           : std::max(ceilings.f32_gflops, p.weights.w1.type == DType::bf16 ? ceilings.bf16_dot_gflops : 0.0);
  const double read_us = ceilings.read_gbps > 0 ? bytes / ceilings.read_gbps * 1e-3 : 0;
  const double compute_us = peak > 0 ? operations / peak * 1e-3 : 0;
  return std::max(read_us, compute_us);
}

}  // namespace moekit::inline v0
