// Everything of a unit that is no GEMM: conversions, activations, quantisation, the weighted sum over slots. Internal
// to the unit that includes it (see unit.hpp).
#pragma once
#include "cpu/simd/math.hpp"
#include "experts/cpu/unit.hpp"

namespace moekit::cpu {
namespace {

using namespace simd;

template <class V>
typename V::F load_as(const void* p, Element type, int64_t i) {
  switch (type) {
    case Element::bf16: return load_bf16<V>(static_cast<const uint16_t*>(p) + i);
    case Element::f16: return V::load_f16(static_cast<const uint16_t*>(p) + i);
    default: return V::load(static_cast<const float*>(p) + i);
  }
}
template <class V>
void store_as(void* p, Element type, int64_t i, typename V::F v) {
  switch (type) {
    case Element::bf16: store_bf16<V>(static_cast<uint16_t*>(p) + i, v); break;
    case Element::f16: V::store_f16(static_cast<uint16_t*>(p) + i, v); break;
    default: V::store(static_cast<float*>(p) + i, v);
  }
}
inline int64_t bytes_of(Element type) {
  return type == Element::f32 ? 4 : type == Element::e4m3 || type == Element::i8 ? 1 : 2;
}

/// The last vector of a row that is no multiple of the width: through a buffer, so that nothing beyond is touched.
template <class V, class Body>
void with_tail(int64_t n, const Body& body) {
  int64_t i = 0;
  for (; i + V::width <= n; i += V::width) body(i, V::width);
  if (i < n) body(i, static_cast<int>(n - i));
}
template <class T>
void copy_n(T* dst, const T* src, int64_t n) {
  for (int64_t i = 0; i < n; ++i) dst[i] = src[i];
}
template <class V>
typename V::F load_part(const void* p, Element type, int64_t i, int n) {
  if (n == V::width) return load_as<V>(p, type, i);
  uint32_t buffer[V::width] = {};
  copy_n(reinterpret_cast<char*>(buffer), static_cast<const char*>(p) + i * bytes_of(type), n * bytes_of(type));
  return load_as<V>(buffer, type, 0);
}
template <class V>
void store_part(void* p, Element type, int64_t i, int n, typename V::F v) {
  if (n == V::width) return store_as<V>(p, type, i, v);
  uint32_t buffer[V::width];
  store_as<V>(buffer, type, 0, v);
  copy_n(static_cast<char*>(p) + i * bytes_of(type), reinterpret_cast<const char*>(buffer), n * bytes_of(type));
}

/// value · 256, NaN included.
inline float e4m3_activation(uint8_t code) {
  union {
    uint32_t bits;
    float value;
  } out;
  out.bits = static_cast<uint32_t>(code & 0x7f) << 20;
  out.value = out.value * 0x1p120f * kE4m3Shift;  // in two steps: 2^128 is no f32
  if ((code & 0x7f) == 0x7f) out.bits = 0x7fc00000u;
  out.bits |= static_cast<uint32_t>(code & 0x80) << 24;
  return out.value;
}

template <class V>
void widen(const void* src, Element type, int64_t n, float* dst) {
  if (type == Element::e4m3) {
    for (int64_t i = 0; i < n; ++i) dst[i] = e4m3_activation(static_cast<const uint8_t*>(src)[i]);
    return;
  }
  with_tail<V>(
      n, [&](int64_t i, int part) { store_part<V>(dst, Element::f32, i, part, load_part<V>(src, type, i, part)); });
}
template <class V>
void narrow(const float* src, int64_t n, void* dst, Element type) {
  with_tail<V>(
      n, [&](int64_t i, int part) { store_part<V>(dst, type, i, part, load_part<V>(src, Element::f32, i, part)); });
}

template <class V>
void settle(const SettleArgs& s) {
  typedef typename V::F F;
  for (int64_t row = 0; row < s.rows; ++row) {
    const F a = V::set1(s.a_scale ? s.a_scale[row * s.a_scale_stride] : 1.0f);
    for (int j = 0; j < kPanelColumns; j += V::width) {
      float* at = s.c + row * kPanelColumns + j;
      F v = V::load(at);
      if (s.integer) {
        typename V::I sum = (typename V::I)v;
        if (s.colsum) sum = sum - (V::load_i32(s.colsum + j) << 7);
        v = V::to_float(sum);
      }
      if (s.w_scale) v = v * (a * V::load(s.w_scale + j));
      if (s.bias) v = v + V::load(s.bias + j);
      if (s.poison) v = v + V::load(s.poison + j);
      V::store(at, v);
    }
  }
}

template <class V>
typename V::F round_to(Element type, typename V::F v) {
  switch (type) {
    case Element::bf16: return round_bf16<V>(v);
    case Element::f16: return V::round_f16(v);
    default: return v;
  }
}

/// f(x) of the configuration header, by kind.
template <class V>
struct Silu {
  typedef typename V::F F;
  static F gated(const ActArgs& p, F g, F u) { return alone(p, g) * u; }
  static F alone(const ActArgs& p, F x) { return x * sigmoid<V>(p.alpha * x); }
};
template <class V>
struct Gelu : Silu<V> {
  typedef typename V::F F;
  static F gated(const ActArgs& p, F g, F u) { return alone(p, g) * u; }
  static F alone(const ActArgs&, F x) { return x * normal_cdf<V>(x); }
};
template <class V>
struct GeluTanh {
  typedef typename V::F F;
  static F gated(const ActArgs& p, F g, F u) { return alone(p, g) * u; }
  /// (1 + tanh z) / 2 = 1 / (1 + e^-2z); z = √(2/π) · (x + 0.044715 x³)
  static F alone(const ActArgs&, F x) {
    return x * sigmoid<V>(1.595769121605731f * x * V::fma(x * x, V::set1(0.044715f), V::set1(1.0f)));
  }
};
template <class V>
struct SwigluOai {
  typedef typename V::F F;
  static F gated(const ActArgs& p, F g, F u) { return g * sigmoid<V>(p.alpha * g) * (u + p.beta); }
  static F alone(const ActArgs&, F x) { return x; }
};
template <class V>
struct Relu2 {
  typedef typename V::F F;
  static F gated(const ActArgs& p, F g, F u) { return alone(p, g) * u; }
  static F alone(const ActArgs&, F x) {
    const F positive = x < 0.0f ? F{} : x;  // NaN stays
    return positive * positive;
  }
};
template <class V>
struct Identity {
  typedef typename V::F F;
  static F gated(const ActArgs&, F, F u) { return u; }
  static F alone(const ActArgs&, F x) { return x; }
};

template <class V, class Act>
void activate_with(const ActArgs& p) {
  typedef typename V::F F;
  const int columns = p.gated ? kHalfPanel : kPanelColumns;
  for (int64_t row = 0; row < p.rows; ++row) {
    const float* c = p.c + row * kPanelColumns;
    float* h = p.h + row * p.ldh;
    for (int j = 0; j < columns; j += V::width) {
      F u = V::load(c + j + (p.gated ? kHalfPanel : 0));
      u = u > p.clamp_up ? V::set1(p.clamp_up) : u;
      u = u < -p.clamp_up ? V::set1(-p.clamp_up) : u;
      F value;
      if (p.gated) {
        F g = V::load(c + j);
        g = g > p.clamp_gate ? V::set1(p.clamp_gate) : g;
        value = Act::gated(p, g, u);
      } else {
        value = Act::alone(p, u);
      }
      V::store(h + j, round_to<V>(p.round, value));
    }
    for (int j = p.valid; j < columns; ++j) h[j] = 0;
  }
}
template <class V>
void activate(const ActArgs& p) {
  switch (p.kind) {
    case ActKind::silu: return activate_with<V, Silu<V>>(p);
    case ActKind::gelu: return activate_with<V, Gelu<V>>(p);
    case ActKind::gelu_tanh: return activate_with<V, GeluTanh<V>>(p);
    case ActKind::swigluoai: return activate_with<V, SwigluOai<V>>(p);
    case ActKind::relu2: return activate_with<V, Relu2<V>>(p);
    case ActKind::none: return activate_with<V, Identity<V>>(p);
  }
}

template <class V>
void reduce(const ReduceArgs& r) {
  typedef typename V::F F;
  with_tail<V>(r.n, [&](int64_t i, int part) {
    F sum{};
    for (int64_t j = 0; j < r.count; ++j) {
      const F y = load_part<V>(r.rows[j], Element::f32, i, part);
      sum = r.weights ? V::fma(V::set1(r.weights[j]), y, sum) : sum + y;
    }
    store_part<V>(r.out, r.type, i, part, sum);
  });
}

template <class V>
uint32_t absmax(const float* x, int64_t n) {
  typedef typename V::I I;
  I best{};
  with_tail<V>(n, [&](int64_t i, int part) {
    const I bits = (I)load_part<V>(x, Element::f32, i, part) & 0x7fffffff;
    best = bits > best ? bits : best;
  });
  return static_cast<uint32_t>(max_lane<V>(best));
}

template <class V>
void quantise_i8(const float* x, int64_t n, float factor, bool divide, float lowest, int8_t* codes) {
  typedef typename V::F F;
  const F magic = V::set1(0x1.8p23f), low = V::set1(lowest), high = V::set1(127.0f), f = V::set1(factor);
  with_tail<V>(n, [&](int64_t i, int part) {
    const F value = load_part<V>(x, Element::f32, i, part);
    F steps = divide ? value / f : value * f;
    steps = steps > high ? high : steps;
    steps = steps < low ? low : steps;
    steps = steps != steps ? F{} : steps;
    const typename V::I whole = (typename V::I)(steps + magic) - (typename V::I)magic;
    for (int lane = 0; lane < part; ++lane) codes[i + lane] = static_cast<int8_t>(whole[lane]);
  });
}

template <class V>
void quantise_e4m3(float* x, int64_t n, float scale) {
  typedef typename V::F F;
  typedef typename V::U U;
  with_tail<V>(n, [&](int64_t i, int part) {
    const F v = load_part<V>(x, Element::f32, i, part) / V::set1(scale);
    const U sign = (U)v & 0x80000000u, magnitude = (U)v & 0x7fffffffu;
    const U normal = (magnitude + 0x7ffffu + ((magnitude >> 20) & 1u)) & 0xfff00000u;
    const F tiny = ((F)magnitude + 0x1.8p14f) - 0x1.8p14f;  // a multiple of 2^-9: the ulp of 2^14
    F out = (F)magnitude < 0x1p-6f ? tiny : (F)normal;
    out = (F)magnitude >= 448.0f ? V::set1(448.0f) : out;
    out = v != v ? v : (F)((U)(out * kE4m3Shift) | sign);
    store_part<V>(x, Element::f32, i, part, out);
  });
}

/// The table of a unit, but for its name, its tile and its integer and dot kernels.
template <class V>
constexpr void fill_rows(Unit& unit) {
  unit.widen = widen<V>;
  unit.narrow = narrow<V>;
  unit.settle = settle<V>;
  unit.activate = activate<V>;
  unit.reduce = reduce<V>;
  unit.absmax = absmax<V>;
  unit.quantise_i8 = quantise_i8<V>;
  unit.quantise_e4m3 = quantise_e4m3<V>;
}

}  // namespace
}  // namespace moekit::cpu
