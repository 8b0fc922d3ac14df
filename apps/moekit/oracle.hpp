// y = Σ_j w_j · Expert_j(x) (+ shared(x)) in float64 for chosen rows: what results are compared with. Independent of
// every implementation in the lists and of the library's own oracle (experts/oracle.hpp), which shares the definitions
// of activations and quantisation with them: here both are written down a second time, on purpose.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include <moekit/weights.hpp>

namespace moekit::cli {

/// A matrix as f32: quantised ones code · scale, rounded once, as formats define them.
struct Matrix {
  std::int64_t rows = 0, columns = 0;
  std::vector<float> values;
  const float* row(std::int64_t r) const { return values.data() + r * columns; }
};
Matrix dequantise(const Tensor& data, const Tensor& scale, const QuantDesc& desc);

struct OracleProblem {
  const LayerConfig& config;
  const WeightsSource& source;
  Tensor hidden;                   ///< [M, K], any float type
  Routing routing;                 ///< i32 ids, f32 weights [M, k]
  std::vector<std::int64_t> rows;  ///< which of the M
};

/// Values and what rounding may do to them, [rows.size(), K].
struct OracleResult {
  std::int64_t columns = 0;
  std::vector<double> y;
  std::vector<double> noise;   ///< sqrt(Σ (w · down · h)²): error per unit of relative rounding of h
  std::vector<double> routes;  ///< Σ_j |w_j · y_j|: for roundings of each expert's output
  std::vector<double> flip;    ///< largest effect of one code of a quantised h being one step off
  double largest = 0;          ///< max |y|
};

/// Uses all threads of cpu_executor(). Throws Error if the source fails.
OracleResult oracle(const OracleProblem& problem);

/// Rows to check of M: the first, the last and 32 seeded ones.
std::vector<std::int64_t> sampled_rows(std::int64_t num_tokens, std::uint64_t seed);

/// The outcome of comparing a result with what it should be.
struct Comparison {
  double max_abs = 0;                   ///< largest |got - want|
  double max_rel = 0;                   ///< the same over max |want|
  double rms_rel = 0;                   ///< rms(got - want) / rms(want)
  double worst_abs = 0, worst_rel = 0;  ///< of the element that is nearest to or furthest over its bound …
  double tol = 0;                       ///< … and its bound over max |want|: ok = finite and worst_rel ≤ tol
  std::int64_t t = 0, c = 0;            ///< the element nearest to or furthest over its bound
  double got = 0, want = 0;             ///< its values
  bool finite = true;
  bool ok = false;
  std::string text() const;  ///< "0.5 instead of 0.25 at [3, 17], bound 1e-5"
};

/// got [M, K] at problem rows against the oracle; bounds from the roundings that the layer's type and scheme allow:
/// h, each expert's output and the final output rounded to the layer's type; f32 sums. Six standard deviations.
Comparison compare(const Tensor& got, const std::vector<std::int64_t>& rows, const OracleResult& want,
                   const LayerConfig& config);

/// got [M, K] against `want` (f32 or f64, [M, K]) with a bound relative to max |want|, and one on the rms (0 = none).
Comparison compare(const Tensor& got, const Tensor& want, double tol, double rms_tol = 0);

}  // namespace moekit::cli
