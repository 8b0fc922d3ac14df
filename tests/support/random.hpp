// Seeded values for tests: the same on every machine.
#pragma once
#include <cstdint>
#include <vector>

#include "quant/numeric.hpp"
#include "seeded_random.hpp"

namespace moekit::testing {

using seeded::Random;

/// n elements of `type`, N(0, 1) · scale, as raw bytes.
inline std::vector<std::byte> normal_values(Random& random, DType type, std::int64_t n, float scale = 1.0f) {
  std::vector<std::byte> out(static_cast<std::size_t>(n * bits(type) / 8));
  for (std::int64_t i = 0; i < n; ++i) numeric::store_f32(out.data(), type, i, random.normal() * scale);
  return out;
}

}  // namespace moekit::testing
