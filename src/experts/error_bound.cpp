#include "experts/error_bound.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

#include "experts/activation.hpp"

namespace moekit::oracle {
namespace {

constexpr double kUnderflow = 0x1p-126;  // one f32 operation whose result is flushed to zero

/// Largest |f'| in [z - error, z + error].
double slope(const Activation& activation, double z, double error) {
  switch (activation.kind) {
    case ActivationKind::silu:
    case ActivationKind::swigluoai: return 1.1;  // max of σ(z) + z σ'(z) = 1.0998, whatever alpha
    case ActivationKind::gelu: return 1.13;      // max of Φ(z) + z φ(z) = 1.1289
    case ActivationKind::gelu_tanh: return 1.13;
    case ActivationKind::relu2: return 2.0 * (std::abs(z) + error);
    case ActivationKind::none: return 1.0;
  }
  return 1.0;
}

/// Codes are integers (int8) or e4m3 values: what the code of t steps stands for.
double decode(const quant::RowScheme& scheme, double t) {
  const auto steps = static_cast<float>(t);
  if (scheme.type == DType::i8) return quant::int8_code(steps, scheme.int8_divisor);
  return numeric::e4m3_to_f32(numeric::f32_to_e4m3(steps));
}

struct ScaleRange {
  double low, high;
};

/// Where the scale of another implementation may lie, whose |h| are within errors of ours.
ScaleRange scale_range(const quant::RowScheme& scheme, std::span<const double> h, std::span<const double> error) {
  if (scheme.static_scale > 0) return {scheme.static_scale, scheme.static_scale};
  double low = 0, high = 0;
  for (std::size_t i = 0; i < h.size(); ++i) {
    low = std::max(low, std::abs(h[i]) - error[i]);
    high = std::max(high, std::abs(h[i]) + error[i]);
  }
  const double divisor = scheme.type == DType::i8 ? scheme.int8_divisor : quant::kE4m3Largest;
  const double u = 0x1p-23;
  return {low / divisor * (1 - u), high / divisor * (1 + u)};
}

/// Largest |code · scale - ours| over the codes and scales that h ± error can get.
double code_error(const quant::RowScheme& scheme, const ScaleRange& scale, double h, double error, double ours) {
  const double u = 0x1p-22;  // division or multiplication by the reciprocal, in f32
  const double low = h - error, high = h + error;
  const double steps_low = low >= 0 ? low / scale.high * (1 - u) : low / scale.low * (1 + u);
  const double steps_high = high >= 0 ? high / scale.low * (1 + u) : high / scale.high * (1 - u);
  double worst = 0;
  for (double code : {decode(scheme, steps_low), decode(scheme, steps_high)})
    for (double s : {scale.low, scale.high}) worst = std::max(worst, std::abs(code * s - ours));
  return worst;
}

void quantise_unit(const quant::RowScheme& scheme, std::span<double> h, std::span<std::span<double>> errors,
                   std::size_t begin) {
  std::vector<float> narrow(h.size());
  for (std::size_t i = 0; i < h.size(); ++i) narrow[i] = static_cast<float>(h[i]);
  std::vector<std::uint8_t> codes(h.size());
  quant::RowScheme one_unit = scheme;
  one_unit.group = -1;
  float scale = 0;
  quant::quantise_row({narrow.data(), DType::f32, static_cast<std::int64_t>(h.size())}, one_unit, codes.data(), &scale);
  const bool is_zero_unit = scheme.static_scale <= 0 && scale == 1.0f &&
                            std::all_of(codes.begin(), codes.end(), [](std::uint8_t code) { return code == 0; });
  std::vector<double> ours(h.size());
  for (std::size_t i = 0; i < h.size(); ++i)
    ours[i] = static_cast<double>(numeric::load_f32(codes.data(), scheme.type, static_cast<std::int64_t>(i))) * scale;
  for (std::span<double>& all : errors) {
    const std::span<double> error = all.subspan(begin, h.size());
    const ScaleRange range = scale_range(scheme, h, error);
    const bool near_zero = is_zero_unit || !(range.low >= 0x1p-126);
    for (std::size_t i = 0; i < h.size(); ++i)
      error[i] = near_zero ? 2 * (std::abs(h[i]) + error[i]) + std::abs(ours[i])
                           : code_error(scheme, range, h[i], error[i], ours[i]);
  }
  std::copy(ours.begin(), ours.end(), h.begin());
}

}  // namespace

double unit_roundoff(DType type) {
  switch (type) {
    case DType::bf16: return 0x1p-8;
    case DType::f16: return 0x1p-11;
    case DType::f32: return 0x1p-24;
    default: return 0x1p-53;
  }
}

double smallest_error(DType type) {
  switch (type) {
    case DType::f16: return 0x1p-25;
    case DType::f64: return 0;
    default: return kUnderflow;
  }
}

double rounding(DType type, double value, double error) {
  return unit_roundoff(type) * (std::abs(value) + error) + smallest_error(type);
}

ErrorModel::ErrorModel(const Roundings& roundings, const QuantSpec* quant, const Activation& activation)
    : at_(roundings),
      activation_(activation),
      unit_(unit_roundoff(roundings.sums)),
      exact_dots_(roundings.integer_dots && quant != nullptr && quant->a1.type == DType::i8 &&
                  quant->w1.type == DType::i8) {}

double ErrorModel::gamma(std::int64_t n, std::int64_t extra) const {
  const std::int64_t lanes = std::max<std::int64_t>(1, std::min(at_.sum_lanes, n));
  const std::int64_t chain = lanes == 1 ? n : (n + lanes - 1) / lanes + lanes;
  const double steps = static_cast<double>(chain + extra) * unit_;
  return steps / (1 - steps);
}

double ErrorModel::dot(std::int64_t n, double sum, double abs_sum) const {
  const double underflow = static_cast<double>(n) * (unit_ > 0x1p-50 ? kUnderflow : 0.0);
  // f32 scales on both sides and the bias: 5 more roundings. Dequantised weights are f32(code · scale): one on each.
  if (exact_dots_) return gamma(1, 5) * std::abs(sum) + 0x1p-23 * abs_sum + underflow;
  return gamma(n, 5) * abs_sum + underflow;
}

double ErrorModel::activate(double gate, double gate_error, double up, double up_error) const {
  auto nonlinear_error = [this](double z, double error) {
    const double f = std::abs(experts::nonlinear(activation_, z));
    const double moved = slope(activation_, z, error) * error;
    return moved + at_.activation_error * (std::max(f, std::abs(z)) + moved + error);
  };
  const double clamped_up = experts::clamp_both(up, static_cast<double>(activation_.clamp_up));
  if (!activation_.gated) return nonlinear_error(clamped_up, up_error) + kUnderflow;
  const double clamped_gate = experts::clamp_above(gate, static_cast<double>(activation_.clamp_gate));
  const double f = std::abs(experts::nonlinear(activation_, clamped_gate));
  const double f_error = nonlinear_error(clamped_gate, gate_error);
  double factor = clamped_up, factor_error = up_error;
  if (activation_.kind == ActivationKind::swigluoai) {
    factor += static_cast<double>(activation_.beta);
    factor_error += unit_ * (std::abs(factor) + up_error);
  }
  const double moved = std::abs(factor) * f_error + f * factor_error + f_error * factor_error;
  return moved + unit_ * (f * std::abs(factor) + moved) + kUnderflow * (1 + std::abs(factor));
}

double ErrorModel::store_h(double h, double error) const { return error + rounding(at_.h, h, error); }

double ErrorModel::second_dot(std::int64_t n, double sum, double abs_sum, double carried) const {
  if (exact_dots_) return carried + dot(n, std::abs(sum) + carried, abs_sum);
  return carried + dot(n, sum, abs_sum);
}

double ErrorModel::combine(std::int64_t terms, double abs_sum, double carried) const {
  return carried + gamma(terms, 2) * abs_sum + static_cast<double>(terms) * kUnderflow;
}

void quantise_h(const quant::RowScheme& scheme, std::span<double> h, std::span<std::span<double>> errors) {
  const std::size_t group = scheme.group < 0 ? h.size() : static_cast<std::size_t>(scheme.group);
  for (std::size_t begin = 0; begin < h.size(); begin += group)
    quantise_unit(scheme, h.subspan(begin, std::min(group, h.size() - begin)), errors, begin);
}

}  // namespace moekit::oracle
