// Any dispatcher with any experts that speak its activation format.
#pragma once
#include <memory>

#include <moekit/kit/experts.hpp>
#include <moekit/kit/prepare_finalize.hpp>
#include <moekit/kit/shared_experts.hpp>
#include <moekit/kit/ubatch.hpp>
#include <moekit/kit/workspace.hpp>

namespace moekit::inline v0 {

struct KernelInput {
  Tensor hidden;    ///< [M, K]; row stride may exceed K
  Routing routing;  ///< [M, k]
  WeightsView weights;
  const QuantConfig* quant = nullptr;  ///< null = unquantised
  Activation activation{};
  std::int64_t num_experts = -1;  ///< -1 = L
  const Tensor* expert_map = nullptr;
  bool weight_on_input = false;  ///< k = 1 only
  bool in_place = false;         ///< write over hidden; ignored when there are shared experts
  bool leave_open = false;       ///< ask for an open result; M = 0 and M > open_max_tokens are finalised all the same
};

struct KernelOutput {
  Tensor output;  ///< in: [M, K] of the caller (unused in place or left open); out: where the routed sum is
  Tensor shared;  ///< in: [M, K] of the caller, when there are shared experts; they write it
  /// out: what the consumer takes over, when leave_open was asked; its tensors lie in the call's workspace. If the
  /// kernel finalised instead (`left_open` is false), open.routed is `output`.
  MoeOutput open;
  bool left_open = false;
};

struct KernelOptions {
  std::int64_t chunk = 0;  ///< rows per experts call; 0 = all at once
  /// Largest M whose call may ask for an open result (such calls are never chunked); 0 = none. Needs a dispatcher and
  /// experts that support it.
  std::int64_t open_max_tokens = 0;
  std::shared_ptr<WorkspacePool> pool{};  ///< used when a call brings no workspace
};

/// prepare → experts → finalize, as DESIGN §4 lists it. Immutable and re-entrant.
class MOEKIT_API ModularKernel {
 public:
  /// Throws Error if the two do not fit: activation formats, the experts' output format against their reduce, the
  /// dispatcher against the experts' input spec for `problem`.
  ModularKernel(std::shared_ptr<PrepareFinalize> prepare_finalize, std::shared_ptr<const Experts> experts,
                std::shared_ptr<const SharedExperts> shared, const Problem& problem, const KernelOptions& options = {});

  /// Bytes that any m ≤ max_tokens rows of the caller, with top_k slots (0 = the problem's) and any routing need.
  std::size_t workspace_bytes(std::int64_t max_tokens, std::int64_t top_k = 0) const;
  /// Does not allocate if the context brings workspace_bytes(M). Nothing has been written when it fails before prepare.
  Status forward(const KernelInput& in, KernelOutput& out, const CallContext& context) const;

  const PrepareFinalize& prepare_finalize() const { return *prepare_finalize_; }
  const Experts& experts() const { return *experts_; }

 private:
  struct Call;  // what one forward carries between its steps
  Status check(Call& call) const;
  Status take_workspace(Call& call) const;
  Status prepare(Call& call) const;
  Status run_experts(Call& call) const;
  Status run_shared(Call& call) const;
  Status leave_open(Call& call) const;
  Status finalize(Call& call) const;
  void check_build();
  Problem problem_for(std::int64_t rows, std::int64_t top_k) const;
  std::int64_t chunk_for(std::int64_t rows) const;  ///< rows per experts call
  std::shared_ptr<PrepareFinalize> prepare_finalize_;
  std::shared_ptr<const Experts> experts_;
  std::shared_ptr<const SharedExperts> shared_;
  Problem problem_;
  InputSpec input_;
  KernelOptions options_;
};

}  // namespace moekit::inline v0
