// The vector functions of one unit over arrays, for tests that are compiled without its flags.
#pragma once
#include <cstdint>

namespace moekit::testing {

struct MathFunctions {
  void (*exp)(const float*, float*, std::int64_t);
  void (*sigmoid)(const float*, float*, std::int64_t);
  void (*tanh)(const float*, float*, std::int64_t);
  void (*erf)(const float*, float*, std::int64_t);
  void (*normal_cdf)(const float*, float*, std::int64_t);
  void (*to_bf16)(const float*, float*, std::int64_t);  ///< and back
  void (*to_f16)(const float*, float*, std::int64_t);   ///< and back
};
extern const MathFunctions kPortableMath;
extern const MathFunctions kAvx2Math;

}  // namespace moekit::testing
