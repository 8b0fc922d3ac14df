// quantization_config → which quantisation a checkpoint says it has.
#pragma once
#include <string>
#include <string_view>
#include <vector>

#include <moekit/config.hpp>

#include "io/json.hpp"

namespace moekit::io {

/// How quantised matrices are stored. `name` is empty when the config has no quantization_config.
struct QuantScheme {
  std::string_view name;          ///< weights' scheme of quant_from_names: "int8", "fp8_block128"
  DType type = DType::bf16;       ///< of the stored elements
  Granularity granularity{};      ///< of the scales
  std::string_view scale_suffix;  ///< after the weight's tensor name: "_scale", "_scale_inv"
  std::string ignore_key;         ///< where the exceptions stand: "quantization_config.ignore"
  std::vector<std::string> ignore;

  bool present() const { return !name.empty(); }
  /// Is this module ("model.layers.0.mlp.experts.3.up_proj") among the exceptions? An entry is a module name or part
  /// of one, in whole components, or "re:" and a regular expression that matches from the beginning.
  /// Throws Error unsupported for an expression that cannot be read.
  bool ignores(const std::string& module) const;
  /// Rows or columns of the scales of `extent` rows or columns.
  static std::int64_t blocks(std::int64_t extent, std::int64_t block) {
    return block < 0 ? 1 : extent / block + (extent % block != 0);
  }
};

/// From the top of config.json or, failing that, its text_config. Throws Error unsupported for every scheme that is
/// not read, by its name.
QuantScheme read_quant_scheme(const Fields& root, const Fields& text);

}  // namespace moekit::io
