#include <moekit/kit/open_output.hpp>

#include "tensor_checks.hpp"
#include "text.hpp"

namespace moekit::inline v0 {
using text::concat;

namespace {

Status bad_layout(std::string message, std::string hint = {}) {
  return Status(StatusCode::invalid_argument, "[open_output] " + std::move(message), std::move(hint));
}

bool same_shape(const Tensor& a, const Tensor& b) {
  if (a.rank != b.rank) return false;
  for (int axis = 0; axis < a.rank; ++axis)
    if (a.shape[axis] != b.shape[axis]) return false;
  return true;
}

Status normalize_finalised(const KernelOutputs& given, const Tensor& destination,
                           std::variant<Tensor, UnfinalizedOutput>& out) {
  if (given.tensors.size() != 1)
    return bad_layout(concat("a finalised output is exactly one tensor, got ", given.tensors.size()));
  const Tensor& result = given.tensors[0];
  const auto differs = [](const char* what, const std::string& got, const std::string& wanted) {
    return bad_layout(
        concat("a finalised output must alias its destination, but its ", what, " is ", got, ", not ", wanted));
  };
  if (destination.present()) {
    if (!same_shape(result, destination)) return differs("shape", shape_string(result), shape_string(destination));
    if (result.dtype != destination.dtype) return differs("type", name(result.dtype), name(destination.dtype));
    if (!(result.device == destination.device))
      return differs("device", to_string(result.device), to_string(destination.device));
    if (result.data != destination.data) return differs("address", "another", "the destination's");
  }
  out = result;
  return {};
}

Status check_routes(const Tensor& tensor, const char* what, std::int64_t num_tokens, std::int64_t top_k) {
  if (tensor.numel() != num_tokens * top_k)
    return bad_layout(concat("the ", what, " must have num_tokens * top_k = ", num_tokens, " * ", top_k, " = ",
                             num_tokens * top_k, " elements, got ", shape_string(tensor)));
  return {};
}

Status normalize_deferred(const KernelOutputs& given, std::int64_t num_tokens, std::int64_t top_k,
                          const Tensor& destination, std::variant<Tensor, UnfinalizedOutput>& out) {
  if (destination.present())
    return bad_layout("a deferred output cannot have a destination", "the consumer writes its own output");
  if (!given.is_list || given.tensors.size() != 3)
    return bad_layout(concat("a deferred output is a list of three tensors (GEMM2 rows, weights, map), got ",
                             given.is_list ? "a list of " : "a bare tensor, ", given.tensors.size()));
  const Tensor& rows = given.tensors[0];
  const Tensor& weights = given.tensors[1];
  const Tensor& map = given.tensors[2];
  if (rows.rank != 2) return bad_layout(concat("GEMM2's rows must have rank 2, got ", shape_string(rows)));
  if (map.dtype != DType::i32) return bad_layout(concat("the map must be i32, got ", name(map.dtype)));
  if (Status s = check_routes(weights, "weights", num_tokens, top_k); !s.ok()) return s;
  if (Status s = check_routes(map, "map", num_tokens, top_k); !s.ok()) return s;
  if (!(rows.device == weights.device) || !(rows.device == map.device))
    return bad_layout(concat("GEMM2's rows, weights and map must share a device, got ", to_string(rows.device), ", ",
                             to_string(weights.device), ", ", to_string(map.device)));
  const char* strided = !rows.is_contiguous()      ? "GEMM2's rows"
                        : !weights.is_contiguous() ? "the weights"
                        : !map.is_contiguous()     ? "the map"
                                                   : nullptr;
  if (strided) return bad_layout(concat(strided, " must be contiguous"));

  UnfinalizedOutput open{rows, {}, {}};
  if (Status s = weights.view({num_tokens, top_k}, open.expert_weights); !s.ok()) return s;
  if (Status s = map.view({num_tokens, top_k}, open.expanded_to_permuted); !s.ok()) return s;
  out = open;
  return {};
}

}  // namespace

Status normalize_output(const KernelOutputs& given, bool do_finalize, std::int64_t num_tokens, std::int64_t top_k,
                        const Tensor& destination, std::variant<Tensor, UnfinalizedOutput>& out) {
  if (num_tokens < 0) return bad_layout(concat("num_tokens must be ≥ 0, got ", num_tokens));
  if (top_k <= 0) return bad_layout(concat("top_k must be > 0, got ", top_k));
  if (std::int64_t routes; __builtin_mul_overflow(num_tokens, top_k, &routes))
    return bad_layout(concat("num_tokens * top_k = ", num_tokens, " * ", top_k, " routes do not fit 63 bits"));
  for (const Tensor& tensor : given.tensors)
    if (Status s = tensors::check(tensor, tensor.device, "open_output", "tensors"); !s.ok()) return s;
  return do_finalize ? normalize_finalised(given, destination, out)
                     : normalize_deferred(given, num_tokens, top_k, destination, out);
}

}  // namespace moekit::inline v0
