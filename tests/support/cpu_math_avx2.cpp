#include "cpu/simd/avx2.hpp"

#define UNIT Avx2
#define TABLE kAvx2Math
#include "support/cpu_math.inl"
