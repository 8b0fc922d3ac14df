#include <moekit/kit/problem.hpp>

#include "enum_values.hpp"
#include "text.hpp"

namespace moekit::inline v0 {
using text::concat;

const char* name(ActivationFormat format) {
  switch (format) {
    case ActivationFormat::standard: return "standard";
    case ActivationFormat::batched_experts: return "batched_experts";
  }
  return "unknown format";
}

WeightsSpec weights_spec(const LayerConfig& config, std::int64_t num_local) {
  WeightsSpec spec;
  spec.num_local = num_local;
  spec.hidden = config.hidden;
  spec.intermediate = config.intermediate;
  spec.gated = config.activation.gated;
  spec.w1 = config.quant.w1;
  spec.w2 = config.quant.w2;
  spec.w1_bias = config.w1_bias;
  spec.w2_bias = config.w2_bias;
  return spec;
}

Status ProblemSize::from(const Tensor& activations, const WeightsSpec& weights, const Tensor& ids, ProblemSize& out) {
  const auto bad = [](std::string message, const char* field) {
    return Status(StatusCode::invalid_shape, std::move(message), {}, field);
  };
  if (activations.rank != 2 && activations.rank != 3)
    return bad(concat("[experts] activations must be [M, K] or [L, T*D, K], got ", shape_string(activations)),
               "activations");
  if (ids.rank != 2) return bad(concat("[experts] ids must be [M, k], got ", shape_string(ids)), "routing.ids");

  const bool batched = activations.rank == 3;
  const std::int64_t rows = activations.shape[batched ? 1 : 0];
  const std::int64_t hidden = activations.shape[batched ? 2 : 1];
  if (hidden != weights.hidden)
    return bad(concat("[experts] activations have K = ", hidden, ", the weights K = ", weights.hidden), "activations");
  if (batched && activations.shape[0] != weights.num_local)
    return bad(
        concat("[experts] activations are for ", activations.shape[0], " experts, the weights for ", weights.num_local),
        "activations");
  if (!batched && ids.shape[0] != rows)
    return bad(concat("[experts] ", rows, " rows of activations, but ids for ", ids.shape[0], " rows"), "routing.ids");
  out = {weights.num_local, rows, weights.w1_rows(), weights.hidden, ids.shape[1]};
  return {};
}

std::string to_string(const InputSpec& spec) {
  if (spec.deferred) return concat(name(spec.dtype), ", quantised by the experts");
  if (!spec.quantised()) return name(spec.dtype);
  static constexpr const char* kLayouts[] = {"", ", scales token-major", ", scales packed ue8m0"};
  std::string out = concat(name(spec.dtype), " ", to_string(spec.granularity));
  if (spec.static_scale) out += ", static";
  if (spec.dtype == DType::i8 && spec.int8_divisor != 127.0f) out += concat(", absmax/", spec.int8_divisor);
  return out + (values::is_named(spec.scale_layout) ? kLayouts[static_cast<std::size_t>(spec.scale_layout)]
                                                    : ", scales in an unknown layout");
}

std::string to_string(const Problem& problem) {
  LayerConfig shape;
  shape.num_experts = problem.num_experts;
  shape.top_k = problem.size.k;
  shape.hidden = problem.weights.hidden;
  shape.intermediate = problem.weights.intermediate;
  shape.quant = problem.quant;
  std::string out = concat(shape_string(shape), " M=", problem.size.M);
  if (problem.weights.num_local != problem.num_experts) out += concat(" L=", problem.weights.num_local);
  if (problem.format == ActivationFormat::batched_experts) out += " batched";
  return out;
}

}  // namespace moekit::inline v0
