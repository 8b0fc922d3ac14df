// The experts' step: all rows at once, or chunk by chunk with every row-wise argument sliced alike.
#include <algorithm>

#include "kit/kernel_call.hpp"
#include "kit/kernel_workspace.hpp"
#include "tensor_checks.hpp"
#include "text.hpp"

namespace moekit::inline v0 {
using text::concat;

namespace {

const ExpertTokens* counts_of(const Dispatched& here) {
  return here.tokens && here.tokens->counts.present() ? &*here.tokens : nullptr;
}

/// The static scale of GEMM2's input for rows [begin, end): [1] and [L] pass whole, [rows, 1] is sliced.
Tensor a2_scale(const QuantConfig* quant, std::int64_t begin, std::int64_t end) {
  if (!quant) return {};
  const Tensor& scale = quant->a2_scale();
  const bool by_row = scale.rank == 2 && scale.shape[0] > 1;
  return by_row ? scale.slice_rows(begin, end) : scale;
}

/// Counts of the chunk's own rows; a host copy only where the whole batch had one.
Status recount(const ExpertTokens& all, const Routing& routing, const Tensor* expert_map, Bytes memory,
               ExpertTokens& out) {
  if (all.counts.device.type != DeviceType::cpu)
    return Status(StatusCode::unsupported,
                  concat("[experts] counts on ", to_string(all.counts.device), " cannot be recomputed per chunk here"),
                  "set chunk = 0");
  const std::span counts(reinterpret_cast<std::int32_t*>(memory.data), static_cast<std::size_t>(all.counts.numel()));
  out.counts = Tensor(counts.data(), DType::i32, {all.counts.numel()}, all.counts.device);
  out.host = all.host.empty() ? std::span<const std::int32_t>() : counts;
  return count_expert_tokens(routing.ids, expert_map, counts);
}

Status check_dispatched(const Dispatched& here, const Routing& routing, const Experts& experts,
                        const Tensor* expert_map) {
  if (routing.ids.dtype != DType::i32)
    return Status(StatusCode::invalid_dtype,
                  concat("[experts] ids must be i32 here, the dispatcher left them ", name(routing.ids.dtype)),
                  "dispatchers convert ids and return the routing", "routing.ids");
  if (expert_map && !experts.supports_expert_map())
    return Status(StatusCode::unsupported,
                  concat("[experts] ", experts.name(), " takes no expert map, and the dispatched ids are physical"),
                  "use a dispatcher that returns local ids", "expert_map");
  if (here.activations.data.rank == 3 && !here.tokens)
    return Status(StatusCode::invalid_argument, "[experts] batched rows arrived without counts", "", "tokens");
  return {};
}

Status too_large(const Experts& experts, const Problem& problem, std::size_t needed, std::size_t there) {
  return Status(StatusCode::internal,
                concat("[experts] ", experts.name(), " needs ", needed, " bytes for ", to_string(problem),
                       ", but had asked for ", there),
                "workspace() must be monotone in M and k, and max_rows() an upper bound");
}

/// NoOp results that lie as the caller's output does may be written there at once.
bool may_write_output(const PrepareFinalize& dispatcher, const Experts& experts, const Tensor& caller,
                      const Tensor& hidden, const Tensor& output) {
  return dispatcher.supports_direct_output() && experts.weight_and_reduce() == WeightAndReduce::no_op() &&
         output.rank == 2 && caller.rank == 2 && caller.dtype == output.dtype && caller.shape == output.shape &&
         caller.is_contiguous() && !tensors::overlap(caller, hidden);
}

/// A chunk's own, smaller scratch. The counts may refine it.
Status size_chunk(const Experts& experts, const Problem& problem, ExpertsArgs& args,
                  const kernel::ExpertsShares& shares) {
  const ExpertsWorkspace own = experts.workspace(problem, args.tokens);
  if (own.w13_bytes > shares.w13.size || own.w2_bytes > shares.w2.size)
    return too_large(experts, problem, own.w13_bytes + own.w2_bytes, shares.w13.size + shares.w2.size);
  args.workspace13.size = own.w13_bytes;
  args.workspace2.size = own.w2_bytes;
  return {};
}

}  // namespace

Status ModularKernel::run_experts(Call& call) const {
  const KernelInput& in = call.in;
  const Tensor& rows_in = call.here.activations.data;
  if (rows_in.numel() == 0 || problem_.weights.num_local == 0) {
    const DType type = call.output.present() ? call.output.dtype : problem_.hidden_dtype;
    call.result.output = Tensor(static_cast<void*>(nullptr), type, {0, problem_.weights.hidden}, rows_in.device);
    return {};
  }
  // Batched rows lie with their expert: whoever dispatched them has used the map.
  const bool mapped =
      call.routing.id_space == IdSpace::local || experts_->activation_formats().in == ActivationFormat::batched_experts;
  const Tensor* expert_map = mapped ? nullptr : in.expert_map;
  if (Status s = check_dispatched(call.here, call.routing, *experts_, expert_map); !s.ok()) return s;
  ProblemSize size;
  if (Status s = ProblemSize::from(rows_in, problem_.weights, call.routing.ids, size); !s.ok()) return s;

  const ExpertTokens* counts = counts_of(call.here);
  const Problem problem = problem_for(size.M, size.k);
  const std::int64_t chunk = call.leave_open ? size.M : chunk_for(size.M);
  WorkspaceCursor cursor(call.experts_share);
  const kernel::ExpertsShares shares = kernel::share_experts(cursor, *experts_, problem, {chunk, counts});
  if (!cursor.fits()) return too_large(*experts_, problem, cursor.used(), call.experts_share.size);

  Tensor output = shares.output.on(shares.output_data, rows_in.device);
  if (!call.leave_open && may_write_output(*prepare_finalize_, *experts_, call.output, in.hidden, output))
    output = call.output;
  if (output.shape[0] % size.M != 0 && chunk < size.M)
    return Status(StatusCode::internal, concat("[experts] ", experts_->name(), " cannot be chunked: ", output.shape[0],
                                               " output rows for ", size.M, " rows"));

  const std::int64_t factor = chunk < size.M ? output.shape[0] / size.M : 1;
  for (std::int64_t begin = 0; begin < size.M; begin += chunk) {
    const std::int64_t end = std::min(begin + chunk, size.M);
    const bool whole = chunk == size.M;
    ExpertsArgs args{.output = whole ? output : output.slice_rows(begin * factor, end * factor),
                     .activations = whole ? call.here.activations : call.here.activations.slice_rows(begin, end),
                     .weights = in.weights,
                     .routing = whole ? call.routing : call.routing.slice_rows(begin, end),
                     .activation = in.activation,
                     .num_experts = call.num_experts,
                     .expert_map = in.expert_map,
                     .quant = in.quant,
                     .a2_scale = whole && in.quant ? in.quant->a2_scale() : a2_scale(in.quant, begin, end),
                     .workspace13 = shares.w13,
                     .workspace2 = shares.w2,
                     .tokens = whole && call.here.tokens ? &*call.here.tokens : nullptr,
                     .weight_on_input = in.weight_on_input,
                     .leave_open = call.leave_open,
                     .context = call.with({})};
    ExpertTokens chunk_counts;
    if (!whole) {
      if (counts) {
        if (Status s = recount(*counts, args.routing, expert_map, shares.counts, chunk_counts); !s.ok()) return s;
        args.tokens = &chunk_counts;
      }
      if (Status s = size_chunk(*experts_, problem_for(end - begin, size.k), args, shares); !s.ok()) return s;
    }
    if (Status s = experts_->apply(args, call.result); !s.ok()) return s;
  }
  call.result.output = output;
  if (call.result.open && !call.leave_open)
    return Status(StatusCode::internal,
                  concat("[experts] ", experts_->name(), " left its output open without being asked"));
  return {};
}

}  // namespace moekit::inline v0
