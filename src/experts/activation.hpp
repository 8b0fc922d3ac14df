// h = f(gate, up), as config.hpp defines it, in the precision of the caller. NaN passes through every clamp.
#pragma once
#include <cmath>

#include <moekit/config.hpp>

namespace moekit::experts {

template <class T>
T clamp_above(T x, T limit) {
  return x > limit ? limit : x;
}
template <class T>
T clamp_both(T x, T limit) {
  return x > limit ? limit : x < -limit ? -limit : x;
}

/// z · σ(alpha · z)
template <class T>
T silu(T z, T alpha) {
  return z / (T(1) + std::exp(-alpha * z));
}

/// The non-linear factor alone: f(z).
template <class T>
T nonlinear(const Activation& a, T z) {
  switch (a.kind) {
    case ActivationKind::silu:
    case ActivationKind::swigluoai: return silu(z, static_cast<T>(a.alpha));
    case ActivationKind::gelu: return z * std::erfc(-z * T(0.70710678118654752440)) / T(2);
    case ActivationKind::gelu_tanh: {
      const T inner = T(0.79788456080286535588) * (z + T(0.044715) * z * z * z);  // √(2/π)
      return z / (T(1) + std::exp(T(-2) * inner));                                // 0.5 z (1 + tanh) = z σ(2 · inner)
    }
    case ActivationKind::relu2: return z > T(0) ? z * z : z == z ? T(0) : z;
    case ActivationKind::none: return z;
  }
  return z;
}

/// Gated forms take both; ungated ones look at `up` alone.
template <class T>
T activate(const Activation& a, T gate, T up) {
  const T u = clamp_both(up, static_cast<T>(a.clamp_up));
  if (!a.gated) return nonlinear(a, u);
  const T g = clamp_above(gate, static_cast<T>(a.clamp_gate));
  return nonlinear(a, g) * (a.kind == ActivationKind::swigluoai ? u + static_cast<T>(a.beta) : u);
}

}  // namespace moekit::experts
