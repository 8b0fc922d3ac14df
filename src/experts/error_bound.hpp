// The error model of docs/numerics.md, step by step, for one route. Every function takes values and bounds of what goes
// in and gives the bound of what comes out.
#pragma once
#include <span>

#include <moekit/kit/experts.hpp>

#include "quant/quantise.hpp"

namespace moekit::oracle {

/// Largest relative error of one rounding to a type: half the spacing at 1.
double unit_roundoff(DType type);
/// Largest absolute error where the type's numbers are subnormal (or flushed to zero).
double smallest_error(DType type);

/// Bound of one rounding of a value that is known within `error`.
double rounding(DType type, double value, double error);

class ErrorModel {
 public:
  ErrorModel(const Roundings& roundings, const QuantSpec* quant, const Activation& activation);

  /// Error of Σ over n terms (+ bias): `sum` is the exact result, `abs_sum` = Σ|w·x| + |bias|, computed from inputs
  /// that are exact. Scaling of codes is part of it.
  double dot(std::int64_t n, double sum, double abs_sum) const;
  /// Error of h = f(gate)·up in f32, given gate and up with their errors.
  double activate(double gate, double gate_error, double up, double up_error) const;
  /// Error of h once it is stored in its type (float schemes).
  double store_h(double h, double error) const;
  /// Error of GEMM2's row: `abs_sum` = Σ|w|(|h| + error of h) + |bias|, `carried` = Σ|w|·(error of h).
  double second_dot(std::int64_t n, double sum, double abs_sum, double carried) const;
  /// Error of one route's output in its type.
  double store_expert_output(double y, double error) const { return error + rounding(at_.expert_output, y, error); }
  /// Error of Σ_j w_j·y_j over `terms` slots; `abs_sum` = Σ|w_j|(|y_j| + error_j), `carried` = Σ|w_j|·error_j.
  double combine(std::int64_t terms, double abs_sum, double carried) const;

 private:
  double gamma(std::int64_t n, std::int64_t extra) const;
  Roundings at_;
  Activation activation_;
  double unit_;
  bool exact_dots_;
};

/// h quantised as `scheme` says: on return h holds code · scale, and error how far another correct implementation,
/// whose f32 h is within the given error, may be: its scale may differ, and codes near a rounding boundary may be
/// others.
void quantise_h(const quant::RowScheme& scheme, std::span<double> h, std::span<std::span<double>> errors);

}  // namespace moekit::oracle
