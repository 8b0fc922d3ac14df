// What the steps of one ModularKernel::forward share.
#pragma once
#include <moekit/kit/modular_kernel.hpp>

namespace moekit::inline v0 {

struct ModularKernel::Call {
  Call(const KernelInput& input, KernelOutput& results, const CallContext& with)
      : in(input), out(results), context(with) {}

  const KernelInput& in;
  KernelOutput& out;
  const CallContext& context;

  std::int64_t num_tokens = 0;   // M of the caller
  std::int64_t num_experts = 0;  // P
  Tensor output;                 // where the routed sum goes; absent if the result is left open
  bool leave_open = false;       // asked for and possible for this M
  Bytes engine_share, shared_share, experts_share;

  Dispatched here;
  Routing routing;  // the caller's, or the one that prepare returned
  ExpertsResult result;

  CallContext with(Bytes share) const { return {context.stream, share, context.ubatch}; }
};

}  // namespace moekit::inline v0
