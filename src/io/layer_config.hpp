// config.json + a row of the table of families → what every MoE layer is.
#pragma once
#include <cstdint>
#include <vector>

#include <moekit/config.hpp>

#include "io/families.hpp"

namespace moekit::io {

struct ModelConfig {
  LayerConfig layer;                     ///< of all MoE layers; dtype and quant are the tensors' business
  std::vector<std::int64_t> moe_layers;  ///< decoder layers that are MoE, ascending, at least one
};

/// Throws Error: bad_file for missing, contradictory or impossible values, by key; unsupported for values that mean a
/// rule that is not known here.
ModelConfig read_model_config(const Family& family, const Fields& config);

/// Activation of a hidden_act name. Throws Error unsupported, listing what there is.
ActivationKind activation_from_name(const std::string& name, const Fields& config, std::string_view key);

}  // namespace moekit::io
