// What happens in one forward, in the order in which it happens. Checks are in kernel_check.cpp, memory in
// kernel_workspace.cpp, slices in chunking.cpp.
#include "kit/kernel_call.hpp"

namespace moekit::inline v0 {

namespace {

bool overlapping(const UbatchContext* ubatch) { return ubatch && ubatch->enabled(); }

/// The wire. With overlap the next micro-batch waits for it, and this one has its turn again when that is done.
template <class T>
Status await(Pending<T>& pending, UbatchContext* ubatch) {
  if (!pending.has_hook()) return {};
  if (!overlapping(ubatch)) return pending.run_hook();
  if (Status s = ubatch->register_recv_hook(pending.hook_function(), pending.state()); !s.ok()) return s;
  Status status = ubatch->yield();
  if (!status.ok()) ubatch->drop_recv_hook(pending.state());  // the result is abandoned: nobody may wait for it
  return status;
}

}  // namespace

Status ModularKernel::forward(const KernelInput& in, KernelOutput& out, const CallContext& context) const {
  Call call(in, out, context);
  if (Status s = check(call); !s.ok()) return s;        // nothing has been written yet
  if (Status s = prepare(call); !s.ok()) return s;      // quantise + dispatch; async engines wait in here
  if (Status s = run_experts(call); !s.ok()) return s;  // [0, K] if nothing arrived; chunked when asked
  if (call.result.open) return leave_open(call);        // the consumer closes the reduction
  return finalize(call);                                // combine; may be a collective, so it always runs
}

Status ModularKernel::prepare(Call& call) const {
  const KernelInput& in = call.in;
  UbatchContext* ubatch = call.context.ubatch;
  const PrepareArgs args{.hidden = in.hidden,
                         .routing = in.routing,
                         .num_experts = call.num_experts,
                         .expert_map = in.expert_map,
                         .num_local = problem_.weights.num_local,
                         .weight_on_input = in.weight_on_input,  // the engine weights a copy
                         .input = input_,
                         .quant = in.quant,
                         .context = call.with(call.engine_share)};
  if (!prepare_finalize_->supports_async()) {
    if (Status s = prepare_finalize_->prepare(args, call.here); !s.ok()) return s;
  } else {
    if (ubatch)
      if (Status s = ubatch->maybe_run_recv_hook(); !s.ok()) return s;
    Pending<Dispatched> pending;
    if (Status s = prepare_finalize_->prepare_async(args, pending); !s.ok()) return s;
    if (Status s = await(pending, ubatch); !s.ok()) return s;
    if (Status s = pending.receive(call.here); !s.ok()) return s;
  }
  call.routing = call.here.routing ? *call.here.routing : in.routing;  // for experts and finalize
  return {};
}

Status ModularKernel::finalize(Call& call) const {
  if (!call.output.present())
    return Status(StatusCode::invalid_argument, "[finalize] there is nothing to leave open, and no output was given",
                  "give an output to calls that may have to be finalised", "output");
  const FinalizeArgs args{.output = call.output,
                          .expert_output = call.result.output,
                          .routing = call.routing,
                          .weight_on_input = call.in.weight_on_input,
                          .reduce = experts_->weight_and_reduce(),
                          .handle = call.here.handle,
                          .context = call.with(call.engine_share)};
  if (!prepare_finalize_->supports_async()) {
    if (Status s = prepare_finalize_->finalize(args); !s.ok()) return s;
    if (Status s = run_shared(call); !s.ok()) return s;
  } else {
    Pending<Nothing> pending;
    if (Status s = prepare_finalize_->finalize_async(args, pending); !s.ok()) return s;
    if (Status s = run_shared(call); !s.ok()) return s;  // while the combine is on the wire
    if (Status s = await(pending, call.context.ubatch); !s.ok()) return s;
    Nothing done;
    if (Status s = pending.receive(done); !s.ok()) return s;
  }
  call.out.output = call.output;
  if (call.in.leave_open) call.out.open = {call.output, call.out.shared};
  return {};
}

Status ModularKernel::leave_open(Call& call) const {
  const UnfinalizedOutput& open = *call.result.open;
  const Tensor parts[] = {open.gemm2_permuted, open.expert_weights, open.expanded_to_permuted};
  MoeOutput& out = call.out.open;
  if (Status s = normalize_output({parts}, false, call.num_tokens, call.routing.top_k(), {}, out.routed); !s.ok())
    return s;
  if (Status s = run_shared(call); !s.ok()) return s;
  out.shared = shared_ ? call.out.shared : Tensor();
  out.routed_scaling_factor = 1.0f;  // folded into the weights
  call.out.left_open = true;
  return {};
}

Status ModularKernel::run_shared(Call& call) const {
  return shared_ ? shared_->apply(call.in.hidden, call.out.shared, call.with(call.shared_share)) : Status();
}

}  // namespace moekit::inline v0
