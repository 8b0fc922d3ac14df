#include "io/golden.hpp"

#include <algorithm>
#include <charconv>

#include "text.hpp"

namespace moekit::io {
using text::concat;

namespace {

constexpr GoldenTolerances kFamilies{
    .f32 = 1e-5, .bf16 = 2e-2, .bf16_intermediate = 2e-2, .bf16_rms = 1e-2, .logits = 1e-5, .weights = 1e-5};
constexpr GoldenTolerances kModel{.f32 = 1e-5,
                                  .bf16 = 2e-2,
                                  .bf16_intermediate = 2e-2,
                                  .bf16_rms = 1e-2,
                                  .logits = 1e-5,
                                  .weights = 1e-5,
                                  .near_tie = 1e-2};
constexpr GoldenTolerances kQuantised{.f32 = 2e-6,
                                      .bf16 = 1.5e-2,
                                      .bf16_intermediate = 1e-2,
                                      .actq = 1e-5,
                                      .actq_bf16 = 6e-2,
                                      .logits = 1e-5,
                                      .weights = 1e-5};

[[noreturn]] void bad(const std::string& file, std::string_view what) {
  throw Error(StatusCode::bad_file, concat("[golden] ", file, ": ", what));
}

/// The first whole component that is a number: 3 in "model.layers.3.mlp".
std::int64_t layer_of(const std::string& module, const std::string& file) {
  std::size_t begin = 0;
  while (begin < module.size()) {
    const std::size_t end = std::min(module.find('.', begin), module.size());
    std::int64_t number = 0;
    const auto [stop, error] = std::from_chars(module.data() + begin, module.data() + end, number);
    if (error == std::errc() && stop == module.data() + end && number >= 0) return number;
    begin = end + 1;
  }
  bad(file, concat("module ", module, " names no layer"));
}

/// Rank 2 and of this type, with the rows of the input.
Tensor rows_of(const SafetensorsFile& file, const std::string& name, std::initializer_list<DType> types,
               std::int64_t rows) {
  const StoredTensor* stored = file.find(name);
  if (!stored) return {};
  const Tensor tensor = stored->view();
  if (tensor.rank != 2 || std::find(types.begin(), types.end(), tensor.dtype) == types.end() ||
      (rows >= 0 && tensor.shape[0] != rows))
    bad(file.path(), concat("tensor ", name, " is ", stored->type->name, " ", shape_string(stored->shape),
                            ", which does not fit its input"));
  return tensor;
}

/// What the router returned, in the order of the family: told apart by type and width.
void read_router_outputs(const SafetensorsFile& file, const std::string& prefix, GoldenCase& out) {
  std::vector<Tensor> floats;
  for (const char* name : {"router0", "router1", "router2"}) {
    const Tensor tensor = rows_of(file, prefix + name, {DType::f32, DType::i64}, out.in.shape[0]);
    if (!tensor.present()) continue;
    if (tensor.dtype == DType::i64)
      out.ids = tensor;
    else
      floats.push_back(tensor);
  }
  if (!out.ids.present()) {  // scores and logits, or logits alone
    if (!floats.empty()) out.logits = floats.back();
    if (floats.size() > 1) out.scores = floats.front();
    return;
  }
  for (const Tensor& tensor : floats) {
    // the weights are as wide as the ids, the logits wider; with k = E the weights are the middle one of three
    const bool narrow = tensor.shape[1] == out.ids.shape[1];
    const bool is_weights = narrow && (floats.size() < 2 || floats[0].shape[1] != floats[1].shape[1] ||
                                       tensor.data == rows_of(file, prefix + "router1", {DType::f32}, -1).data);
    (is_weights ? out.weights : out.logits) = tensor;
  }
}

bool is_unordered(const std::string& model_type) {
  return model_type == "deepseek_v2" || model_type == "deepseek_v3" || model_type == "kimi_k2" ||
         model_type == "glm4_moe";
}

}  // namespace

Golden::Golden(const std::string& path, const std::string& model_type)
    : file_(std::make_shared<SafetensorsFile>(path)) {
  constexpr std::string_view kBlockIn = "|in", kModelIn = ".mlp.in";
  for (const StoredTensor& tensor : file_->tensors()) {
    const std::string& name = tensor.name;
    if (name.ends_with(kBlockIn)) read_block_case(name.substr(0, name.size() - 2));
    if (name.ends_with(kModelIn)) read_model_case(name.substr(0, name.size() - 2));
  }
  if (cases_.empty()) bad(path, "holds no case (no tensor named …|in or ….mlp.in)");
  for (GoldenCase& one : cases_) one.ids_ordered = !is_unordered(model_type);
  std::stable_sort(cases_.begin(), cases_.end(), [](const GoldenCase& a, const GoldenCase& b) {
    return a.layer != b.layer ? a.layer < b.layer : a.in.shape[0] < b.in.shape[0];
  });
}

const GoldenTolerances& Golden::tolerances() const {
  switch (schema_) {
    case GoldenSchema::model: return kModel;
    case GoldenSchema::quantised: return kQuantised;
    case GoldenSchema::families: break;
  }
  return kFamilies;
}

void Golden::read_model_case(const std::string& prefix) {  // "layers.0.mlp."
  schema_ = GoldenSchema::model;
  GoldenCase one;
  one.module = concat("model.", prefix.substr(0, prefix.size() - 1));
  one.layer = layer_of(one.module, file_->path());
  one.in = rows_of(*file_, prefix + "in", {DType::f32}, -1);
  one.name = concat("M", one.in.shape[0]);
  one.out = rows_of(*file_, prefix + "out", {DType::f32}, one.in.shape[0]);
  one.logits = rows_of(*file_, prefix + "router_logits", {DType::f32}, one.in.shape[0]);
  if (!one.out.present()) bad(file_->path(), concat("tensor ", prefix, "out is missing"));
  cases_.push_back(one);
}

void Golden::read_block_case(const std::string& prefix) {  // "model.layers.0.mlp|M37|"
  const std::size_t bar = prefix.find('|');
  if (bar + 1 >= prefix.size()) return;  // "…|in" without rows is no case
  GoldenCase one;
  one.module = prefix.substr(0, bar);
  one.name = prefix.substr(bar + 1, prefix.size() - bar - 2);
  if (one.name.find('|') != std::string::npos) return;
  one.layer = layer_of(one.module, file_->path());
  one.in = rows_of(*file_, prefix + "in", {DType::f32}, -1);
  const std::int64_t rows = one.in.shape[0];
  one.out = rows_of(*file_, prefix + "out", {DType::f32, DType::f64}, rows);
  if (!one.out.present()) bad(file_->path(), concat("tensor ", prefix, "out is missing"));
  read_router_outputs(*file_, prefix, one);
  if (file_->find(prefix + "router_logits")) {
    schema_ = GoldenSchema::quantised;
    one.logits = rows_of(*file_, prefix + "router_logits", {DType::f32}, rows);
    one.ids = rows_of(*file_, prefix + "topk_ids", {DType::i64}, rows);
    one.weights = rows_of(*file_, prefix + "topk_weights", {DType::f32}, rows);
    one.out_actq = rows_of(*file_, prefix + "out_actq", {DType::f64}, rows);
    one.out_actq_127 = rows_of(*file_, prefix + "out_actq_127", {DType::f64}, rows);
  }
  cases_.push_back(one);
}

}  // namespace moekit::io
