// Rows of a weight matrix as numbers: q · s in f32, exactly as src/quant defines it.
#pragma once
#include <moekit/kit/pack_format.hpp>

#include "quant/quantise.hpp"

namespace moekit::experts {

/// A matrix [rows, cols] with its scales (absent for float types).
struct WeightMatrix {
  Tensor data, scale;
  Granularity block{};

  float operator()(std::int64_t r, std::int64_t c) const {
    const float code = numeric::load_f32(data.data, data.dtype, r * data.stride[0] + c * data.stride[1]);
    if (!scale.present()) return code;
    return code * scale.at<const float>(quant::scale_index(r, block.rows), quant::scale_index(c, block.cols));
  }
  template <class T>
  void row(std::int64_t r, T* out) const {
    for (std::int64_t c = 0; c < data.shape[1]; ++c) out[c] = (*this)(r, c);
  }
};

/// One expert with its parts in canonical form (CanonicalLayout::view).
struct ExpertMatrices {
  ExpertMatrices(const WeightsSpec& spec, const CanonicalExpert& e)
      : gate{e.gate, e.gate_scale, spec.w1.granularity},
        up{e.up, e.up_scale, spec.w1.granularity},
        down{e.down, e.down_scale, spec.w2.granularity},
        gate_bias(e.gate_bias.as<const float>()),
        up_bias(e.up_bias.as<const float>()),
        down_bias(e.down_bias.as<const float>()) {}
  WeightMatrix gate, up, down;
  const float *gate_bias, *up_bias, *down_bias;  ///< null = none
};

}  // namespace moekit::experts
