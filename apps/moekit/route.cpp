#include "route.hpp"

#include "session.hpp"

namespace moekit::cli {
namespace {

RouteProblem problem_of(const LayerConfig& config, std::int64_t num_tokens) {
  return {Device{}, num_tokens, config.num_experts, config.top_k, config.router};
}

}  // namespace

Buffer router_logits(const Tensor& hidden, const RouterTensors& tensors, std::int64_t num_experts) {
  Buffer out(DType::f32, {hidden.shape[0], num_experts});
  throw_if_failed(router_gemm(hidden, tensors.weight, out.tensor, {}));
  return out;
}

Verdict router_verdict(const RouterEntry& entry, const LayerConfig& config, std::int64_t num_tokens) {
  if (Verdict here = entry.available(); !here.ok()) return here;
  return entry.make()->supports(problem_of(config, num_tokens));
}

RoutingRows route_with(const std::string& name, const Tensor& logits, const LayerConfig& config,
                       const RouterTensors& tensors) {
  for (const RouterEntry& entry : router_implementations()) {
    if (entry.name != name) continue;
    const std::int64_t M = logits.shape[0];
    if (Verdict verdict = router_verdict(entry, config, M); !verdict.ok())
      throw Error(StatusCode::unsupported, "[router] " + name + ": " + verdict.reason(), "");
    const auto router = entry.make();
    RoutingRows out{Buffer(DType::i32, {M, config.top_k}), Buffer(DType::f32, {M, config.top_k})};
    Workspace workspace(router->workspace_bytes(problem_of(config, M)));
    RouteArgs args;
    args.logits = logits;
    args.config = &config.router;
    args.tensors = &tensors;
    args.ids = out.ids.tensor;
    args.weights = out.weights.tensor;
    args.context.workspace = workspace.bytes();
    throw_if_failed(router->route(args));
    return out;
  }
  throw Error(StatusCode::internal, "[router] the plan chose " + name + ", which is not in the list", "");
}

}  // namespace moekit::cli
