#include "subject.hpp"

#include <algorithm>
#include <filesystem>

#include "console.hpp"
#include "exit_code.hpp"
#include "generate.hpp"
#include "shapes.hpp"
#include "values.hpp"

namespace moekit::cli {
namespace {

bool looks_like_a_path(const std::string& text) {
  return text.find('/') != std::string::npos || text.find('.') != std::string::npos || text.empty();
}

/// Which piece of a shape string that could not be read names a scheme that is misspelt or comes later.
void check_schemes(const std::string& text) {
  const std::size_t at = std::min(text.find('@'), text.size()), colon = text.find(':');
  if (colon < at) check_weights_scheme(text.substr(colon + 1, at - colon - 1));
  auto setting = [&](const std::string& key) {
    for (const char before : {'@', ','}) {
      const std::size_t begin = text.find(before + key + "=");
      if (begin == std::string::npos) continue;
      const std::size_t from = begin + key.size() + 2;
      return text.substr(from, std::min(text.find(',', from), text.size()) - from);
    }
    return std::string();
  };
  if (const std::string name = setting("weights"); !name.empty()) check_weights_scheme(name);
  if (const std::string name = setting("activations"); !name.empty()) check_activations_scheme(name);
}

bool is_there(const std::string& path) {
  std::error_code ignored;
  return std::filesystem::exists(path, ignored);
}

}  // namespace

Subject Subject::open_checkpoint(const std::string& directory) {
  Subject out;
  out.text_ = directory;
  while (out.text_.size() > 1 && out.text_.back() == '/') out.text_.pop_back();
  if (is_there(directory) && !std::filesystem::is_directory(directory))
    throw Error(StatusCode::bad_file, "[checkpoint] " + directory + " is a file",
                "give the folder that holds config.json and model.safetensors");
  out.checkpoint_ = Checkpoint::open(out.text_);
  return out;
}

Subject Subject::open(const std::string& text) {
  if (is_there(text)) return open_checkpoint(text);
  Subject out;
  out.text_ = text;
  ShapeString parsed;
  const Status status = parse_shape(text, parsed);
  if (!status.ok()) {
    if (looks_like_a_path(text.substr(0, text.find('@'))))
      throw Error(
          StatusCode::bad_file, "[checkpoint] there is no folder " + text,
          "give a folder that holds config.json and model.safetensors, or a shape such as e128k8h2048i768:bf16");
    check_schemes(text);
    throw Error(status);
  }
  out.shape_ = parsed.config;
  out.settings_ = parsed.settings;
  return out;
}

std::vector<SubjectLayer> Subject::layers(std::optional<std::int64_t> wanted) const {
  std::vector<SubjectLayer> out;
  if (shape_) {
    if (wanted) throw UsageError("--layer goes with a checkpoint; " + text_ + " is a shape");
    out.push_back({0, "", *shape_, 0});
    return out;
  }
  for (const CheckpointLayer& layer : checkpoint_->layers())
    if (!wanted || *wanted == layer.index) out.push_back({layer.index, layer.module, layer.config, layer.weight_bytes});
  if (out.empty() && wanted) static_cast<void>(checkpoint_->layer(*wanted));  // throws, listing what exists
  if (out.empty()) throw Error(StatusCode::unsupported, "[checkpoint] " + text_ + " has no MoE layer", "");
  return out;
}

WeightsSource Subject::source(const SubjectLayer& layer, const LayerConfig& config, std::uint64_t seed) const {
  return checkpoint_ ? checkpoint_->source(layer.index) : generated_weights(config, seed);
}

LayerConfig with_schemes(LayerConfig config, const std::optional<std::string>& weights,
                         const std::optional<std::string>& activations) {
  if (weights) check_weights_scheme(*weights);
  if (activations) check_activations_scheme(*activations);
  if (!weights && !activations) return config;
  const float divisor = config.quant.int8_divisor;
  const std::string w = weights ? *weights : weights_scheme(config.quant);
  throw_if_failed(quant_from_names(w, activations ? *activations : "", config.quant));
  config.quant.int8_divisor = divisor;
  if (is_float(config.quant.a1.type)) config.dtype = config.quant.a1.type;
  return config;
}

LayerConfig with_float_type(LayerConfig config, DType type) {
  config.dtype = type;
  if (is_float(config.quant.w1.type)) config.quant.w1.type = config.quant.w2.type = type;
  config.quant.a1 = config.quant.a2 = {type, {}};
  return config;
}

namespace {

/// Reads one setting's text as its flag would be read.
class SettingReader {
 public:
  SettingReader(const std::string& shape, const std::string& key, const std::string& text)
      : shape_(shape), key_(key), text_(text) {}

