#include "golden.hpp"

#include <filesystem>

#include "console.hpp"
#include "route.hpp"

namespace moekit::cli {
namespace {

[[noreturn]] void bad(const io::GoldenCase& of, const std::string& what) {
  throw Error(StatusCode::bad_file, "[golden] golden.safetensors: " + of.module + " " + of.name + ": " + what,
              "the file must belong to the checkpoint beside it");
}

void check_columns(const io::GoldenCase& of, const char* name, const Tensor& t, std::int64_t columns) {
  if (t.present() && t.shape[1] != columns)
    bad(of,
        format("%s must have %lld columns, got %s", name, static_cast<long long>(columns), shape_string(t).c_str()));
}

RoutingRows from_scores(const io::GoldenCase& of, std::int64_t top_k) {
  const Tensor& scores = of.scores;
  RoutingRows out{Buffer(DType::i32, {scores.shape[0], top_k}), Buffer(DType::f32, {scores.shape[0], top_k})};
  for (std::int64_t t = 0; t < scores.shape[0]; ++t) {
    std::int64_t j = 0;
    for (std::int64_t e = 0; e < scores.shape[1]; ++e) {
      if (scores.at<float>(t, e) == 0.0f) continue;
      if (j < top_k) {
        out.ids.tensor.at<std::int32_t>(t, j) = static_cast<std::int32_t>(e);
        out.weights.tensor.at<float>(t, j) = scores.at<float>(t, e);
      }
      ++j;
    }
    if (j != top_k)
      bad(of, format("row %lld has %lld experts with a score, not %lld", static_cast<long long>(t),
                     static_cast<long long>(j), static_cast<long long>(top_k)));
  }
  return out;
}

/// What the reference router (f64) makes of the file's logits, which include the logit bias.
RoutingRows from_logits(const io::GoldenCase& of, const SubjectLayer& layer, const RouterTensors& tensors) {
  if (!of.logits.present()) bad(of, "has neither ids nor logits nor scores");
  LayerConfig config = layer.config;
  config.router.logit_bias = false;
  return route_with("reference", of.logits, config, tensors);
}

}  // namespace

std::optional<io::Golden> open_golden(const Subject& subject) {
  if (subject.checkpoint() == nullptr) return std::nullopt;
  const std::string path = subject.text() + "/golden.safetensors";
  std::error_code ignored;
  if (!std::filesystem::exists(path, ignored)) return std::nullopt;
  return io::Golden(path, subject.checkpoint()->model_type());
}

std::vector<io::GoldenCase> golden_cases(const io::Golden& golden, const SubjectLayer& layer) {
  std::vector<io::GoldenCase> out;
  const std::int64_t K = layer.config.hidden, E = layer.config.num_experts, k = layer.config.top_k;
  for (const io::GoldenCase& one : golden.cases()) {
    if (one.layer != layer.index) continue;
    for (const Tensor* rows : {&one.in, &one.out, &one.out_actq, &one.out_actq_127})
      check_columns(one, "rows", *rows, K);
    check_columns(one, "logits", one.logits, E);
    check_columns(one, "scores", one.scores, E);
    check_columns(one, "ids", one.ids, k);
    check_columns(one, "weights", one.weights, k);
    out.push_back(one);
  }
  return out;
}

RoutingRows golden_routing(const io::GoldenCase& of, const SubjectLayer& layer, const RouterTensors& tensors) {
  const std::int64_t k = layer.config.top_k, M = of.in.shape[0];
  if (!of.ids.present()) return of.scores.present() ? from_scores(of, k) : from_logits(of, layer, tensors);
  if (!of.weights.present()) bad(of, "has ids but no weights");
  RoutingRows out{Buffer(DType::i32, {M, k}), Buffer(DType::f32, {M, k})};
  for (std::int64_t t = 0; t < M; ++t)
    for (std::int64_t j = 0; j < k; ++j) {
      const std::int64_t e = of.ids.at<std::int64_t>(t, j);
      if (e < 0 || e >= layer.config.num_experts) bad(of, "expert id " + std::to_string(e));
      out.ids.tensor.at<std::int32_t>(t, j) = static_cast<std::int32_t>(e);
      out.weights.tensor.at<float>(t, j) = of.weights.at<float>(t, j);
    }
  return out;
}

std::vector<GoldenCodes> golden_codes(const io::Golden& golden, const io::GoldenCase& of) {
  std::vector<GoldenCodes> out;
  const std::string prefix = of.module + "|" + of.name + "|";
  for (const io::StoredTensor& stored : golden.file().tensors()) {
    if (!stored.name.starts_with(prefix + "actq")) continue;
    const std::string what = stored.name.substr(prefix.size());
    const bool input = what.ends_with("|in_q"), middle = what.ends_with("|mid_q");
    if (!input && !middle) continue;
    const std::string base = what.substr(0, what.size() - 2);
    const Tensor row = input ? of.in : golden.file().get(prefix + base).view();
    out.push_back(
        {base, row, stored.view(), golden.file().get(prefix + base + "_scale").view(), what.starts_with("actq_127")});
    const GoldenCodes& added = out.back();
    if (added.codes.rank != 2 || row.rank != 2 || added.codes.shape[1] != row.shape[1] || row.dtype != DType::f32 ||
        bits(added.codes.dtype) != 8 || added.scales.dtype != DType::f32)
      bad(of, what + " does not fit its row");
  }
  return out;
}

}  // namespace moekit::cli
