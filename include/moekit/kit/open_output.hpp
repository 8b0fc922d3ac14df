// Outputs whose last reduction is left to the consumer.
#pragma once
#include <span>
#include <variant>

#include <moekit/kit/routing.hpp>

namespace moekit::inline v0 {

/// Experts that stopped after GEMM2. Token t, slot j is row expanded_to_permuted[t, j] of gemm2_permuted.
struct UnfinalizedOutput {
  Tensor gemm2_permuted{};        ///< [rows, K], dense; unweighted; the row count is never referenced
  Tensor expert_weights{};        ///< [M, k], typed as its contents; 1 under weight-on-input
  Tensor expanded_to_permuted{};  ///< i32 [M, k]; -1 = not here
};

/// y[t] = routed_scaling_factor · Σ_j [idx ≥ 0] w[t,j] · gemm2[idx[t,j]] (+ shared[t]), in f32, one rounding.
/// Un-reduced across ranks where the layer is sharded.
struct MoeOutput {
  std::variant<Tensor, UnfinalizedOutput> routed;
  Tensor shared{};                     ///< [M, K] or absent; folded in by whoever finalises
  float routed_scaling_factor = 1.0f;  ///< 1 when already folded into the weights
  bool finalised() const { return std::holds_alternative<Tensor>(routed); }
};

/// What a kernel that may or may not finalise handed back.
struct KernelOutputs {
  std::span<const Tensor> tensors;
  bool is_list = true;  ///< false: a bare tensor (one entry)
};

/// Checks the two layouts and names the clause that fails:
///   finalised: exactly one tensor, bare or a list of one; it must alias `destination` if one was given (shape, type,
///   device, address).
///   deferred: exactly three in a list (GEMM2 output, weights, map) and no destination; GEMM2 rank 2; map i32;
///   num_tokens * top_k weights and map entries, returned as [M, k] views; one device; contiguous; M ≥ 0, k > 0.
MOEKIT_API Status normalize_output(const KernelOutputs& given, bool do_finalize, std::int64_t num_tokens,
                                   std::int64_t top_k, const Tensor& destination,
                                   std::variant<Tensor, UnfinalizedOutput>& out);

/// Closes what a layer left: `output` [M, K] (f32, bf16 or f16, every element is written) becomes what MoeOutput says,
/// slots ascending. For consumers without a fused tail of their own. Rows in parallel; allocates nothing.
MOEKIT_API Status close_output(const MoeOutput& moe, const Tensor& output, const CallContext& context);

}  // namespace moekit::inline v0
