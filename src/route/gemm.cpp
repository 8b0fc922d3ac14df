// The layer's own router GEMM: checks, and who computes which part.
#include <algorithm>

#include "kit/for_rows.hpp"
#include "route/cpu.hpp"
#include "tensor_checks.hpp"
#include "text.hpp"

namespace moekit::route {
using text::concat;

namespace {

Status check_matrix(const Tensor& matrix, const char* what) {
  if (Status s = tensors::check(matrix, Device{}, "router", what); !s.ok()) return s;
  if (matrix.rank != 2)
    return Status(StatusCode::invalid_shape, concat("[router] ", what, " must have rank 2, got ", shape_string(matrix)),
                  {}, what);
  if (matrix.shape[1] > 1 && matrix.stride[1] != 1)
    return Status(StatusCode::invalid_shape,
                  concat("[router] ", what, " must have column stride 1, got ", matrix.stride[1]), {}, what);
  if (matrix.numel() > 0 && !matrix.data)
    return Status(StatusCode::invalid_argument, concat("[router] ", what, " has no data"), {}, what);
  return {};
}

Status check_operand(const Tensor& matrix, const char* what) {
  if (Status s = check_matrix(matrix, what); !s.ok()) return s;
  if (matrix.dtype != DType::f32 && matrix.dtype != DType::bf16 && matrix.dtype != DType::f16)
    return Status(StatusCode::invalid_dtype,
                  concat("[router] ", what, " must be f32, bf16 or f16, got ", name(matrix.dtype)), {}, what);
  return {};
}

Status check_gemm(const Tensor& hidden, const Tensor& weight, const Tensor& logits) {
  if (Status s = check_operand(hidden, "hidden"); !s.ok()) return s;
  if (Status s = check_operand(weight, "weight"); !s.ok()) return s;
  if (Status s = check_matrix(logits, "logits"); !s.ok()) return s;
  if (logits.dtype != DType::f32)
    return Status(StatusCode::invalid_dtype, concat("[router] logits must be f32, got ", name(logits.dtype)), {},
                  "logits");
  if (hidden.shape[1] != weight.shape[1])
    return Status(StatusCode::invalid_shape,
                  concat("[router] hidden is ", shape_string(hidden), ", weight is ", shape_string(weight),
                         ": their columns must agree"),
                  {}, "weight");
  if (logits.shape[0] != hidden.shape[0] || logits.shape[1] != weight.shape[0])
    return Status(
        StatusCode::invalid_shape,
        concat("[router] logits must be [", hidden.shape[0], ", ", weight.shape[0], "], got ", shape_string(logits)),
        {}, "logits");
  if (logits.shape[0] > 1 && std::abs(logits.stride[0]) < logits.shape[1])
    return Status(
        StatusCode::invalid_shape,
        concat("[router] rows of logits overlap: row stride ", logits.stride[0], ", ", logits.shape[1], " columns"), {},
        "logits");
  for (const auto& [what, operand] : {std::pair{"hidden", &hidden}, std::pair{"weight", &weight}})
    if (tensors::overlap(logits, *operand))
      return Status(StatusCode::invalid_argument, concat("[router] logits overlap ", what),
                    "give them memory of their own", "logits");
  return {};
}

FloatType float_type(DType type) {
  return type == DType::f32 ? FloatType::f32 : type == DType::bf16 ? FloatType::bf16 : FloatType::f16;
}

struct Call {
  const CpuUnit& unit;
  GemmTask task;
  std::int64_t num_rows, num_experts, num_slabs;
  bool by_rows;
};

void run_slab(void* arg, std::int64_t slab) {
  const Call& call = *static_cast<const Call*>(arg);
  const std::int64_t total = call.by_rows ? call.num_rows : call.num_experts;
  // Cuts at multiples of 24 rows or 32 experts keep the blocks whole; bits do not depend on where they are.
  const std::int64_t step = call.by_rows ? 24 : total >= 32 * call.num_slabs ? 32 : 8;
  const std::int64_t units = (total + step - 1) / step;
  const std::int64_t begin = std::min(total, units * slab / call.num_slabs * step);
  const std::int64_t end = std::min(total, units * (slab + 1) / call.num_slabs * step);
  if (begin == end) return;
  call.unit.gemm(call.task,
                 call.by_rows ? GemmRange{begin, end, 0, call.num_experts} : GemmRange{0, call.num_rows, begin, end});
}

}  // namespace

Status gemm_with(const CpuUnit& unit, const Tensor& hidden, const Tensor& weight, const Tensor& logits,
                 const CallContext& context) {
  if (Status s = check_gemm(hidden, weight, logits); !s.ok()) return s;
  const std::int64_t num_rows = logits.shape[0], num_experts = logits.shape[1], depth = hidden.shape[1];
  if (num_rows == 0 || num_experts == 0) return {};
  Call call{unit,
            {hidden.data, float_type(hidden.dtype), hidden.stride[0], weight.data, float_type(weight.dtype),
             weight.stride[0], logits.as<float>(), logits.stride[0], depth},
            num_rows,
            num_experts,
            1,
            num_rows >= 48};
  // Waking threads costs several microseconds: not for less than 256 KiB of weights.
  if (num_rows * num_experts * depth >= 128 << 10) {
    Executor& executor = kit::executor_of(context.stream);
    call.num_slabs = std::max(1, executor.concurrency());
    executor.run(call.num_slabs, &run_slab, &call);
  } else {
    run_slab(&call, 0);
  }
  return {};
}

}  // namespace moekit::route

namespace moekit::inline v0 {

Status router_gemm(const Tensor& hidden, const Tensor& weight, const Tensor& logits, const CallContext& context) {
  return route::gemm_with(route::cpu_unit(), hidden, weight, logits, context);
}

}  // namespace moekit::inline v0
