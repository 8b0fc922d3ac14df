// One call of the CPU experts: sort, gather + GEMM1 + activation, (quantise), GEMM2 + weighted sum.
#pragma once
#include "experts/cpu/sizes.hpp"

namespace moekit::cpu {

/// Everything has been checked; the workspace holds what divide() asks for.
void forward(const Unit& unit, const Sizes& sizes, const Workspace& workspace, const ExpertsArgs& args,
             Executor& executor);

}  // namespace moekit::cpu
