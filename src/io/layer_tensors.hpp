// The tensors of one MoE layer, found, checked against the config and described by strides.
#pragma once
#include <string>
#include <vector>

#include <moekit/weights.hpp>

#include "io/families.hpp"
#include "io/quant_scheme.hpp"
#include "io/safetensors.hpp"

namespace moekit::io {

struct LayerTensors {
  std::int64_t index = 0;
  std::string module;
  LayerConfig config;  ///< with dtype, quant and shared.quantised as the file has them
  std::vector<CanonicalExpert> experts;
  RouterTensors router;
  SharedTensors shared;
  std::vector<const StoredTensor*> scales;  ///< to be read once before they are used
  std::int64_t weight_bytes = 0;
};

/// What all layers of a checkpoint have in common.
struct ModelView {
  const ModelTensors& tensors;
  const Family& family;
  const QuantScheme& scheme;
  DType activations = DType::bf16;  ///< of hidden states beside quantised weights: the config's dtype
  std::string config_file;          ///< for messages
};

/// Throws Error: bad_file for missing, surplus or misshapen tensors and for types that contradict the config.
LayerTensors find_layer_tensors(const ModelView& model, const LayerConfig& config, std::int64_t index);

/// Throws Error bad_file naming the tensor and the position of the first scale that is not finite.
void check_scales(const LayerTensors& layer);

}  // namespace moekit::io
