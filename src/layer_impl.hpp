// One forward of a layer, step by step.
#pragma once
#include <vector>

#include <moekit/layer.hpp>

#include "plan_impl.hpp"
#include "weights_impl.hpp"

namespace moekit::inline v0 {

struct Layer::Impl {
  Plan plan;
  Weights weights;
  std::vector<std::shared_ptr<const ModularKernel>> kernels;  // one per bucket of the plan
};

/// What one call carries between its steps. Lives on the stack; allocates nothing.
class LayerCall {
 public:
  LayerCall(const Layer::Impl& layer, const LayerInput& in, LayerOutput& out, const CallContext& context);

  Status check();        ///< everything that can be wrong with the arguments; nothing is written before it has passed
  Status leave_empty();  ///< M = 0: finalised, nothing to compute
  Status cut();          ///< the workspace
  Status route();        ///< ids and weights, from the caller, the logits or the layer's own router GEMM
  Status run_kernel();
  Status finish();  ///< shared experts added once in f32; tail; rows beyond num_valid become 0
  std::int64_t num_tokens() const { return num_tokens_; }

 private:
  Status check_tensor(const Tensor& tensor, const char* what, std::int64_t columns, bool any_float) const;
  Status check_routing();
  Status check_output();
  Status check_tail();
  Status check_overlaps() const;                     ///< among what the call reads and writes
  Status check_workspace(std::size_t needed) const;  ///< of those with the workspace
  Tensor valid(const Tensor& tensor) const { return tensor.slice_rows(0, num_valid_); }
  Status finish_tail() const;

  const Layer::Impl& layer_;
  const Plan::Impl& plan_;
  const Weights::Impl& weights_;
  const LayerInput& in_;
  LayerOutput& out_;
  CallContext context_;
  std::int64_t num_tokens_ = 0;
  std::int64_t num_valid_ = 0;  ///< rows that are computed
  std::int64_t top_k_ = 0;
  bool open_ = false;  ///< left to the caller
  const Plan::Impl::Bucket* bucket_ = nullptr;
  const ModularKernel* kernel_ = nullptr;
  LayerScratch scratch_{};
  Routing routing_{};
  KernelOutput result_{};
};

}  // namespace moekit::inline v0
