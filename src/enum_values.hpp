// Which values the enumerations have. Data from outside may hold any byte (a cast, a C caller, a damaged file), so it
// is asked where it enters; behind that point a switch over an enumeration is complete.
#pragma once
#include <string>
#include <string_view>
#include <type_traits>

#include <moekit/config.hpp>
#include <moekit/kit/problem.hpp>
#include <moekit/kit/routing.hpp>
#include <moekit/kit/weight_and_reduce.hpp>
#include <moekit/plan.hpp>

#include "text.hpp"

namespace moekit::values {

constexpr DType last(DType) { return DType::nvfp4; }
constexpr DeviceType last(DeviceType) { return DeviceType::cuda; }
constexpr ActivationKind last(ActivationKind) { return ActivationKind::none; }
constexpr GateLayout last(GateLayout) { return GateLayout::interleaved; }
constexpr Score last(Score) { return Score::identity; }
constexpr SoftmaxOver last(SoftmaxOver) { return SoftmaxOver::selected; }
constexpr GroupScore last(GroupScore) { return GroupScore::top2_sum; }
constexpr GroupFill last(GroupFill) { return GroupFill::zero; }
constexpr RenormEps last(RenormEps) { return RenormEps::max; }
constexpr RouterSource last(RouterSource) { return RouterSource::simulated; }
constexpr Simulated last(Simulated) { return Simulated::single; }
constexpr Determinism last(Determinism) { return Determinism::batch_invariant; }
constexpr OutputKind last(OutputKind) { return OutputKind::tail; }
constexpr ActivationFormat last(ActivationFormat) { return ActivationFormat::batched_experts; }
constexpr IdSpace last(IdSpace) { return IdSpace::local; }
constexpr InputSpec::ScaleLayout last(InputSpec::ScaleLayout) { return InputSpec::ScaleLayout::packed_ue8m0; }
constexpr WeightAndReduce::Kind last(WeightAndReduce::Kind) { return WeightAndReduce::Kind::delegate; }

/// Does the enumeration name this value? All of them count from 0 without gaps.
template <class Enum>
constexpr bool is_named(Enum value) {
  static_assert(std::is_same_v<std::underlying_type_t<Enum>, std::uint8_t>);
  return value <= last(value);
}

/// A value that the enumeration does not name is a failure that names `field`.
/// @param stage  "router": what stands in brackets in front of the message
template <class Enum>
Status check(std::string_view stage, std::string_view field, Enum value) {
  if (is_named(value)) return {};
  return Status(std::is_same_v<Enum, DType> ? StatusCode::invalid_dtype : StatusCode::invalid_argument,
                text::concat("[", stage, "] ", field, " is ", static_cast<int>(value), ", its values are 0 to ",
                             static_cast<int>(last(value))),
                "use a named value of the enumeration", std::string(field));
}

/// Every enumeration of a record.
inline Status check_all(const Activation& activation) {
  Status s = check("activation", "activation.kind", activation.kind);
  return s.ok() ? check("activation", "activation.layout", activation.layout) : s;
}
inline Status check_all(const QuantSpec& quant) {
  Status s = check("quant", "quant.a1.type", quant.a1.type);
  if (s.ok()) s = check("quant", "quant.w1.type", quant.w1.type);
  if (s.ok()) s = check("quant", "quant.a2.type", quant.a2.type);
  return s.ok() ? check("quant", "quant.w2.type", quant.w2.type) : s;
}
inline Status check_all(const RouterConfig& router) {
  Status s = check("router", "router.source", router.source);
  if (s.ok()) s = check("router", "router.score", router.score);
  if (s.ok()) s = check("router", "router.softmax_over", router.softmax_over);
  if (s.ok()) s = check("router", "router.group_score", router.group_score);
  if (s.ok()) s = check("router", "router.group_fill", router.group_fill);
  if (s.ok()) s = check("router", "router.renorm_eps_mode", router.renorm_eps_mode);
  return s.ok() ? check("router", "router.simulated", router.simulated) : s;
}

}  // namespace moekit::values
