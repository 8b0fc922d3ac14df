// The end of one rank's pipeline: apply the experts' reduce, row by row over the executor.
#pragma once
#include <string_view>

#include <moekit/kit/prepare_finalize.hpp>

namespace moekit::dispatch {

/// Output becomes zero if nothing arrived; otherwise what the reduce says, Delegate meaning Contiguous.
Status reduce_rows(const FinalizeArgs& args, std::string_view engine);
/// Every element 0.
void fill_zero(const Tensor& output);

}  // namespace moekit::dispatch
