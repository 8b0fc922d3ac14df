// The CPU experts as list entries.
#pragma once
#include <memory>

#include <moekit/kit/implementations.hpp>

#include "cpu/isa.hpp"

namespace moekit::cpu {

struct Unit;
/// The kernels of an ISA level; null where this build has none.
const Unit* unit_of(Isa isa);

std::unique_ptr<Experts> make_experts(Isa isa, ActivationFormat format, const MakeContext& context);
Verdict experts_available(Isa isa);

template <Isa isa>
std::unique_ptr<Experts> make_standard(const MakeContext& context) {
  return make_experts(isa, ActivationFormat::standard, context);
}
template <Isa isa>
std::unique_ptr<Experts> make_batched(const MakeContext& context) {
  return make_experts(isa, ActivationFormat::batched_experts, context);
}
template <Isa isa>
Verdict available() {
  return experts_available(isa);
}

}  // namespace moekit::cpu
