// The routing kernels for any processor.
#include "route/gemm_kernel.hpp"
#include "route/rows_kernel.hpp"

namespace moekit::route {
const CpuUnit kPortableUnit = {"portable", &route_rows, &gemm};
}
