// Quantisation values, and every question that the pipeline asks about a scheme.
#pragma once
#include <optional>

#include <moekit/config.hpp>

namespace moekit::inline v0 {

/// Values that belong to the weights and move with their expert. Absent = the scheme has none. Weight scales and
/// biases live in the pack beside their matrix; here they appear for kit users who keep them apart.
struct QuantTensors {
  Tensor a1_scale, a2_scale;    ///< static activation scales, f32: [1], per expert [L], or per row [rows, 1]
  Tensor a1_gscale, a2_gscale;  ///< global activation scales
  Tensor w1_scale, w2_scale;    ///< [L, N, groups], [L, K, groups]
  Tensor w1_zp, w2_zp;
  Tensor w1_bias, w2_bias;      ///< [L, N], [L, K]
  Tensor g1_alphas, g2_alphas;  ///< per-expert factors of a GEMM's result
};

/// Spec and values together answer every accessor that experts and dispatchers may need.
class QuantConfig {
 public:
  QuantConfig() = default;
  MOEKIT_API QuantConfig(const QuantSpec& spec, const QuantTensors& tensors);  ///< throws Error if they do not fit

  const QuantSpec& spec() const { return spec_; }
  const QuantTensors& tensors() const { return tensors_; }

  /// Type that activations are quantised to; absent if they are not.
  MOEKIT_API std::optional<DType> quant_dtype() const;
  /// Block of the weights' scales if it is a true block ({128,128}); absent otherwise.
  MOEKIT_API std::optional<Granularity> block_shape() const;
  MOEKIT_API bool per_act_token_quant() const;
  MOEKIT_API bool per_out_ch_quant() const;
  const Tensor& a1_scale() const { return tensors_.a1_scale; }
  const Tensor& a2_scale() const { return tensors_.a2_scale; }
  const Tensor& a1_gscale() const { return tensors_.a1_gscale; }
  const Tensor& a2_gscale() const { return tensors_.a2_gscale; }
  const Tensor& w1_scale() const { return tensors_.w1_scale; }
  const Tensor& w2_scale() const { return tensors_.w2_scale; }
  const Tensor& w1_zp() const { return tensors_.w1_zp; }
  const Tensor& w2_zp() const { return tensors_.w2_zp; }
  const Tensor& w1_bias() const { return tensors_.w1_bias; }
  const Tensor& w2_bias() const { return tensors_.w2_bias; }
  const Tensor& g1_alphas() const { return tensors_.g1_alphas; }
  const Tensor& g2_alphas() const { return tensors_.g2_alphas; }

 private:
  QuantSpec spec_{};
  QuantTensors tensors_{};
};

}  // namespace moekit::inline v0
