// What every consumer project builds and runs: headers, library and version agree, and a layer computes.
#include <moekit/kit/workspace.hpp>
#include <moekit/moekit.hpp>

#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

int main() try {
  using namespace moekit;
  if (version() != std::string(MOEKIT_CONSUMER_EXPECTS)) throw Error(StatusCode::internal, "the versions differ");
  constexpr std::int64_t E = 4, K = 64, I = 32;
  const std::vector<float> w1(E * 2 * I * K, 1.0f / K), w2(E * K * I, 1.0f / I), x(K, 1.0f), weight{0.25f, 0.5f};
  const std::vector<std::int32_t> ids{3, 0};
  std::vector<float> y(K, -1.0f);

  LayerConfig config{.num_experts = E, .top_k = 2, .hidden = K, .intermediate = I, .dtype = DType::f32};
  config.router.source = RouterSource::external;
  const Plan plan = Plan::create(Device{}, config, {.max_tokens = 1});
  const Layer layer(plan, Weights::pack(plan, Tensor(w1.data(), DType::f32, {E, 2 * I, K}),
                                        Tensor(w2.data(), DType::f32, {E, K, I})));
  WorkspacePool pool;
  CallContext context;
  throw_if_failed(pool.get(0, 0, plan.workspace_bytes(1), context.workspace));
  LayerOutput out{.tensor = Tensor(y.data(), DType::f32, {1, K})};
  const Routing routing{Tensor(ids.data(), DType::i32, {1, 2}), Tensor(weight.data(), DType::f32, {1, 2})};
  throw_if_failed(layer.forward({.hidden = Tensor(x.data(), DType::f32, {1, K}), .routing = routing}, out, context));

  const double expected = 0.75 / (1 + std::exp(-1.0));  // 0.75 silu(1), all f32
  for (float value : y)
    if (!(std::abs(value - expected) < 1e-5)) throw Error(StatusCode::internal, std::to_string(value));
  std::printf("moekit %s: %g\n", version(), y[0]);
  return 0;
} catch (const moekit::Error& error) {
  std::fprintf(stderr, "%s\n", error.status().to_string().c_str());
  return 1;
}
