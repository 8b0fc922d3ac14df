// Shared experts of a layer: the experts of the list, with one expert that every token passes.
#pragma once
#include <moekit/kit/modular_kernel.hpp>

namespace moekit::inline v0 {

/// hidden [M, K] → output [M, K]: down(act(gate·x, up·x)), times σ(x · gate_vector) if there is one.
class DenseExperts final : public SharedExperts {
 public:
  struct Parts {
    std::shared_ptr<PrepareFinalize> prepare_finalize;
    std::shared_ptr<const Experts> experts;
    Problem problem{};  // one expert, k = 1
    Activation activation{};
    bool sigmoid_gate = false;
  };
  explicit DenseExperts(Parts parts);
  /// The same with weights; `gate_vector` f32 [K] or absent, `quant` or null. All must outlive the result.
  std::shared_ptr<const DenseExperts> bound(const WeightsView& weights, const Tensor& gate_vector,
                                            const QuantConfig* quant) const;

  std::size_t workspace_bytes(std::int64_t max_tokens) const override;
  Status apply(const Tensor& hidden, const Tensor& output, const CallContext& context) const override;
  const Experts& experts() const { return *parts_.experts; }

 private:
  void gate_weights(const Tensor& hidden, float* weights) const;
  Parts parts_;
  ModularKernel kernel_;
  WeightsView weights_{};
  Tensor gate_vector_;
  const QuantConfig* quant_ = nullptr;
};

}  // namespace moekit::inline v0
