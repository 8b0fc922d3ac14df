// What Weights hold: packed experts and dense copies of everything small.
#pragma once
#include <vector>

#include <moekit/weights.hpp>

#include "cpu/arena.hpp"

namespace moekit::inline v0 {

struct Weights::Impl {
  std::uint64_t plan_fingerprint = 0;
  const PackFormat* format = nullptr;
  WeightsSpec spec{};
  std::size_t stride = 0;
  cpu::Arena memory;         // L packed experts
  cpu::Arena shared_memory;  // one
  WeightsView shared_view{};
  Tensor shared_gate;  // f32 [K]
  RouterTensors router;
  QuantConfig quant, shared_quant;
  std::vector<std::vector<std::byte>> storage;  // what the small tensors point into
};

}  // namespace moekit::inline v0
