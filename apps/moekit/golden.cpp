#include "golden.hpp"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>

#include "console.hpp"
#include "route.hpp"

namespace moekit::cli {
namespace {

using Named = std::map<std::string, Tensor>;  // "router0" → tensor

[[noreturn]] void bad(const std::string& what) {
  throw Error(StatusCode::bad_file, "[golden] golden.safetensors: " + what, "keys are MODULE|M<rows>|<what>");
}

/// "model.layers.0.mlp|M37|out" → {"M37", "out"} if the module is the layer's; "layers.0.mlp.out" → {"", "out"}.
bool split(const std::string& key, const SubjectLayer& layer, std::string& name, std::string& what) {
  const std::string prefix = layer.module + "|";
  if (key.rfind(prefix, 0) == 0) {
    const std::size_t bar = key.find('|', prefix.size());
    if (bar == std::string::npos) return false;
    name = key.substr(prefix.size(), bar - prefix.size());
    what = key.substr(bar + 1);
    return true;
  }
  const std::string plain = "layers." + std::to_string(layer.index) + ".mlp.";
  if (key.rfind(plain, 0) != 0) return false;
  name.clear();
  what = key.substr(plain.size());
  return true;
}

bool mostly_zero(const Tensor& t) {
  std::int64_t zeros = 0;
  for (std::int64_t i = 0; i < t.numel(); ++i) zeros += t.as<float>()[i] == 0.0f;
  return 2 * zeros > t.numel();
}

Tensor checked(const Named& named, const std::string& what, std::int64_t rows, std::int64_t columns,
               std::initializer_list<DType> types) {
  const auto found = named.find(what);
  if (found == named.end()) return {};
  const Tensor& t = found->second;
  if (t.rank != 2 || t.shape[0] != rows || t.shape[1] != columns)
    bad(what + " must be [" + std::to_string(rows) + ", " + std::to_string(columns) + "], got " + shape_string(t));
  if (std::find(types.begin(), types.end(), t.dtype) == types.end()) bad(what + " has type " + name(t.dtype));
  return t;
}

/// The tensors that a router module returned, in whatever order its family has.
void sort_router(const Named& named, const SubjectLayer& layer, std::int64_t rows, GoldenCase& out) {
  const std::int64_t E = layer.config.num_experts, k = layer.config.top_k;
  for (const char* key : {"router0", "router1", "router2"}) {
    const auto found = named.find(key);
    if (found == named.end()) continue;
    if (found->second.dtype == DType::i64) {
      out.ids = checked(named, key, rows, k, {DType::i64});
    } else if (found->second.rank == 2 && found->second.shape[1] == k && k != E) {
      out.weights = checked(named, key, rows, k, {DType::f32});
    } else {
      const Tensor t = checked(named, key, rows, E, {DType::f32});
      (mostly_zero(t) ? out.scores : out.logits) = t;
    }
  }
}

void collect_codes(const Named& named, const Tensor& in, GoldenCase& out) {
  for (const auto& [what, tensor] : named) {
    const bool input = what.size() > 5 && what.compare(what.size() - 5, 5, "|in_q") == 0;
    const bool middle = what.size() > 6 && what.compare(what.size() - 6, 6, "|mid_q") == 0;
    if (!input && !middle) continue;
    const std::string base = what.substr(0, what.size() - 2);
    const auto scale = named.find(base + "_scale");
    const auto row = input ? named.end() : named.find(base);
    if (scale == named.end() || (middle && row == named.end())) bad(what + " has no scale or no row");
    out.codes.push_back({base, input ? in : row->second, tensor, scale->second, what.rfind("actq_127", 0) == 0});
  }
}

GoldenCase make_case(const std::string& name, const Named& named, const SubjectLayer& layer) {
  GoldenCase out;
  const auto in = named.find("in");
  if (in == named.end()) bad(layer.module + " has no \"in\"");
  const std::int64_t rows = in->second.rows(), K = layer.config.hidden;
  const std::int64_t E = layer.config.num_experts, k = layer.config.top_k;
  out.name = name.empty() ? "M" + std::to_string(rows) : name;
  out.in = checked(named, "in", rows, K, {DType::f32});
  out.out = checked(named, "out", rows, K, {DType::f32, DType::f64});
  if (!out.out.present()) bad(layer.module + " has no \"out\"");
  out.out_actq = checked(named, "out_actq", rows, K, {DType::f64});
  out.out_actq_127 = checked(named, "out_actq_127", rows, K, {DType::f64});
  sort_router(named, layer, rows, out);
  if (const Tensor t = checked(named, "router_logits", rows, E, {DType::f32}); t.present()) out.logits = t;
  if (const Tensor t = checked(named, "topk_ids", rows, k, {DType::i64}); t.present()) out.ids = t;
  if (const Tensor t = checked(named, "topk_weights", rows, k, {DType::f32}); t.present()) out.weights = t;
  collect_codes(named, out.in, out);
  return out;
}

RoutingRows from_scores(const Tensor& scores, std::int64_t top_k) {
  RoutingRows out{Buffer(DType::i32, {scores.shape[0], top_k}), Buffer(DType::f32, {scores.shape[0], top_k})};
  for (std::int64_t t = 0; t < scores.shape[0]; ++t) {
    std::int64_t j = 0;
    for (std::int64_t e = 0; e < scores.shape[1]; ++e) {
      if (scores.at<float>(t, e) == 0.0f) continue;
      if (j == top_k) bad("a row of router scores has more than " + std::to_string(top_k) + " experts");
      out.ids.tensor.at<std::int32_t>(t, j) = static_cast<std::int32_t>(e);
      out.weights.tensor.at<float>(t, j++) = scores.at<float>(t, e);
    }
    if (j != top_k) bad("a row of router scores has " + std::to_string(j) + " experts");
  }
  return out;
}

/// What the reference router (f64) makes of the file's logits, which include the logit bias.
RoutingRows from_logits(const Tensor& logits, const SubjectLayer& layer, const RouterTensors& tensors) {
  LayerConfig config = layer.config;
  config.router.logit_bias = false;
  return route_with("reference", logits, config, tensors);
}

}  // namespace

std::optional<Golden> Golden::open(const std::string& directory) {
  const std::string path = directory + "/golden.safetensors";
  std::error_code ignored;
  if (!std::filesystem::exists(path, ignored)) return std::nullopt;
  Golden out;
  out.file_ = std::make_shared<const io::SafetensorsFile>(path);
  return out;
}

std::vector<GoldenCase> Golden::cases(const SubjectLayer& layer) const {
  std::map<std::string, Named> by_name;
  for (const io::StoredTensor& stored : file_->tensors()) {
    std::string name, what;
    if (!split(stored.name, layer, name, what)) continue;
    by_name[name][what] = stored.view();
  }
  std::vector<GoldenCase> out;
  for (const auto& [name, named] : by_name) out.push_back(make_case(name, named, layer));
  std::sort(out.begin(), out.end(), [](const GoldenCase& a, const GoldenCase& b) { return a.in.rows() < b.in.rows(); });
  return out;
}

RoutingRows Golden::routing(const GoldenCase& golden, const SubjectLayer& layer, const RouterTensors& tensors) const {
  const std::int64_t k = layer.config.top_k;
  if (!golden.ids.present())
    return golden.scores.present() ? from_scores(golden.scores, k) : from_logits(golden.logits, layer, tensors);
  if (!golden.weights.present()) bad(layer.module + " has ids but no weights");
  const std::int64_t M = golden.in.rows();
  RoutingRows out{Buffer(DType::i32, {M, k}), Buffer(DType::f32, {M, k})};
  for (std::int64_t t = 0; t < M; ++t)
    for (std::int64_t j = 0; j < k; ++j) {
      const std::int64_t e = golden.ids.at<std::int64_t>(t, j);
      if (e < 0 || e >= layer.config.num_experts) bad("an expert id of " + std::to_string(e));
      out.ids.tensor.at<std::int32_t>(t, j) = static_cast<std::int32_t>(e);
      out.weights.tensor.at<float>(t, j) = golden.weights.at<float>(t, j);
    }
  return out;
}

}  // namespace moekit::cli
