#include "stats.hpp"

#include <algorithm>
#include <cmath>

namespace moekit::cli {
namespace {

double sorted_quantile(const std::vector<double>& sorted, double q) {
  const double position = q * static_cast<double>(sorted.size() - 1);
  const auto below = static_cast<std::size_t>(std::floor(position));
  const std::size_t above = std::min(below + 1, sorted.size() - 1);
  const double part = position - static_cast<double>(below);
  return sorted[below] * (1 - part) + sorted[above] * part;
}

}  // namespace

double quantile(std::vector<double> values, double q) {
  std::sort(values.begin(), values.end());
  return sorted_quantile(values, q);
}

double median(std::vector<double> values) { return quantile(std::move(values), 0.5); }

Summary summarise(const std::vector<double>& values) {
  if (values.empty()) return {};
  std::vector<double> sorted = values;
  std::sort(sorted.begin(), sorted.end());
  return {static_cast<std::int64_t>(sorted.size()),
          sorted_quantile(sorted, 0.5),
          sorted.front(),
          sorted.back(),
          sorted_quantile(sorted, 0.9),
          sorted_quantile(sorted, 0.99)};
}

std::vector<double> ratios(const std::vector<double>& a, const std::vector<double>& b) {
  std::vector<double> out(std::min(a.size(), b.size()));
  for (std::size_t i = 0; i < out.size(); ++i) out[i] = a[i] / b[i];
  return out;
}

}  // namespace moekit::cli
