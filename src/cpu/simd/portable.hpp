// 4 lanes, no instruction set beyond the compiler's default. fma is a product and a sum: two roundings.
#pragma once
#include "cpu/simd/vector.hpp"

namespace moekit::cpu::simd {
namespace {

struct Portable : Lanes<4> {
  static F fma(F a, F b, F c) { return a * b + c; }
  static F load_f16(const uint16_t* p) { return load_f16_generic<Portable>(p); }
  static void store_f16(uint16_t* p, F v) { store_f16_generic<Portable>(p, v); }
  static F round_f16(F v) { return f16_value<Portable>(f16_code<Portable>(v)); }
  static I load_i8(const int8_t* p) { return I{p[0], p[1], p[2], p[3]}; }
  /// Four e4m3 codes as value / 256: all but NaN.
  static F load_e4m3(const uint8_t* p) {
    const U code = {p[0], p[1], p[2], p[3]};
    return (F)(((code & 0x80u) << 24) | (U)((F)((code & 0x7fu) << 20) * 0x1p112f));
  }
};

}  // namespace
}  // namespace moekit::cpu::simd