  void operator()(std::optional<std::string>* flag) const {
    if (text_.empty()) refuse("needs a value");
    if (!*flag) *flag = text_;
  }
  void operator()(std::optional<std::vector<std::int64_t>>* flag) const {
    std::vector<std::int64_t> values;
    for (std::size_t begin = 0; begin <= text_.size();) {
      const std::size_t end = std::min(text_.find(',', begin), text_.size());
      values.push_back(number(text_.substr(begin, end - begin), 1, kMostTokens));
      begin = end + 1;
    }
    if (!*flag) *flag = std::move(values);
  }
  void operator()(std::optional<int>* flag) const {
    const auto value = static_cast<int>(number(text_, 0, kMostThreads));
    if (!*flag) *flag = value;
  }
  void operator()(std::optional<std::uint64_t>* flag) const {
    const auto value = static_cast<std::uint64_t>(number(text_, 0, INT64_MAX));
    if (!*flag) *flag = value;
  }

 private:
  std::int64_t number(const std::string& piece, std::int64_t least, std::int64_t most) const {
    const std::string complaint = whole_complaint(piece, least, most);
    if (!complaint.empty()) refuse(complaint);
    return *whole_number(piece);
  }
  [[noreturn]] void refuse(const std::string& why) const {
    throw UsageError("shape " + shape_ + ": setting " + key_ + ": " + why);
  }
  const std::string &shape_, &key_, &text_;
};

}  // namespace

void Subject::settle(const char* verb, const std::vector<Setting>& flags) const {
  for (const auto& [key, value] : settings_) {
    if (key == "weights" || key == "activations") continue;
    const auto found =
        std::find_if(flags.begin(), flags.end(), [&name = key](const Setting& flag) { return name == flag.key; });
    if (found != flags.end()) {
      std::visit(SettingReader(text_, key, value), found->flag);
      continue;
    }
    std::string known;
    for (const Setting& flag : flags) known += std::string(" ") + flag.key;
    throw UsageError("shape " + text_ + ": setting " + key +
                     (key == "layer" ? std::string(" goes with a checkpoint") : std::string(" is not for ") + verb) +
                     "; " + verb + " takes: weights activations" + known);
  }
}

namespace {

double matrix_bytes(const QuantDesc& desc, std::int64_t rows, std::int64_t columns) {
  const double values = static_cast<double>(rows) * static_cast<double>(columns) * bits(desc.type) / 8;
  if (is_float(desc.type)) return values;
  auto blocks = [](std::int64_t extent, std::int64_t block) { return block < 0 ? 1 : (extent + block - 1) / block; };
  return values +
         4.0 * static_cast<double>(blocks(rows, desc.granularity.rows) * blocks(columns, desc.granularity.cols));
}

}  // namespace

double expert_bytes(const LayerConfig& config) {
  return matrix_bytes(config.quant.w1, config.w1_rows(), config.hidden) +
         matrix_bytes(config.quant.w2, config.hidden, config.intermediate);
}

double shared_bytes(const LayerConfig& config) {
  const std::int64_t width = config.shared.intermediate;
  if (width == 0) return 0;
  const QuantDesc plain{config.dtype, {}};
  const bool quantised = config.shared.quantised;
  return matrix_bytes(quantised ? config.quant.w1 : plain, config.shared.activation.gated ? 2 * width : width,
                      config.hidden) +
         matrix_bytes(quantised ? config.quant.w2 : plain, config.hidden, width);
}

Work work_of(const LayerConfig& config, const Tensor& ids) {
  Work out;
  std::vector<bool> hit(static_cast<std::size_t>(config.num_experts));
  for (std::int64_t t = 0; t < ids.shape[0]; ++t)
    for (std::int64_t j = 0; j < ids.shape[1]; ++j) {
      const std::int32_t e = ids.at<std::int32_t>(t, j);
      if (e < 0 || e >= config.num_experts) continue;
      ++out.routes;
      if (!hit[static_cast<std::size_t>(e)]) ++out.experts_hit;
      hit[static_cast<std::size_t>(e)] = true;
    }
  const double M = static_cast<double>(ids.shape[0]), K = static_cast<double>(config.hidden);
  out.bytes = static_cast<double>(out.experts_hit) * expert_bytes(config) + shared_bytes(config) +
              2 * M * K * static_cast<double>(bytes(config.dtype)) + 4 * M * static_cast<double>(config.num_experts);
  const double per_route =
      2 * K * static_cast<double>(config.w1_rows()) + 2 * K * static_cast<double>(config.intermediate);
  const double width = static_cast<double>(config.shared.intermediate) * (config.shared.activation.gated ? 3 : 2);
  out.flops = static_cast<double>(out.routes) * per_route + M * 2 * K * width;
  return out;
}

}  // namespace moekit::cli
