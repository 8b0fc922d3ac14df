#include "cpu/simd/portable.hpp"

#define UNIT Portable
#define TABLE kPortableMath
#include "support/cpu_math.inl"
