// Weights packed for a plan.
#pragma once
#include <functional>
#include <memory>

#include <moekit/kit/pack_format.hpp>
#include <moekit/kit/quant_config.hpp>
#include <moekit/kit/router.hpp>
#include <moekit/plan.hpp>

namespace moekit::inline v0 {

/// The shared expert's matrices: gate and up [S, K], down [K, S], gate_vector [1, K] if it has a sigmoid gate.
struct SharedTensors {
  CanonicalExpert expert{};
  Tensor gate_vector{};
  QuantTensors quant{};  ///< its own static activation scales, each [1], where it is quantised and the scheme has them
};

/// Where the values of a layer come from. Everything is read during pack and may go afterwards.
struct WeightsSource {
  /// Gives expert `e`, 0 ≤ e < E. Called once per expert, in ascending order.
  std::function<Status(std::int64_t e, CanonicalExpert& expert)> expert{};
  RouterTensors router{};
  SharedTensors shared{};
  QuantTensors quant{};  ///< static activation scales of the routed experts: a1_scale [1], a2_scale [1] or [E]
};

/// Immutable but for replace_expert; shareable between layers and threads. Peak memory while packing: the packed bytes
/// plus one expert.
class MOEKIT_API Weights {
 public:
  /// Throws Error: a tensor that does not fit names the expert, the tensor, both shapes.
  static Weights pack(const Plan& plan, const WeightsSource& source);
  /// From stacked tensors: w1 [E, N, K] (gate rows first, or interleaved as the activation says), w2 [E, K, I].
  static Weights pack(const Plan& plan, const Tensor& w1, const Tensor& w2, const WeightsSource& rest = {});

  WeightsView view() const;
  std::size_t bytes() const;
  std::uint64_t plan_fingerprint() const;
  /// Re-packs one slot. No forward that reads the slot may be running.
  void replace_expert(std::int64_t slot, const CanonicalExpert& expert);

  struct Impl;
  const Impl& impl() const { return *impl_; }

 private:
  std::shared_ptr<Impl> impl_;
};

}  // namespace moekit::inline v0
