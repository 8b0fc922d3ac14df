#include <moekit/kit/weight_and_reduce.hpp>

#include <array>
#include <cstring>

#include "enum_values.hpp"
#include "reduce/row_sum.hpp"
#include "tensor_checks.hpp"
#include "text.hpp"

namespace moekit::inline v0 {
using text::concat;

namespace {

constexpr std::int64_t kMaxLocal = 4096;  // experts counted on the stack: nothing is allocated per call

Status bad_shape(std::string message, const char* field) {
  return Status(StatusCode::invalid_shape, "[finalize] " + std::move(message), {}, field);
}

Status check_rows(const Tensor& tensor, const char* what) {
  if (!reduce::can_sum(tensor.dtype))
    return Status(StatusCode::invalid_dtype,
                  concat("[finalize] ", what, " must be f32, bf16 or f16, got ", name(tensor.dtype)), {}, what);
  if (tensor.stride[tensor.rank - 1] != 1 && tensor.shape[tensor.rank - 1] > 1)
    return bad_shape(
        concat("the columns of ", what, " must lie side by side, got stride ", tensor.stride[tensor.rank - 1]), what);
  return {};
}

Status check_output(const Tensor& output) {
  if (output.rank != 2) return bad_shape(concat("output must be [M, K], got ", shape_string(output)), "output");
  return check_rows(output, "output");
}

/// No input is modified.
Status check_over(const Tensor& output, const Tensor& expert_output) {
  if (!tensors::overlap(output, expert_output)) return {};
  return Status(StatusCode::invalid_argument, "[finalize] output overlaps expert_output", "give it memory of its own",
                "output");
}

/// Output, routing and the type of what is summed.
Status check_sum(const Tensor& output, const Tensor& expert_output, const Routing& routing, bool weight_on_input) {
  if (Status s = check_output(output); !s.ok()) return s;
  if (Status s = check_rows(expert_output, "expert_output"); !s.ok()) return s;
  if (Status s = check_over(output, expert_output); !s.ok()) return s;
  if (routing.ids.rank != 2 || routing.ids.shape[0] != output.shape[0])
    return bad_shape(concat("output has ", output.shape[0], " rows, ids are ", shape_string(routing.ids)),
                     "routing.ids");
  if (routing.ids.dtype != DType::i32)
    return Status(StatusCode::invalid_dtype, concat("[finalize] ids must be i32, got ", name(routing.ids.dtype)), {},
                  "routing.ids");
  if (weight_on_input) return {};
  if (routing.weights.rank != 2 || routing.weights.shape[0] != routing.ids.shape[0] ||
      routing.weights.shape[1] != routing.ids.shape[1])
    return bad_shape(concat("ids are ", shape_string(routing.ids), ", weights ", shape_string(routing.weights)),
                     "routing.weights");
  if (routing.weights.dtype != DType::f32)
    return Status(StatusCode::invalid_dtype,
                  concat("[finalize] weights must be f32, got ", name(routing.weights.dtype)), {}, "routing.weights");
  return {};
}

float weight_of(const Routing& routing, std::int64_t t, std::int64_t j, bool weight_on_input) {
  return weight_on_input ? 1.0f : routing.weights.at<float>(t, j);
}

Status apply_no_op(const Tensor& output, const Tensor& expert_output, Tensor& result) {
  if (!output.present()) {
    result = expert_output;
    return {};
  }
  if (Status s = check_output(output); !s.ok()) return s;
  if (expert_output.rank != 2 || expert_output.shape[0] != output.shape[0] || expert_output.shape[1] != output.shape[1])
    return bad_shape(
        concat("NoOp copies [M, K]: output is ", shape_string(output), ", expert_output ", shape_string(expert_output)),
        "expert_output");
  result = output;
  const bool same_type = output.dtype == expert_output.dtype;
  if (output.data == expert_output.data && same_type && output.stride[0] == expert_output.stride[0]) return {};
  if (Status s = check_rows(expert_output, "expert_output"); !s.ok()) return s;
  if (Status s = check_over(output, expert_output); !s.ok()) return s;
  for (std::int64_t t = 0; t < output.shape[0]; ++t) {
    const Tensor from = expert_output.index(t), to = output.index(t);
    if (same_type)  // a copy keeps NaN payloads and signed zeros
      std::memcpy(to.data, from.data, static_cast<std::size_t>(to.shape[0] * bytes(to.dtype)));
    else
      reduce::convert_row(from.data, from.dtype, to.data, to.dtype, to.shape[0], 1.0f);
  }
  return {};
}

Status apply_contiguous(const Tensor& output, const Tensor& expert_output, const Routing& routing,
                        bool weight_on_input) {
  if (expert_output.rank != 2 && expert_output.rank != 3)
    return bad_shape(concat("Contiguous takes [M*k, K] or [M, k, K], got ", shape_string(expert_output)),
                     "expert_output");
  if (Status s = check_sum(output, expert_output, routing, weight_on_input); !s.ok()) return s;
  const std::int64_t M = output.shape[0], K = output.shape[1], k = routing.ids.shape[1];
  const Tensor& in = expert_output;
  const bool fits = in.rank == 2 ? in.shape[0] == M * k && in.shape[1] == K
                                 : in.shape[0] == M && in.shape[1] == k && in.shape[2] == K;
  if (!fits)
    return bad_shape(
        concat("Contiguous takes [", M, "*", k, ", ", K, "] or [", M, ", ", k, ", ", K, "], got ", shape_string(in)),
        "expert_output");
  for (std::int64_t t = 0; t < M; ++t)
    reduce::sum_row(output.index(t), in.dtype, k, [&](std::int64_t j) -> reduce::Term {
      if (routing.ids.at<std::int32_t>(t, j) < 0) return {};
      const Tensor row = in.rank == 2 ? in.index(t * k + j) : in.index(t).index(j);
      return {row.data, weight_of(routing, t, j, weight_on_input)};
    });
  return {};
}

Status apply_naive_batched(std::int64_t rank, const Tensor& output, const Tensor& expert_output, const Routing& routing,
                           bool weight_on_input) {
  if (expert_output.rank != 3)
    return bad_shape(concat("NaiveBatched takes [L, T*D, K], got ", shape_string(expert_output)), "expert_output");
  if (Status s = check_sum(output, expert_output, routing, weight_on_input); !s.ok()) return s;
  const std::int64_t L = expert_output.shape[0], capacity = expert_output.shape[1], k = routing.ids.shape[1];
  if (expert_output.shape[2] != output.shape[1])
    return bad_shape(concat("output has K = ", output.shape[1], ", expert_output K = ", expert_output.shape[2]),
                     "expert_output");
  if (L > kMaxLocal)
    return Status(StatusCode::unsupported,
                  concat("[finalize] NaiveBatched counts up to ", kMaxLocal, " experts, got ", L),
                  "spread them over more ranks, or combine in the dispatcher");

  const auto slot_of = [&](std::int64_t t, std::int64_t j) {  // local expert, or -1
    const std::int64_t e = routing.ids.at<std::int32_t>(t, j) - rank * L;
    return e >= 0 && e < L ? e : -1;
  };
  std::array<std::int64_t, kMaxLocal> used;  // rows of each expert that earlier slots own
  std::fill_n(used.begin(), L, 0);
  for (std::int64_t t = 0; t < output.shape[0]; ++t)
    for (std::int64_t j = 0; j < k; ++j)
      if (const std::int64_t e = slot_of(t, j); e >= 0 && ++used[static_cast<std::size_t>(e)] > capacity)
        return bad_shape(concat("expert ", e, " has more than the ", capacity, " rows that arrived: token ", t,
                                ", slot ", j, " is one too many"),
                         "expert_output");

  std::fill_n(used.begin(), L, 0);
  for (std::int64_t t = 0; t < output.shape[0]; ++t) {
    moekit::reduce::sum_row(output.index(t), expert_output.dtype, k, [&](std::int64_t j) -> moekit::reduce::Term {
      const std::int64_t e = slot_of(t, j);
      if (e < 0) return {};
      std::int64_t row = used[static_cast<std::size_t>(e)];
      for (std::int64_t i = 0; i < j; ++i) row += slot_of(t, i) == e;  // the same expert twice has two rows
      return {expert_output.index(e).index(row).data, weight_of(routing, t, j, weight_on_input)};
    });
    for (std::int64_t j = 0; j < k; ++j)
      if (const std::int64_t e = slot_of(t, j); e >= 0) ++used[static_cast<std::size_t>(e)];
  }
  return {};
}

}  // namespace

Status WeightAndReduce::apply(const Tensor& output, const Tensor& expert_output, const Routing& routing,
                              bool weight_on_input, Tensor& result) const {
  Status status = values::check("finalize", "reduce", kind);
  if (status.ok()) status = tensors::check(output, Device{}, "finalize", "output");
  if (status.ok()) status = tensors::check(expert_output, Device{}, "finalize", "expert_output");
  if (status.ok()) status = tensors::check(routing.ids, Device{}, "finalize", "routing.ids");
  if (status.ok()) status = tensors::check(routing.weights, Device{}, "finalize", "routing.weights");
  if (!status.ok()) return status;
  switch (kind) {
    case Kind::no_op: return apply_no_op(output, expert_output, result);
    case Kind::contiguous: status = apply_contiguous(output, expert_output, routing, weight_on_input); break;
    case Kind::naive_batched:
      status = apply_naive_batched(rank, output, expert_output, routing, weight_on_input);
      break;
    case Kind::delegate:
      return Status(StatusCode::invalid_argument,
                    "[finalize] Delegate cannot be applied: it leaves the choice to finalize",
                    "the dispatcher replaces it by Contiguous, NaiveBatched or a combine of its own", "reduce");
  }
  if (status.ok()) result = output;
  return status;
}

std::string to_string(const WeightAndReduce& reduce) {
  switch (reduce.kind) {
    case WeightAndReduce::Kind::no_op: return "NoOp";
    case WeightAndReduce::Kind::contiguous: return "Contiguous";
    case WeightAndReduce::Kind::naive_batched: return concat("NaiveBatched(", reduce.rank, ")");
    case WeightAndReduce::Kind::delegate: return "Delegate";
  }
  return "unknown";
}

}  // namespace moekit::inline v0
