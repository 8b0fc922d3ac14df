// What every experts implementation does with the arguments of a call before it computes: check them, find the local
// slot of a route, read activations and static scales. Nothing here allocates unless it fails.
#pragma once
#include <moekit/kit/experts.hpp>
#include <moekit/kit/workspace.hpp>

#include "quant/quantise.hpp"

namespace moekit::experts {

/// Sizes of the call and what fits together; every failure names both sides. Does not look at workspaces' contents.
/// After call_size(), which looks at where the tensors lie.
Status check_call(const ExpertsArgs& args, ActivationFormat format, const ExpertsWorkspace& needed, ProblemSize& size);
/// Where every tensor lies, and the sizes, before the workspace is known.
Status call_size(const ExpertsArgs& args, ProblemSize& size);

/// What implementations that read any scheme of this project say to a problem's types, activation and device.
Verdict check_problem(const Problem& problem, ActivationFormat format);

/// What experts built for `shape` say to the sizes of a problem's batched dispatcher.
Verdict check_batched(const Problem& problem, const std::optional<BatchedShape>& shape);

/// Type of experts' output: what is demanded, else f32.
inline DType output_type(const Problem& problem) { return problem.out_dtype.value_or(DType::f32); }

/// How rows arrive for a problem's scheme: quantised as a1 says, or as the caller has them.
InputSpec input_spec(const Problem& problem);

/// Local slot of an id, or -1: not routed, out of range, or not here.
inline std::int64_t local_slot(std::int32_t id, const ExpertsArgs& args) {
  const std::int64_t L = args.weights.spec.num_local;
  std::int64_t slot = id;
  if (args.expert_map != nullptr && args.routing.id_space == IdSpace::physical) {
    if (id < 0 || id >= args.expert_map->shape[0]) return -1;
    slot = args.expert_map->as<const std::int32_t>()[id * args.expert_map->stride[0]];
  }
  return slot >= 0 && slot < L ? slot : -1;
}

inline bool quantises_h(const ExpertsArgs& args) {
  return args.quant != nullptr && !is_float(args.quant->spec().a2.type);
}
/// How h of (slot, row) is quantised; quantises_h() holds. A static scale is one value, one per local expert [L], or
/// one per row [M, 1].
quant::RowScheme h_scheme(const ExpertsArgs& args, std::int64_t slot, std::int64_t row);

/// One row of activations, element by element, dequantised in f64. Standard: `row` of [M, K]; batched: `row` of `slot`.
class ActivationRow {
 public:
  ActivationRow(const ExpertsArgs& args, std::int64_t slot, std::int64_t row);
  double operator[](std::int64_t k) const {
    const double value = numeric::load_f32(data_.data, data_.dtype, row_offset_ + k * data_.stride[data_.rank - 1]);
    return scale_ == nullptr ? value : value * scale_[quant::scale_index(k, group_) * scale_stride_];
  }

 private:
  Tensor data_;
  std::int64_t row_offset_ = 0;
  const float* scale_ = nullptr;
  std::int64_t scale_stride_ = 0, group_ = -1;
};

}  // namespace moekit::experts
