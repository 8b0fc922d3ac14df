#include <moekit/checkpoint.hpp>

#include <filesystem>

#include "io/layer_config.hpp"
#include "io/layer_tensors.hpp"
#include "text.hpp"

namespace moekit::inline v0 {
using text::concat;

struct Checkpoint::Impl {
  explicit Impl(const std::string& folder) : directory(folder), tensors(folder) {}

  std::string directory, model_type, family;
  io::ModelTensors tensors;
  std::vector<io::LayerTensors> found;
  std::vector<CheckpointLayer> layers;

  std::size_t position(std::int64_t index) const;
};

namespace {

/// The type that hidden states have beside quantised weights.
DType activation_type(const io::Fields& root, const io::Fields& text) {
  std::optional<DType> type;  // the first one counts; the others must at least be strings
  for (const io::Fields* fields : {&text, &root})
    for (const char* key : {"dtype", "torch_dtype"}) {
      const auto value = fields->string(key);
      if (!value || type) continue;
      if (*value == "bfloat16") type = DType::bf16;
      if (*value == "float16") type = DType::f16;
      if (*value == "float32") type = DType::f32;
      if (!type) fields->fail(key, concat("is \"", *value, "\", known are bfloat16, float16 and float32"));
    }
  return type.value_or(DType::bf16);
}

void check_folder(const std::string& directory) {
  std::error_code ignored;
  const std::filesystem::path path(directory);
  if (std::filesystem::is_directory(path, ignored)) return;
  if (!std::filesystem::exists(path, ignored))
    throw Error(StatusCode::bad_file, concat("[checkpoint] ", directory, ": there is no such folder"));
  if (path.extension() == ".gguf")
    throw Error(StatusCode::unsupported, concat("[checkpoint] ", directory, ": GGUF files are not read yet"),
                "use the safetensors form of the model");
  throw Error(StatusCode::bad_file, concat("[checkpoint] ", directory, ": is a file"),
              "give the folder that holds config.json and model.safetensors");
}

}  // namespace

std::size_t Checkpoint::Impl::position(std::int64_t index) const {
  std::string known;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    if (layers[i].index == index) return i;
    if (i < 100) known += concat(i ? " " : "", layers[i].index);
  }
  throw Error(StatusCode::invalid_argument,
              concat("[checkpoint] ", directory, ": layer ", index, " is not one of its MoE layers"),
              concat("there are: ", known), "layer");
}

Checkpoint Checkpoint::open(const std::string& directory) {
  check_folder(directory);
  const std::string config_file = directory + "/config.json";
  std::error_code ignored;
  // Weights first where there is no config: a folder of GGUF files has none, and its name is the better answer.
  if (!std::filesystem::exists(config_file, ignored)) {
    const io::ModelTensors tensors(directory);
    throw Error(StatusCode::bad_file, concat("[checkpoint] ", directory, ": config.json is missing"));
  }
  const io::Json json = io::read_json(config_file);
  const io::Fields root(json, config_file);
  const io::FamilyChoice choice = io::choose_family(root);
  const io::QuantScheme scheme = io::read_quant_scheme(root, choice.config);
  const io::ModelConfig config = io::read_model_config(*choice.family, choice.config);

  auto impl = std::make_shared<Impl>(directory);
  impl->model_type = choice.model_type;
  impl->family = choice.family->name;
  const io::ModelView model{impl->tensors, *choice.family, scheme, activation_type(root, choice.config), config_file};
  for (const std::int64_t index : config.moe_layers) {
    io::LayerTensors layer = io::find_layer_tensors(model, config.layer, index);
    throw_if_failed(validate(layer.config));
    impl->layers.push_back({index, layer.module, layer.config, layer.weight_bytes});
    impl->found.push_back(std::move(layer));
  }
  Checkpoint out;
  out.impl_ = std::move(impl);
  return out;
}

const std::string& Checkpoint::directory() const { return impl_->directory; }
const std::string& Checkpoint::model_type() const { return impl_->model_type; }
const std::string& Checkpoint::family() const { return impl_->family; }
const std::vector<CheckpointLayer>& Checkpoint::layers() const { return impl_->layers; }
const CheckpointLayer& Checkpoint::layer(std::int64_t index) const { return impl_->layers[impl_->position(index)]; }

WeightsSource Checkpoint::source(std::int64_t index) const {
  const io::LayerTensors& layer = impl_->found[impl_->position(index)];
  io::check_scales(layer);
  WeightsSource out;
  // The function keeps the mapping alive for the other tensors too.
  out.expert = [keep = impl_, &layer](std::int64_t e, CanonicalExpert& expert) -> Status {
    if (e < 0 || e >= static_cast<std::int64_t>(layer.experts.size()))
      return Status(StatusCode::invalid_argument,
                    concat("[checkpoint] ", layer.module, ": expert ", e, " of ", layer.experts.size()));
    expert = layer.experts[static_cast<std::size_t>(e)];
    return {};
  };
  out.router = layer.router;
  out.shared = layer.shared;
  return out;
}

}  // namespace moekit::inline v0
