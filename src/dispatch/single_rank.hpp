// Dispatchers of one rank: nothing travels, rows are quantised, and finalize sums.
#pragma once
#include <memory>

#include <moekit/kit/implementations.hpp>

namespace moekit::dispatch {

std::unique_ptr<PrepareFinalize> make_single_rank(const MakeContext& context);
std::unique_ptr<PrepareFinalize> make_single_rank_batched(const MakeContext& context);  ///< null without a BatchedShape

}  // namespace moekit::dispatch
