// Defines the table of a unit; the including file has set UNIT to its type and TABLE to the table's name.
#include "cpu/simd/math.hpp"
#include "support/cpu_math.hpp"

namespace moekit::testing {
namespace {

using V = cpu::simd::UNIT;

template <V::F (*function)(V::F)>
void over(const float* x, float* y, std::int64_t n) {
  for (std::int64_t i = 0; i < n; i += V::width) V::store(y + i, function(V::load(x + i)));
}
V::F through_bf16(V::F v) {
  std::uint16_t codes[V::width];
  cpu::simd::store_bf16<V>(codes, v);
  return cpu::simd::load_bf16<V>(codes);
}
V::F through_f16(V::F v) {
  std::uint16_t codes[V::width];
  V::store_f16(codes, v);
  return V::load_f16(codes);
}

}  // namespace

const MathFunctions TABLE = {over<cpu::simd::exp<V>>, over<cpu::simd::sigmoid<V>>,    over<cpu::simd::tanh<V>>,
                             over<cpu::simd::erf<V>>, over<cpu::simd::normal_cdf<V>>, over<through_bf16>,
                             over<through_f16>};

}  // namespace moekit::testing
