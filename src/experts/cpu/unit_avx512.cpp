// AVX-512 F BW VL DQ VNNI: tiles of 6 rows × 2 vectors of 16 columns, i32 tiles of 8 × 2.
#include "cpu/simd/avx512.hpp"
#include "experts/cpu/unit_avx512_i8.hpp"
#include "experts/cpu/unit_e4m3.hpp"
#include "experts/cpu/unit_gemm.hpp"
#include "experts/cpu/unit_rows.hpp"

namespace moekit::cpu {
namespace {

constexpr Unit make() {
  Unit unit{};
  unit.name = "avx512";
  fill_gemm<simd::Avx512, ShapeAvx512>(unit);
  fill_e4m3<simd::Avx512, ShapeAvx512>(unit);
  fill_i8_vnni(unit);
  fill_rows<simd::Avx512>(unit);
  return unit;
}

}  // namespace

constexpr Unit kAvx512Unit = make();

}  // namespace moekit::cpu
