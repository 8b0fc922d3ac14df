// What a plan holds beside its description: the chosen objects, one set per token bucket.
#pragma once
#include <moekit/kit/modular_kernel.hpp>
#include <moekit/plan.hpp>

#include "dense_experts.hpp"

namespace moekit::inline v0 {

struct Plan::Impl {
  struct Bucket {
    std::int64_t max_tokens = 0;
    Problem problem{};
    std::shared_ptr<const Router> router;
    std::shared_ptr<PrepareFinalize> prepare_finalize;
    std::shared_ptr<const Experts> experts;
    std::shared_ptr<const DenseExperts> shared;  // unbound: for workspace sizes; null without shared experts
    std::shared_ptr<const ModularKernel> kernel;
    KernelOptions kernel_options{};
    bool may_open = false;  // up to tail_max_tokens tokens the kernel may stop in front of the last reduction
  };

  Device device{};
  LayerConfig config{};
  PlanOptions options{};
  Executor* executor = nullptr;
  Ceilings ceilings{};
  WeightsSpec spec{};
  WeightsSpec shared_spec{};
  const PackFormat* format = nullptr;
  const PackFormat* shared_format = nullptr;
  std::vector<BucketPlan> described;
  std::vector<Bucket> buckets;
  std::uint64_t fingerprint = 0;

  std::size_t bucket_index(std::int64_t num_tokens) const;
};

/// How the layer cuts the part of the workspace that lies in front of the kernel's: the same walk for the size and for
/// the pointers.
struct LayerScratch {
  Tensor logits;          // f32 [M, E], only when the layer runs its own router GEMM
  Tensor ids, weights;    // i32, f32 [M, k]
  Bytes router;           // the router implementation's own
  Tensor routed, shared;  // f32 [M, K], only when they are added by the layer
  Bytes kernel;           // the rest
};
LayerScratch cut_workspace(const Plan::Impl& plan, const Plan::Impl::Bucket& bucket, std::int64_t num_tokens,
                           std::int64_t top_k, WorkspaceCursor& cursor);

/// Fills `described` and `buckets`; throws Error with every refusal when nothing can run.
void choose_implementations(Plan::Impl& plan);
std::string explain_plan(const Plan::Impl& plan, std::int64_t num_tokens);

}  // namespace moekit::inline v0
