// y = Σ_j w_j · Expert_j(x) (+ shared(x)), ready to be called.
#pragma once
#include <memory>
#include <variant>

#include <moekit/kit/open_output.hpp>
#include <moekit/plan.hpp>
#include <moekit/weights.hpp>

namespace moekit::inline v0 {

struct LayerInput {
  Tensor hidden{};    ///< [M, K] in the layer's type; row stride may exceed K; read
  Tensor logits{};    ///< [M, E] f32, bf16 or f16; absent = the layer's own router GEMM, or `routing`
  Routing routing{};  ///< ids and weights of the caller (external routing); wins over logits
  const std::int32_t* num_valid = nullptr;  ///< on the device; rows beyond it are not routed and their output is 0
  /// Expert parallelism: equal on all ranks. One rank: absent, 0, or its own M; anything else is an error.
  std::optional<std::int64_t> group_tokens{};
  std::int64_t top_k = 0;  ///< 0 = the layer's; a run-time override needs k ≤ E and workspace for it
};

/// What is written overlaps nothing else of the call, but residual_out may be exactly residual.
/// out = residual' = residual + routed (+ shared); norm = residual' · rsqrt(mean(residual'²) + eps) · gamma.
struct Tail {
  Tensor residual{};  ///< [M, K]; read
  Tensor gamma{};     ///< [K]
  float eps = 1e-6f;
  Tensor norm_out{};      ///< [M, K]; written
  Tensor residual_out{};  ///< [M, K]; written; may be `residual` itself
};

/// Which one is decided at plan time. M = 0 and M above the tail's ceiling are finalised by the layer itself.
struct LayerOutput {
  Tensor tensor{};  ///< OutputKind::tensor: [M, K] in the layer's dtype; may alias nothing but hidden, and hidden only
                    ///< when in_place
  MoeOutput* open =
      nullptr;  ///< OutputKind::open; when the layer finalises instead, `tensor` is written and open->routed is it
  Tail* tail = nullptr;  ///< OutputKind::tail
  bool in_place = false;
};

class MOEKIT_API Layer {
 public:
  Layer(Plan plan, Weights weights);  ///< throws Error if the weights were packed for another plan

  /// @param in      hidden, and logits or routing or neither
  /// @param out     what the plan says; every element is written
  /// @param context stream (on CPU it carries the executor), ubatch, and a workspace of at least
  ///                plan().workspace_bytes(M) bytes, 256-byte aligned; contents undefined before and after, but for the
  ///                control region
  /// @return invalid_argument, invalid_shape, invalid_dtype, workspace_too_small, device_error; nothing has been
  /// written
  ///         when it fails before launch
  /// Does not allocate and takes no lock of its own; calls that share an executor queue there. Safe to call from
  /// several threads with different workspaces.
  Status forward(const LayerInput& in, LayerOutput& out, const CallContext& context) const;
  /// Reports and clears a fault that a device noticed after forward returned.
  Status check() const;

  const Plan& plan() const;
  const Weights& weights() const;

  struct Impl;  // the kernels of every bucket, bound to these weights

 private:
  std::shared_ptr<const Impl> impl_;
};

}  // namespace moekit::inline v0
