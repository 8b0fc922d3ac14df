// A layer that is ready to be called: plan, packed weights, workspace.
#pragma once
#include <string>
#include <vector>

#include <moekit/layer.hpp>

#include "generate.hpp"

namespace moekit::cli {

Device device_from_name(const std::string& name);            ///< throws UsageError
Determinism determinism_from_name(const std::string& name);  ///< throws UsageError
Executor& executor_for(int threads);

/// 256-byte aligned memory.
class Workspace {
 public:
  explicit Workspace(std::size_t size);
  Bytes bytes() const { return {data_, size_}; }

 private:
  std::vector<std::byte> storage_;
  std::byte* data_;
  std::size_t size_;
};

class Session {
 public:
  /// Throws what Plan::create and Weights::pack throw.
  Session(const LayerConfig& config, const PlanOptions& options, const WeightsSource& source);
  const Plan& plan() const { return layer_.plan(); }
  const Layer& layer() const { return layer_; }
  /// out [M, K]; throws Error if forward fails.
  void forward(const LayerInput& in, const Tensor& out);
  /// Fills all of the workspace but the control region with 0xFF.
  void poison();

 private:
  Layer layer_;
  Workspace workspace_;
  Executor* executor_;
};

/// Which implementation the plan runs for that many tokens.
std::string chosen_experts(const Plan& plan, std::int64_t num_tokens);

}  // namespace moekit::cli
