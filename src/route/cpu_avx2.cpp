// The routing kernels compiled for AVX2, FMA and F16C.
#include "route/gemm_kernel.hpp"
#include "route/rows_kernel.hpp"

namespace moekit::route {
const CpuUnit kAvx2Unit = {"avx2", &route_rows, &gemm};
}
