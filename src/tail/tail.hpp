// Consumers of an open output: what follows the MoE layer in a model, fused with its last reduction.
#pragma once
#include <moekit/layer.hpp>

namespace moekit::tail {

/// Shapes [rows, columns] and [columns], types, memory, and who overlaps whom: everything that may be wrong with a tail
/// by itself, before work has begun. Fields are "tail.gamma", ….
Status check(const Tail& tail, std::int64_t rows, std::int64_t columns);

/// r = residual + routed_scaling_factor · Σ_j [idx ≥ 0] w_j · gemm2[idx_j] (+ shared), all in f32, slots ascending;
/// residual_out = round(r); norm_out = round(r · rsqrt(mean(r²) + eps) · gamma): the norm reads r before its rounding.
///
/// @param moe   routed [M, K] (finalised: any float type) or an UnfinalizedOutput; shared [M, K] or absent; read
/// @param tail  residual, norm_out, residual_out [M, K], gamma [K], any float types; norm_out aliases nothing,
///              residual_out may be residual
/// Rows in parallel; a row's bits depend on its own inputs alone. Allocates nothing.
Status add_and_norm(const MoeOutput& moe, const Tail& tail, const CallContext& context);

}  // namespace moekit::tail
