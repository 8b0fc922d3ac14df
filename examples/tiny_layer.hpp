// The layer that the examples of own parts run: 4 experts, k = 2, K = 8, I = 4, f32, every weight a constant.
#pragma once
#include <cmath>
#include <cstdio>
#include <memory>
#include <moekit/moekit.hpp>
#include <numeric>
#include <string>
#include <vector>

inline moekit::LayerConfig tiny_config() {
  moekit::LayerConfig config{.num_experts = 4, .top_k = 2, .hidden = 8, .intermediate = 4, .dtype = moekit::DType::f32};
  config.router.source = moekit::RouterSource::external;
  return config;
}

/// One token, x = 2 in every column, to experts `ids` with weights 0.25 and 0.5. gate · x = up · x = 2, so every column
/// of the result is 0.75 · 2 · silu(2) = 2.64239. Throws moekit::Error.
inline float run_tiny_layer(const moekit::Plan& plan, const std::vector<std::int32_t>& ids) {
  using namespace moekit;
  const std::vector<float> w1(4 * 8 * 8, 0.125f), w2(4 * 8 * 4, 0.25f), x(8, 2.0f), weights = {0.25f, 0.5f};
  std::vector<float> y(8);
  const Layer layer(
      plan, Weights::pack(plan, Tensor(w1.data(), DType::f32, {4, 8, 8}), Tensor(w2.data(), DType::f32, {4, 8, 4})));
  LayerInput in{.hidden = Tensor(x.data(), DType::f32, {1, 8})};
  in.routing = {Tensor(ids.data(), DType::i32, {1, 2}), Tensor(weights.data(), DType::f32, {1, 2})};
  LayerOutput out{.tensor = Tensor(y.data(), DType::f32, {1, 8})};
  std::vector<std::byte> memory(plan.workspace_bytes(1) + kWorkspaceAlignment);
  void* aligned = memory.data();
  std::size_t space = memory.size();
  std::align(kWorkspaceAlignment, plan.workspace_bytes(1), aligned, space);
  throw_if_failed(layer.forward(in, out, {.workspace = {static_cast<std::byte*>(aligned), space}}));
  return y[7];
}

/// Explains the plan, runs the layer; 0 if `part` is listed as chosen and the result is right, else 1.
inline int check_tiny_layer(const moekit::Plan& plan, const std::string& part, const std::vector<std::int32_t>& ids) {
  const std::string why = plan.explain(1);
  const float y = run_tiny_layer(plan, ids);
  std::printf("%s\ny = %g, should be 2.64239\n", why.c_str(), static_cast<double>(y));
  return why.find("* " + part) != std::string::npos && std::abs(y - 2.64239f) < 1e-4f ? 0 : 1;
}

inline float dot(const float* a, const float* b, std::int64_t n) { return std::inner_product(a, a + n, b, 0.0f); }
inline float silu(float x) { return x / (1.0f + std::exp(-x)); }
