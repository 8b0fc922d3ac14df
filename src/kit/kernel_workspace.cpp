// How one workspace is shared out: engine | shared experts | experts (counts, w13, w2, output).
//
// Unchunked output lies in w13's memory (ExpertsWorkspace says why it may) or, where a NoOp result already has the form
// of the caller's output, in that output; chunks write a buffer of their own behind w2.
#include <algorithm>
#include <cstdint>

#include "kit/kernel_call.hpp"
#include "kit/kernel_workspace.hpp"
#include "tensor_checks.hpp"
#include "text.hpp"

namespace moekit::inline v0 {

Problem ModularKernel::problem_for(std::int64_t rows, std::int64_t top_k) const {
  Problem problem = problem_;
  problem.size = {problem.weights.num_local, rows, problem.weights.w1_rows(), problem.weights.hidden,
                  top_k > 0 ? top_k : problem_.size.k};
  return problem;
}

std::int64_t ModularKernel::chunk_for(std::int64_t rows) const {
  const bool chunks =
      options_.chunk > 0 && problem_.format == ActivationFormat::standard && experts_->supports_chunking();
  return chunks ? std::min(rows, options_.chunk) : rows;
}

std::size_t ModularKernel::workspace_bytes(std::int64_t max_tokens, std::int64_t top_k) const {
  const Problem caller = problem_for(max_tokens, top_k);
  if (max_tokens < 0 || max_tokens > kernel::max_tokens(caller.size))
    throw Error(
        StatusCode::invalid_argument,
        text::concat("[workspace] the bytes for ", max_tokens, " tokens of ", to_string(caller), " do not fit 63 bits"),
        "ask for fewer tokens", "max_tokens");
  const auto rows = [&](std::int64_t tokens) { return prepare_finalize_->max_rows(problem_for(tokens, top_k)); };
  const std::int64_t all = rows(max_tokens);
  WorkspaceCursor experts({});
  kernel::share_experts(experts, *experts_, problem_for(all, top_k), {.chunk = chunk_for(all)});
  WorkspaceCursor open({});
  if (options_.open_max_tokens > 0) {
    const std::int64_t some = rows(std::min(max_tokens, options_.open_max_tokens));
    kernel::share_experts(open, *experts_, problem_for(some, top_k), {.chunk = some});
  }
  WorkspaceCursor all_shares({});
  all_shares.take(prepare_finalize_->workspace_bytes(caller, input_));
  all_shares.take(shared_ ? shared_->workspace_bytes(max_tokens) : 0);
  all_shares.take(std::max(experts.used(), open.used()));
  return all_shares.used();
}

Status ModularKernel::take_workspace(Call& call) const {
  const std::int64_t top_k = call.in.routing.top_k();
  const Problem caller = problem_for(call.num_tokens, top_k);
  if (call.num_tokens > kernel::max_tokens(caller.size))
    return Status(StatusCode::invalid_argument,
                  text::concat("[workspace] ", to_string(caller), " does not fit 63 bits"));
  const std::size_t needed = workspace_bytes(call.num_tokens, top_k);
  Bytes memory = call.context.workspace;
  if (memory.data == nullptr && options_.pool)
    if (Status s = options_.pool->get(call.context.ubatch ? call.context.ubatch->index() : 0, 0, needed, memory);
        !s.ok())
      return s;
  if (memory.size < needed)
    return Status(StatusCode::workspace_too_small,
                  text::concat("[workspace] ", to_string(caller), " needs ", needed, " bytes, got ", memory.size),
                  "ask workspace_bytes(M, k)", "context.workspace");
  if (reinterpret_cast<std::uintptr_t>(memory.data) % kWorkspaceAlignment != 0)
    return Status(StatusCode::invalid_argument,
                  text::concat("[workspace] the workspace must be ", kWorkspaceAlignment, "-byte aligned"), {},
                  "context.workspace");
  const std::pair<const char*, const Tensor*> outside[] = {{"hidden", &call.in.hidden},
                                                           {"routing.ids", &call.in.routing.ids},
                                                           {"routing.weights", &call.in.routing.weights},
                                                           {"output", &call.output},
                                                           {"shared", &call.out.shared}};
  for (const auto& [field, tensor] : outside)
    if (tensors::overlap(*tensor, memory.data, needed))
      return Status(StatusCode::invalid_argument, text::concat("[workspace] ", field, " overlaps the workspace"),
                    "give it memory of its own", field);
  WorkspaceCursor cursor(memory);
  call.engine_share = cursor.take(prepare_finalize_->workspace_bytes(caller, input_));
  call.shared_share = cursor.take(shared_ ? shared_->workspace_bytes(call.num_tokens) : 0);
  call.experts_share = cursor.take(needed - cursor.used());
  return {};
}

namespace kernel {

std::int64_t max_tokens(const ProblemSize& size) {
  // 2^56 bytes at 64 bytes per element of the widest buffer [M, k, N + K]: nothing downstream can wrap
  const double per_token = 64.0 * static_cast<double>(std::max<std::int64_t>(size.k, 1)) *
                           static_cast<double>(std::max<std::int64_t>(size.N + size.K, 1));
  return static_cast<std::int64_t>(0x1p56 / per_token);
}

ExpertsShares share_experts(WorkspaceCursor& cursor, const Experts& experts, const Problem& problem,
                            const ShareOptions& options) {
  const std::int64_t rows = problem.size.M;
  ExpertsShares shares;
  ExpertsWorkspace whole = experts.workspace(problem, options.tokens);
  shares.output = whole.output;
  if (options.chunk >= rows) {
    const Bytes both = cursor.take(std::max(whole.w13_bytes, whole.output.bytes()));
    shares.w13 = {both.data, whole.w13_bytes};
    shares.output_data = both.data;
    shares.w2 = cursor.take(whole.w2_bytes);
  } else {
    Problem chunk = problem;
    chunk.size.M = options.chunk;
    const ExpertsWorkspace part = experts.workspace(chunk);
    shares.counts = cursor.take(static_cast<std::size_t>(problem.weights.num_local) * sizeof(std::int32_t));
    shares.w13 = cursor.take(part.w13_bytes);
    shares.w2 = cursor.take(part.w2_bytes);
    shares.output_data = cursor.take(whole.output.bytes()).data;
  }
  return shares;
}

}  // namespace kernel
}  // namespace moekit::inline v0
