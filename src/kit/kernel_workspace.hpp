// The experts' share of a kernel's workspace: counted and handed out by the same function.
#pragma once
#include <moekit/kit/experts.hpp>
#include <moekit/kit/workspace.hpp>

namespace moekit::inline v0::kernel {

struct ShareOptions {
  std::int64_t chunk = 0;                ///< rows per call; ≥ problem.size.M: one call
  const ExpertTokens* tokens = nullptr;  ///< of all rows; may refine the sizes
};

struct ExpertsShares {
  Bytes counts, w13, w2;  ///< counts: i32 [L], where the call is chunked
  TensorSpec output;
  void* output_data = nullptr;
};

/// Takes what the experts need for problem.size.M rows in calls of `options.chunk` rows.
ExpertsShares share_experts(WorkspaceCursor& cursor, const Experts& experts, const Problem& problem,
                            const ShareOptions& options);

/// The most tokens whose buffers can be counted in 63 bits.
std::int64_t max_tokens(const ProblemSize& size);

}  // namespace moekit::inline v0::kernel
