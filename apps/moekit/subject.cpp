#include "subject.hpp"

#include <algorithm>
#include <cstdlib>
#include <filesystem>

#include "console.hpp"
#include "exit_code.hpp"
#include "generate.hpp"
#include "shapes.hpp"
#include "spelling.hpp"

namespace moekit::cli {
namespace {

bool looks_like_a_path(const std::string& text) {
  return text.find('/') != std::string::npos || text.find('.') != std::string::npos || text.empty();
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
    throw Error(status);
  }
  out.shape_ = parsed.config;
  out.settings_ = parsed.settings;
  const std::vector<std::string> known{"tokens",  "weights",     "activations", "impl",  "vs",  "device",
                                       "routing", "determinism", "threads",     "layer", "peer"};
  for (const auto& [key, value] : out.settings_)
    if (std::find(known.begin(), known.end(), key) == known.end()) {
      const std::string best = nearest(key, known);
      throw UsageError("shape " + text + ": unknown setting " + key +
                       (best.empty() ? std::string() : "; did you mean " + best + "?"));
    }
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

void Subject::fill(const char* key, std::optional<std::string>& flag) const {
  const auto found = settings_.find(key);
  if (!flag && found != settings_.end()) flag = found->second;
}

void Subject::fill(const char* key, std::optional<std::vector<std::int64_t>>& flag) const {
  const auto found = settings_.find(key);
  if (flag || found == settings_.end()) return;
  flag.emplace();
  for (std::size_t begin = 0; begin <= found->second.size();) {
    const std::size_t end = std::min(found->second.find(',', begin), found->second.size());
    const std::string piece = found->second.substr(begin, end - begin);
    char* stop = nullptr;
    const long long value = std::strtoll(piece.c_str(), &stop, 10);
    if (piece.empty() || *stop != '\0' || value < 1)
      throw UsageError(text_ + ": " + key + "=" + found->second + " is no list of whole numbers of at least 1");
    flag->push_back(value);
    begin = end + 1;
  }
}

void Subject::fill(const char* key, std::optional<int>& flag) const {
  std::optional<std::vector<std::int64_t>> list;
  if (flag) return;
  fill(key, list);
  if (list && list->size() != 1) throw UsageError(text_ + ": " + key + " takes one number");
  if (list) flag = static_cast<int>(std::min<std::int64_t>(list->front(), 4096));
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
