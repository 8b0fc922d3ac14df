// Vectors of f32 as GCC vector extensions: what every unit shares. Internal to the file that includes it: templates
// are instantiated with a unit's own type, everything lies in an unnamed namespace, and nothing of the standard
// library is called, so that no function compiled for a wide unit can be picked by the linker for a narrow CPU.
#pragma once
#include <stdint.h>

namespace moekit::cpu::simd {
namespace {

/// Lane types of N lanes. F, I and U have as many lanes and bits: casts between them keep the bits.
template <int N>
struct LaneTypes;
#define MOEKIT_LANE_TYPES(N)                                                            \
  template <>                                                                           \
  struct LaneTypes<N> {                                                                 \
    typedef float F __attribute__((vector_size(4 * N)));                                \
    typedef int32_t I __attribute__((vector_size(4 * N)));                              \
    typedef uint32_t U __attribute__((vector_size(4 * N)));                             \
    typedef uint16_t H __attribute__((vector_size(2 * N)));                             \
    typedef float FLoose __attribute__((vector_size(4 * N), aligned(4), may_alias));    \
    typedef int32_t ILoose __attribute__((vector_size(4 * N), aligned(4), may_alias));  \
    typedef uint16_t HLoose __attribute__((vector_size(2 * N), aligned(2), may_alias)); \
  };
MOEKIT_LANE_TYPES(4)
MOEKIT_LANE_TYPES(8)
MOEKIT_LANE_TYPES(16)
#undef MOEKIT_LANE_TYPES

template <int N>
struct Lanes : LaneTypes<N> {
  static constexpr int width = N;
  using typename LaneTypes<N>::F;
  using typename LaneTypes<N>::I;
  using typename LaneTypes<N>::U;
  using typename LaneTypes<N>::FLoose;
  using typename LaneTypes<N>::ILoose;

  static F load(const float* p) { return *reinterpret_cast<const FLoose*>(p); }
  static void store(float* p, F v) { *reinterpret_cast<FLoose*>(p) = v; }
  static I load_i32(const int32_t* p) { return *reinterpret_cast<const ILoose*>(p); }
  static F set1(float v) { return v - F{}; }  // v - 0 keeps -0 and NaN
  static I iset1(int32_t v) { return v - I{}; }
  static U uset1(uint32_t v) { return v - U{}; }
  static F to_float(I v) { return __builtin_convertvector(v, F); }
};

template <class V>
typename V::F load_bf16(const uint16_t* p) {
  const auto half = *reinterpret_cast<const typename V::HLoose*>(p);
  return (typename V::F)(__builtin_convertvector(static_cast<typename V::H>(half), typename V::U) << 16);
}

template <class V>
typename V::U bf16_code(typename V::F v) {
  typedef typename V::U U;
  const U code = (U)v;
  const U rounded = (code + 0x7fffu + ((code >> 16) & 1u)) >> 16;
  return (U)(v != v) ? ((code >> 16) | 0x40u) : rounded;  // NaN stays NaN
}
template <class V>
void store_bf16(uint16_t* p, typename V::F v) {
  *reinterpret_cast<typename V::HLoose*>(p) = __builtin_convertvector(bf16_code<V>(v), typename V::H);
}
template <class V>
typename V::F round_bf16(typename V::F v) {
  return (typename V::F)(bf16_code<V>(v) << 16);
}

/// f16 by integer arithmetic, as quant/numeric.hpp; units with conversion instructions bring their own.
template <class V>
typename V::F f16_value(typename V::U code) {
  typedef typename V::F F;
  typedef typename V::U U;
  const U sign = (code & 0x8000u) << 16, magnitude = code & 0x7fffu;
  const F finite = (F)(magnitude << 13) * 0x1p112f;
  const U special = 0x7f800000u | ((magnitude & 0x3ffu) << 13);
  return (F)(sign | (magnitude >= 0x7c00u ? special : (U)finite));
}
template <class V>
typename V::U f16_code(typename V::F v) {
  typedef typename V::F F;
  typedef typename V::U U;
  const U code = (U)v, sign = (code >> 16) & 0x8000u, magnitude = code & 0x7fffffffu;
  const U normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u) >> 13;
  const U tiny = (U)((F)magnitude + 0.5f) - 0x3f000000u;  // a multiple of 2^-24: the ulp of 0.5
  U out = magnitude < 0x38800000u ? tiny : normal;
  out = magnitude >= 0x477ff000u ? V::uset1(0x7c00u) : out;
  out = magnitude > 0x7f800000u ? V::uset1(0x7e00u) : out;
  return sign | out;
}
template <class V>
typename V::F load_f16_generic(const uint16_t* p) {
  const auto half = *reinterpret_cast<const typename V::HLoose*>(p);
  return f16_value<V>(__builtin_convertvector(static_cast<typename V::H>(half), typename V::U));
}
template <class V>
void store_f16_generic(uint16_t* p, typename V::F v) {
  *reinterpret_cast<typename V::HLoose*>(p) = __builtin_convertvector(f16_code<V>(v), typename V::H);
}

/// The largest lane; NaN does not survive here: compare bits instead where it must.
template <class V>
int32_t max_lane(typename V::I v) {
  int32_t best = v[0];
  for (int i = 1; i < V::width; ++i) best = v[i] > best ? v[i] : best;
  return best;
}

template <class V>
typename V::F abs(typename V::F v) {
  return (typename V::F)((typename V::U)v & 0x7fffffffu);
}

}  // namespace
}  // namespace moekit::cpu::simd
