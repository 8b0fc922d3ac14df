// What a verb works on: layers of a checkpoint, or one generated from a shape string.
#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include <moekit/checkpoint.hpp>

namespace moekit::cli {

struct SubjectLayer {
  std::int64_t index = 0;
  std::string module;  ///< empty for shapes
  LayerConfig config;
  std::int64_t stored_bytes = 0;
};

/// Where a setting of a shape string goes: the flag of that name, as yet without a value.
struct Setting {
  const char* key;
  std::variant<std::optional<std::string>*, std::optional<std::vector<std::int64_t>>*, std::optional<int>*,
               std::optional<std::uint64_t>*>
      flag;
};

class Subject {
 public:
  /// A folder, or a shape string. Throws Error (bad_file, unsupported) and UsageError (neither a folder nor a shape).
  static Subject open(const std::string& text);
  /// A folder only.
  static Subject open_checkpoint(const std::string& directory);

  const std::string& text() const { return text_; }
  const Checkpoint* checkpoint() const { return checkpoint_ ? &*checkpoint_ : nullptr; }
  /// All layers, or the one asked for; UsageError for a layer that does not exist or a shape that has no layers.
  std::vector<SubjectLayer> layers(std::optional<std::int64_t> wanted = {}) const;
  /// The layer asked for, or the first.
  SubjectLayer layer(std::optional<std::int64_t> wanted) const { return layers(wanted).front(); }
  /// Its weights: of the checkpoint, or seeded ones of `config` for a shape.
  WeightsSource source(const SubjectLayer& layer, const LayerConfig& config, std::uint64_t seed) const;
  /// Gives what stands after @ in a shape string to the flags of those names that the command line left open. Throws
  /// UsageError for a value that the flag would not take, and for a setting that `verb` does not have: none is ignored.
  /// Weights and activations are in the layer's configuration already.
  void settle(const char* verb, const std::vector<Setting>& flags) const;

 private:
  std::string text_;
  std::optional<Checkpoint> checkpoint_;
  std::optional<LayerConfig> shape_;
  std::map<std::string, std::string> settings_;
};

/// config with other schemes; hidden rows and output take the activations' type where that is a float type.
LayerConfig with_schemes(LayerConfig config, const std::optional<std::string>& weights,
                         const std::optional<std::string>& activations);
/// All types f32: the exact form of a float layer.
LayerConfig with_float_type(LayerConfig config, DType type);

/// Bytes of one expert's matrices and f32 scales, and of the shared expert.
double expert_bytes(const LayerConfig& config);
double shared_bytes(const LayerConfig& config);

/// What one call must at least read, write and compute.
struct Work {
  std::int64_t experts_hit = 0, routes = 0;
  double bytes = 0;  ///< weights of the experts that are hit, shared expert, rows in and out, logits
  double flops = 0;
};
Work work_of(const LayerConfig& config, const Tensor& ids);

}  // namespace moekit::cli
