// Logits → expert ids and weights.
#pragma once
#include <string_view>

#include <moekit/config.hpp>
#include <moekit/kit/problem.hpp>
#include <moekit/kit/routing.hpp>

namespace moekit::inline v0 {

/// Values of a router; absent where the config has none. Any float type.
struct RouterTensors {
  Tensor weight{};          ///< [E, K]: the layer's own router GEMM
  Tensor logit_bias{};      ///< [E]
  Tensor selection_bias{};  ///< [E]
};

struct RouteProblem {
  Device device{};
  std::int64_t num_tokens = 0;   ///< the most that will be asked for
  std::int64_t num_experts = 0;  ///< E
  std::int64_t top_k = 0;
  RouterConfig config{};
};

struct RouteArgs {
  Tensor logits{};  ///< [M, E] f32, bf16 or f16; any row stride, 0 included; last stride 1; read
  Tensor hidden{};  ///< [M, K] the layer's input, for routers of yours that want it; may be absent; read
  const RouterConfig* config = nullptr;
  const RouterTensors* tensors = nullptr;
  Tensor ids{};                 ///< out: i32 [M, k]; k = the columns given, which may override the layer's top_k
  Tensor weights{};             ///< out: f32 [M, k]
  std::int64_t num_valid = -1;  ///< rows beyond it get id -1 and weight 0; -1 = all
  bool checked = false;         ///< a NaN logit is an error
  CallContext context{};
};

/// Selection: everything after the logits. Immutable and re-entrant. Ids are in descending order of what chooses.
/// Precision: the reference chooses and weighs in f64 from the logits given. f32 routers choose the same ids where the
/// logits themselves choose (no bias, no top2_sum), and else wherever the deciding values of two experts differ by more
/// than 2^-20 · (3 + max|z| / 2 + E / 256) · max(1, |s|, |c|), those of two groups by more than twice that.
/// Derive your own for RouterSource::custom and hand it in through PlanOptions::extra_routers: `route` then gets the
/// hidden states, the logits where the layer has any (absent otherwise), and must write every id (in [-1, E)) and
/// weight (final: renormalised and scaled) of its rows; rows beyond num_valid get -1 and 0.
class Router {
 public:
  virtual ~Router() = default;
  virtual std::string_view name() const = 0;
  virtual Verdict supports(const RouteProblem& problem) const = 0;
  virtual std::size_t workspace_bytes(const RouteProblem& problem) const {
    (void)problem;
    return 0;
  }
  virtual double estimate_us(const RouteProblem& problem, const Ceilings& ceilings) const = 0;
  virtual Status route(const RouteArgs& args) const = 0;
};

/// logits f32 [M, E] = hidden [M, K] · weightᵀ [K, E], f32 accumulation over the whole K in ascending order whatever M
/// is: batch invariant. Rows in parallel over the executor.
MOEKIT_API Status router_gemm(const Tensor& hidden, const Tensor& weight, const Tensor& logits,
                              const CallContext& context);

/// Ids and weights of a simulated router (config.source == simulated): row `first_token + t` depends on the seed and
/// its own index alone. Weights 1/k.
MOEKIT_API Status simulate_routing(const RouterConfig& config, std::int64_t num_experts, std::int64_t first_token,
                                   const Tensor& ids, const Tensor& weights);

}  // namespace moekit::inline v0
