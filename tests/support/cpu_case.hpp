// One call of an experts implementation with its data, and the same in a plain loop of f64: for the close-up tests of
// the CPU experts. Shares no code with the library but the scalar conversions and the definition of quantisation.
#pragma once
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include <moekit/kit/implementations.hpp>

#include "quant/quantise.hpp"
#include "support/random.hpp"
#include "text.hpp"

namespace moekit::testing {

struct CaseSpec {
  std::int64_t E = 3, k = 2, M = 5, K = 33, I = 17;
  DType hidden = DType::f32;
  DType weights = DType::f32;
  bool quantised_activations = false;  ///< int8 or e4m3 weights
  DType output = DType::f32;
  Activation activation{};
  bool bias = false;
  bool weight_on_input = false;
  std::int64_t row_padding = 0;  ///< of activations and output, elements
  std::uint64_t seed = 1;
  float int8_divisor = 127.0f;
  bool batched = false;  ///< rows of expert e: as many as were routed to it
  int minus_one_percent = 0;
};

inline std::string to_string(const CaseSpec& s) {
  return text::concat("E=", s.E, " k=", s.k, " M=", s.M, " K=", s.K, " I=", s.I, " hidden=", name(s.hidden),
                      " weights=", name(s.weights), s.quantised_activations ? " quantised" : "",
                      " out=", name(s.output), " act=", moekit::to_string(s.activation), s.bias ? " bias" : "",
                      s.batched ? " batched" : "", " seed=", s.seed);
}

/// Owns everything that a call points at.
struct Case {
  explicit Case(const CaseSpec& wanted);
  Problem problem(int threads) const;
  /// Packs the weights as `format` wants them.
  WeightsView packed(const PackFormat& format, std::vector<std::byte>& storage) const;
  /// Applies with poisoned workspaces of exactly the size asked for, guarded on both sides, and a poisoned output.
  std::vector<float> run(const Experts& experts, Executor& executor) const;
  /// [M, K] (or [E, rows, K]) in f64: no rounding but those of the scheme.
  std::vector<double> reference() const;
  /// Σ of magnitudes that went into every element of reference(): what errors are relative to.
  std::vector<double> magnitude;

  CaseSpec s;
  QuantSpec quant;
  std::int64_t N = 0, T = 0;  ///< T: rows an expert can have, batched
  std::vector<std::byte> x, gate, up, down;
  std::vector<float> x_scale, gate_scale, up_scale, down_scale, gate_bias, up_bias, down_bias;
  std::vector<std::int32_t> ids, counts;
  std::vector<float> weights;
  std::int64_t a_groups = 0;

  std::int64_t rows() const { return s.batched ? s.E * T : s.M; }
  std::int64_t groups(std::int64_t n) const { return s.weights == DType::e4m3 ? (n + 127) / 128 : 1; }
  bool codes() const { return s.quantised_activations; }
  double input(std::int64_t row, std::int64_t c) const;
  double weight(const std::vector<std::byte>& m, const std::vector<float>& scale, std::int64_t cols, std::int64_t r,
                std::int64_t c) const;
  void route_output(std::int64_t e, std::int64_t row, std::vector<double>& y, std::vector<double>& size) const;
  CanonicalExpert expert(std::int64_t e) const;
};

}  // namespace moekit::testing
