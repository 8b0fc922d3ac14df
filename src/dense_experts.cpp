#include "dense_experts.hpp"

#include <algorithm>
#include <cmath>

#include "quant/numeric.hpp"

namespace moekit::inline v0 {

DenseExperts::DenseExperts(Parts parts)
    : parts_(std::move(parts)), kernel_(parts_.prepare_finalize, parts_.experts, nullptr, parts_.problem) {}

std::shared_ptr<const DenseExperts> DenseExperts::bound(const WeightsView& weights, const Tensor& gate_vector,
                                                        const QuantConfig* quant) const {
  auto out = std::make_shared<DenseExperts>(parts_);
  out->weights_ = weights;
  out->gate_vector_ = gate_vector;
  out->quant_ = quant;
  return out;
}

std::size_t DenseExperts::workspace_bytes(std::int64_t max_tokens) const {
  WorkspaceCursor cursor({});
  cursor.take(static_cast<std::size_t>(max_tokens) * sizeof(std::int32_t));
  cursor.take(static_cast<std::size_t>(max_tokens) * sizeof(float));
  return cursor.used() + kernel_.workspace_bytes(max_tokens);
}

/// σ(x · g), f32, in ascending order of K whatever M is.
void DenseExperts::gate_weights(const Tensor& hidden, float* weights) const {
  const float* gate = gate_vector_.as<float>();
  for (std::int64_t t = 0; t < hidden.rows(); ++t) {
    const Tensor row = hidden.index(t);
    float sum = 0;
    for (std::int64_t c = 0; c < row.shape[0]; ++c)
      sum += numeric::load_f32(row.data, row.dtype, c * row.stride[0]) * gate[c];
    weights[t] = 1.0f / (1.0f + std::exp(-sum));
  }
}

Status DenseExperts::apply(const Tensor& hidden, const Tensor& output, const CallContext& context) const {
  const std::int64_t num_tokens = hidden.rows();
  WorkspaceCursor cursor(context.workspace);
  const Bytes ids = cursor.take(static_cast<std::size_t>(num_tokens) * sizeof(std::int32_t));
  const Bytes weights = cursor.take(static_cast<std::size_t>(num_tokens) * sizeof(float));
  const Bytes rest = cursor.take(kernel_.workspace_bytes(num_tokens));
  if (!cursor.fits())
    return Status(StatusCode::workspace_too_small, "[shared] the workspace is too small for the shared experts");

  std::fill_n(reinterpret_cast<std::int32_t*>(ids.data), num_tokens, 0);
  auto* factors = reinterpret_cast<float*>(weights.data);
  if (gate_vector_.present())
    gate_weights(hidden, factors);
  else
    std::fill_n(factors, num_tokens, 1.0f);

  KernelInput in;
  in.hidden = hidden;
  in.routing = {Tensor(ids.data, DType::i32, {num_tokens, 1}), Tensor(weights.data, DType::f32, {num_tokens, 1}),
                IdSpace::local};
  in.weights = weights_;
  in.quant = quant_;
  in.activation = parts_.activation;
  KernelOutput out;
  out.output = output;
  CallContext inner = context;
  inner.workspace = rest;
  inner.ubatch = nullptr;
  return kernel_.forward(in, out, inner);
}

}  // namespace moekit::inline v0
