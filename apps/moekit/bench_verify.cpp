// A row without a verified result is not printed.
#include <cmath>

#include "bench.hpp"
#include "console.hpp"
#include "quant/numeric.hpp"

namespace moekit::cli {
namespace {

/// How far two implementations' rows may lie apart, as a share of the row's length. Each is within the rms bound of
/// its type (1e-2 for bf16, 1e-5 for f32; a code of a quantised intermediate may fall to the other side of a half).
double row_bound(const LayerConfig& config) {
  if (config.quant.activations_quantised()) return 2e-2;
  if (config.dtype == DType::bf16) return 2e-2;
  return config.dtype == DType::f16 ? 4e-3 : 2e-5;
}

struct RowDistance {
  double difference = 0, length = 0;
  bool finite = true;
};
RowDistance distance(const Tensor& y, const Tensor& other, std::int64_t t) {
  RowDistance out;
  for (std::int64_t c = 0; c < y.shape[1]; ++c) {
    const double a = numeric::load_f32(y.data, y.dtype, t * y.stride[0] + c);
    out.finite = out.finite && std::isfinite(a);
    if (!other.present()) continue;
    const double b = numeric::load_f32(other.data, other.dtype, t * other.stride[0] + c);
    out.difference += (a - b) * (a - b);
    out.length += b * b;
  }
  out.difference = std::sqrt(out.difference);
  out.length = std::sqrt(out.length);
  return out;
}

}  // namespace

Verification verify_result(const Tensor& y, const Expected& expected, const LayerConfig& config) {
  Verification out;
  const Comparison found = compare(y, expected.rows, expected.values, config);
  out.max_rel = found.max_rel;
  if (!found.ok) {
    out.failure = "against float64: " + found.text();
    return out;
  }
  const double bound = row_bound(config);
  for (std::int64_t t = 0; t < y.shape[0]; ++t) {
    const RowDistance row = distance(y, expected.other.tensor, t);
    if (!row.finite) {
      out.failure = format("row %lld has elements that are not finite", static_cast<long long>(t));
      return out;
    }
    if (row.difference <= bound * row.length) continue;
    out.failure = format("row %lld lies %.2e of its length away from what %s computes, bound %.0e",
                         static_cast<long long>(t), row.difference / row.length, expected.other_name.c_str(), bound);
    return out;
  }
  out.ok = true;
  return out;
}

}  // namespace moekit::cli
