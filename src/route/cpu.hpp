// The router of the CPU backend: f32, eight lanes, rows in parallel.
#pragma once
#include <memory>

#include "route/check.hpp"
#include "route/cpu_units.hpp"

namespace moekit::route {

std::unique_ptr<Router> make_cpu();
/// With a unit of the caller's choice, which must be able to run here (cpu::can_run).
std::unique_ptr<Router> make_cpu(const CpuUnit& unit);

/// router_gemm with a unit of the caller's choice.
Status gemm_with(const CpuUnit& unit, const Tensor& hidden, const Tensor& weight, const Tensor& logits,
                 const CallContext& context);

}  // namespace moekit::route
