// Small layers with known weights, and the memory to run them in.
#pragma once
#include <cmath>
#include <cstring>
#include <vector>

#include <moekit/kit/implementations.hpp>
#include <moekit/layer.hpp>

#include "quant/numeric.hpp"
#include "support/random.hpp"

namespace moekit::testing {

/// 256-byte-aligned bytes between two red zones, filled with 0xFF (NaN in every float type, -1 in every integer).
class Guarded {
 public:
  explicit Guarded(std::size_t size) : size_(size), memory_(size + 3 * kZone, std::byte{0xff}) {
    const auto address = reinterpret_cast<std::uintptr_t>(memory_.data()) + kZone;
    offset_ = (address + 255) / 256 * 256 - reinterpret_cast<std::uintptr_t>(memory_.data());
  }
  std::byte* data() { return memory_.data() + offset_; }
  std::size_t size() const { return size_; }
  Bytes bytes() { return {data(), size_}; }
  bool intact() const {
    for (std::size_t i = 0; i < memory_.size(); ++i)
      if ((i < offset_ || i >= offset_ + size_) && memory_[i] != std::byte{0xff}) return false;
    return true;
  }

 private:
  static constexpr std::size_t kZone = 512;
  std::size_t size_, offset_ = 0;
  std::vector<std::byte> memory_;
};

/// Whether this machine has an implementation that takes rows and weights of `dtype`: the dot units are for bf16 alone.
inline bool runs_here(const ExpertsEntry& entry, DType dtype) {
  if (entry.available && !entry.available()) return false;
  return !entry.name.ends_with(".avx512_bf16") || dtype == DType::bf16;
}

inline LayerConfig small_config(DType dtype = DType::f32) {
  LayerConfig config;
  config.num_experts = 8, config.top_k = 2, config.hidden = 40, config.intermediate = 24, config.dtype = dtype;
  config.quant = QuantSpec::plain(dtype);
  config.router.renormalise = true;
  return config;
}

/// Values of a layer, f32, seeded; views for Weights::pack.
struct LayerValues {
  std::vector<float> w1, w2, router, bias1, bias2, shared1, shared2, shared_gate;
  LayerConfig config;

  explicit LayerValues(const LayerConfig& c, std::uint64_t seed = 1) : config(c) {
    Random random(seed);
    const std::int64_t K = c.hidden, I = c.intermediate, N = c.w1_rows(), S = c.shared.intermediate;
    fill(w1, c.num_experts * N * K, 1 / std::sqrt(static_cast<float>(K)), random);
    fill(w2, c.num_experts * K * I, 1 / std::sqrt(static_cast<float>(I)), random);
    fill(router, c.num_experts * K, 1, random);
    fill(bias1, c.num_experts * N, 0.3f, random);
    fill(bias2, c.num_experts * K, 0.3f, random);
    fill(shared1, 2 * S * K, 1 / std::sqrt(static_cast<float>(K)), random);
    fill(shared2, K * S, 1, random);
    fill(shared_gate, K, 1, random);
  }

  WeightsSource source() const {
    WeightsSource out;
    const std::int64_t K = config.hidden, I = config.intermediate, S = config.shared.intermediate;
    out.expert = [this](std::int64_t e, CanonicalExpert& expert) {
      fill_expert(e, expert);
      return Status();
    };
    out.router.weight = Tensor(router.data(), DType::f32, {config.num_experts, K});
    if (S > 0) {
      out.shared.expert.gate = Tensor(shared1.data(), DType::f32, {S, K});
      out.shared.expert.up = Tensor(shared1.data() + S * K, DType::f32, {S, K});
      out.shared.expert.down = Tensor(shared2.data(), DType::f32, {K, S});
      if (config.shared.sigmoid_gate) out.shared.gate_vector = Tensor(shared_gate.data(), DType::f32, {1, K});
    }
    (void)I;
    return out;
  }

 private:
  static void fill(std::vector<float>& out, std::int64_t n, float scale, Random& random) {
    out.resize(static_cast<std::size_t>(n));
    for (float& value : out) value = random.normal() * scale;
  }
  void fill_expert(std::int64_t e, CanonicalExpert& expert) const {
    const std::int64_t K = config.hidden, I = config.intermediate, N = config.w1_rows();
    const float* rows = w1.data() + e * N * K;
    if (config.activation.gated) expert.gate = Tensor(rows, DType::f32, {I, K});
    expert.up = Tensor(rows + (config.activation.gated ? I * K : 0), DType::f32, {I, K});
    expert.down = Tensor(w2.data() + e * K * I, DType::f32, {K, I});
    if (config.w1_bias && config.activation.gated) expert.gate_bias = Tensor(bias1.data() + e * N, DType::f32, {I});
    if (config.w1_bias)
      expert.up_bias = Tensor(bias1.data() + e * N + (config.activation.gated ? I : 0), DType::f32, {I});
    if (config.w2_bias) expert.down_bias = Tensor(bias2.data() + e * K, DType::f32, {K});
  }
};

/// Every weight of a matrix the same, so that y = Σ_j w_j · d·u·a·silu(g·a) in every column for rows of value a: a
/// dropped tail, a wrong half or a missed expert shows as a wrong number.
struct FlatLayer {
  std::vector<float> gate, up, down;  // per expert
  WeightsSource source(const LayerConfig& config) {
    const std::int64_t K = config.hidden, I = config.intermediate;
    storage.assign(static_cast<std::size_t>(3 * K * I), 0);
    WeightsSource out;
    out.expert = [this, K, I](std::int64_t e, CanonicalExpert& expert) {
      const auto at = static_cast<std::size_t>(e);
      const auto n = static_cast<std::size_t>(K * I);
      std::fill_n(storage.begin(), n, gate[at] / static_cast<float>(K));
      std::fill_n(storage.begin() + static_cast<std::ptrdiff_t>(n), n, up[at] / static_cast<float>(K));
      std::fill_n(storage.begin() + static_cast<std::ptrdiff_t>(2 * n), n, down[at] / static_cast<float>(I));
      expert.gate = Tensor(storage.data(), DType::f32, {I, K});
      expert.up = Tensor(storage.data() + n, DType::f32, {I, K});
      expert.down = Tensor(storage.data() + 2 * n, DType::f32, {K, I});
      return Status();
    };
    return out;
  }
  static double value(double a, double g = 1, double u = 1, double d = 1) {
    return d * u * a * (g * a / (1 + std::exp(-g * a)));
  }
  std::vector<float> storage;
};

}  // namespace moekit::testing
