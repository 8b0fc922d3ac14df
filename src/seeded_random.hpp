// Seeded values: the same on every machine. For test data, generated checkpoints and samples; nothing here is secret.
#pragma once
#include <cmath>
#include <cstdint>

namespace moekit::seeded {

/// splitmix64: small, seeded by value.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::uint64_t next() {
    std::uint64_t z = (state_ += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
  }
  std::int64_t below(std::int64_t n) { return static_cast<std::int64_t>(next() % static_cast<std::uint64_t>(n)); }
  double uniform() { return static_cast<double>(next() >> 11) * 0x1p-53; }  ///< [0, 1)
  /// Uniform with mean 0 and variance 1.
  float centred() { return static_cast<float>(2.0 * uniform() - 1.0) * 1.7320508f; }
  float normal() {
    const double u = 1.0 - uniform(), v = uniform();
    return static_cast<float>(std::sqrt(-2.0 * std::log(u)) * std::cos(6.283185307179586 * v));
  }

 private:
  std::uint64_t state_;
};

}  // namespace moekit::seeded
