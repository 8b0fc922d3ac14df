// One Mixture-of-Experts layer from weights to output. The README quotes the lines between the rulers.
#include <moekit/kit/workspace.hpp>
#include <moekit/moekit.hpp>

#include <cmath>
#include <cstdio>
#include <vector>

namespace {

// Weights for which the answer is known: every gate and up is 1 for x = 1, so every expert gives silu(1) in every
// column.
constexpr std::int64_t E = 8, k = 2, K = 256, I = 128, M = 3;
std::vector<float> w1(E * 2 * I * K, 1.0f / K), w2(E*K*I, 1.0f / I), router(E*K, 0.01f);
std::vector<float> x(M*K, 1.0f), y(M*K, -1.0f);

void forward() {
  using namespace moekit;
  // ----------------------------------------------------------------------------------------------------------------
  LayerConfig config{.num_experts = E, .top_k = k, .hidden = K, .intermediate = I, .dtype = DType::f32};
  config.router.renormalise = true;  // the k weights of a token sum to 1
  const Plan plan = Plan::create(Device{}, config, {.max_tokens = 64});
  const Weights weights =
      Weights::pack(plan, Tensor(w1.data(), DType::f32, {E, 2 * I, K}), Tensor(w2.data(), DType::f32, {E, K, I}),
                    {.router = {.weight = Tensor(router.data(), DType::f32, {E, K})}});
  const Layer layer(plan, weights);

  WorkspacePool pool;
  CallContext context;
  throw_if_failed(pool.get(0, 0, plan.workspace_bytes(64), context.workspace));
  LayerOutput out{.tensor = Tensor(y.data(), DType::f32, {M, K})};
  throw_if_failed(layer.forward({.hidden = Tensor(x.data(), DType::f32, {M, K})}, out, context));
  // ----------------------------------------------------------------------------------------------------------------
  std::printf("%s", plan.explain(M).c_str());
}

}  // namespace

int main() {
  try {
    forward();
  } catch (const moekit::Error& error) {
    std::fprintf(stderr, "%s\n", error.status().to_string().c_str());
    return 1;
  }
  const double expected = 1 / (1 + std::exp(-1.0)), bound = 1e-5;  // silu(1), everything in f32
  for (float value : y)
    if (!(std::abs(value - expected) < bound)) {
      std::fprintf(stderr, "expected %g, got %g\n", expected, value);
      return 1;
    }
  std::printf("y = %.4f, silu(1) = %.4f\n", y[0], expected);
  return 0;
}
