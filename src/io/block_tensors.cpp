#include "io/block_tensors.hpp"

#include <algorithm>

#include <moekit/status.hpp>

#include "text.hpp"

namespace moekit::io {
using text::concat;

namespace {

/// "a, b, c and 5 more"
std::string list_names(const std::vector<const StoredTensor*>& tensors) {
  constexpr std::size_t kShown = 4;
  std::string out;
  for (std::size_t i = 0; i < tensors.size() && i < kShown; ++i) out += concat(i ? ", " : "", tensors[i]->name);
  if (tensors.size() > kShown) out += concat(" and ", tensors.size() - kShown, " more");
  return out;
}

bool is_transposed(const std::vector<std::int64_t>& got, std::initializer_list<std::int64_t> wanted) {
  std::vector<std::int64_t> turned(wanted);
  if (turned.size() < 2 || got.size() != turned.size()) return false;
  std::swap(turned[turned.size() - 1], turned[turned.size() - 2]);
  return got == turned;
}

std::string expected_name(const Family& family, std::int64_t layer) {
  const std::string_view name = !family.per_expert.up.empty() ? family.per_expert.up
                                : !family.flat.up.empty()     ? family.flat.up
                                                              : family.fused.gate_up;
  return replace_mark(concat(replace_mark(family.blocks[0].prefix, '#', layer), name), '@', 0);
}

}  // namespace

bool is_weight_float(const StoredTensor& tensor) {
  const auto& type = tensor.type->type;
  return type == DType::f32 || type == DType::bf16 || type == DType::f16;
}

std::string replace_mark(std::string_view pattern, char mark, std::int64_t number) {
  const std::size_t at = pattern.find(mark);
  if (at == std::string_view::npos) return std::string(pattern);
  return concat(pattern.substr(0, at), number, pattern.substr(at + 1));
}

BlockTensors::BlockTensors(const ModelTensors& tensors, const Family& family, std::int64_t layer)
    : tensors_(tensors), family_(family), layer_(layer) {
  choose(family);
}

void BlockTensors::bad(std::string_view what, std::string hint) const {
  throw Error(StatusCode::bad_file, concat("[checkpoint] ", tensors_.source(), ": layer ", layer_, ": ", what),
              std::move(hint));
}
void BlockTensors::not_read(std::string_view what) const {
  throw Error(StatusCode::unsupported, concat("[checkpoint] ", tensors_.source(), ": layer ", layer_, ": ", what));
}

void BlockTensors::choose(const Family& family) {
  for (const BlockName& block : family.blocks) {
    if (block.prefix.empty()) continue;
    prefix_ = replace_mark(block.prefix, '#', layer_);
    module_ = replace_mark(block.module, '#', layer_);
    per_expert_ = !family.per_expert.up.empty() && has_numbered_experts();
    if (per_expert_) return;
    for (const std::string_view name :
         {family.fused.gate_up, family.fused.down, family.flat.gate, family.flat.up, family.flat.down})
      if (!name.empty() && has(full_name(name))) return;
  }
  no_experts();
}

bool BlockTensors::has_numbered_experts() const {
  for (char digit = '0'; digit <= '9'; ++digit)
    if (!tensors_.with_prefix(concat(prefix_, "experts.", digit)).empty()) return true;
  return false;
}

void BlockTensors::no_experts() const {
  std::vector<const StoredTensor*> there;
  for (const BlockName& block : family_.blocks)
    if (!block.prefix.empty())
      for (const StoredTensor* tensor : tensors_.with_prefix(replace_mark(block.prefix, '#', layer_)))
        there.push_back(tensor);
  const bool unmatched = !there.empty();
  if (there.empty())
    for (const StoredTensor* tensor : tensors_.all())
      if (tensor->name.find("expert") != std::string::npos) there.push_back(tensor);
  if (there.empty()) there.assign(tensors_.all().begin(), tensors_.all().end());
  bad(concat("no experts under the names of family ", family_.name, " (", expected_name(family_, layer_), "); ",
             unmatched ? "not matched: " : "the file has: ", list_names(there)));
}

const StoredTensor& BlockTensors::need(const std::string& name, std::int64_t expert) {
  const StoredTensor* tensor = tensors_.find(name);
  if (!tensor) missing(name, expert);
  if (used_.insert(tensor).second) bytes_ += tensor->bytes();
  return *tensor;
}

void BlockTensors::missing(const std::string& name, std::int64_t expert) const {
  std::string beside = name.substr(0, name.rfind('.') + 1);
  if (name.ends_with(".weight")) beside = beside.substr(0, beside.rfind('.', beside.size() - 2) + 1);
  std::vector<const StoredTensor*> there;
  for (const StoredTensor* tensor : tensors_.with_prefix(beside))
    if (!used_.contains(tensor)) there.push_back(tensor);
  bad(concat(expert >= 0 ? concat("expert ", expert, ": ") : std::string(), "tensor ", name, " is missing"),
      there.empty() ? std::string() : concat("not matched there: ", list_names(there)));
}

Tensor BlockTensors::shaped(const StoredTensor& tensor, std::initializer_list<std::int64_t> shape,
                            std::string_view meaning) const {
  if (!std::equal(shape.begin(), shape.end(), tensor.shape.begin(), tensor.shape.end()))
    bad(concat("tensor ", tensor.name, " must be ", shape_string(std::vector<std::int64_t>(shape)), " (", meaning,
               "), got ", shape_string(tensor.shape)),
        is_transposed(tensor.shape, shape) ? "it seems to be stored the other way round" : "");
  return tensor.view();
}

Tensor BlockTensors::float_tensor(const std::string& name, std::initializer_list<std::int64_t> shape,
                                  std::string_view meaning) {
  const StoredTensor& tensor = need(name);
  const Tensor view = shaped(tensor, shape, meaning);
  if (!is_weight_float(tensor)) bad(concat("tensor ", name, " is ", tensor.type->name, ", must be F32, BF16 or F16"));
  return view;
}

void BlockTensors::refuse_leftovers() const {
  std::vector<const StoredTensor*> left;
  for (const StoredTensor* tensor : tensors_.with_prefix(prefix_))
    if (!used_.contains(tensor)) left.push_back(tensor);
  if (!left.empty())
    bad(concat("tensors that a ", family_.name, " layer of this config does not have: ", list_names(left)));
}

}  // namespace moekit::io
