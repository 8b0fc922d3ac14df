// Order statistics of timings.
#pragma once
#include <cstdint>
#include <vector>

namespace moekit::cli {

struct Summary {
  std::int64_t samples = 0;
  double median = 0, min = 0, max = 0, p90 = 0, p99 = 0;
};

/// Value at quantile q in [0, 1], linear between neighbours. `values` must not be empty.
double quantile(std::vector<double> values, double q);
double median(std::vector<double> values);
Summary summarise(const std::vector<double>& values);  ///< all zero when empty
/// a[i] / b[i]; as many as both have.
std::vector<double> ratios(const std::vector<double>& a, const std::vector<double>& b);

}  // namespace moekit::cli
