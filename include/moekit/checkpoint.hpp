// Published checkpoints: which MoE layers a folder holds, and their weights.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include <moekit/config.hpp>
#include <moekit/weights.hpp>

namespace moekit::inline v0 {

/// One MoE layer of a checkpoint, checked against config.json: every tensor is there and has the shape it must have.
struct CheckpointLayer {
  std::int64_t index = 0;  ///< decoder layer, from 0
  std::string module;      ///< "model.layers.3.mlp": the module path that golden files use
  LayerConfig config;      ///< dtype and quant as stored (f32 files: f32)
  std::int64_t weight_bytes = 0;
};

/// A folder with config.json and model.safetensors (or model.safetensors.index.json and its shards), memory-mapped.
/// Tensors stay mapped while any copy of this object or a WeightsSource of it lives.
class MOEKIT_API Checkpoint {
 public:
  /// Throws Error: bad_file (what is malformed, missing or inconsistent, by file and tensor), unsupported (a family or
  /// format that is not read yet, by name; an unknown family lists what the config says and the nearest family).
  static Checkpoint open(const std::string& directory);

  const std::string& directory() const;
  const std::string& model_type() const;
  const std::string& family() const;  ///< row of the table of families
  const std::vector<CheckpointLayer>& layers() const;
  const CheckpointLayer& layer(
      std::int64_t index) const;  ///< by decoder layer; throws invalid_argument that lists what exists
  /// Views into the mapped files. Also checks the values that only reading shows (scales must be finite).
  WeightsSource source(std::int64_t index) const;

 private:
  struct Impl;
  std::shared_ptr<const Impl> impl_;
};

}  // namespace moekit::inline v0
