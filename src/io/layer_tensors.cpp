#include "io/layer_tensors.hpp"

#include <algorithm>
#include <cmath>
#include <unordered_set>

#include <moekit/status.hpp>

#include "quant/numeric.hpp"
#include "text.hpp"

namespace moekit::io {
using text::concat;

namespace {

std::string replace(std::string_view pattern, char mark, std::int64_t number) {
  const std::size_t at = pattern.find(mark);
  if (at == std::string_view::npos) return std::string(pattern);
  return concat(pattern.substr(0, at), number, pattern.substr(at + 1));
}

std::string shape_text(std::initializer_list<std::int64_t> shape) {
  return shape_string(std::vector<std::int64_t>(shape));
}

/// "a, b, c and 5 more"
std::string list_names(const std::vector<const StoredTensor*>& tensors) {
  constexpr std::size_t kShown = 4;
  std::string out;
  for (std::size_t i = 0; i < tensors.size() && i < kShown; ++i) out += concat(i ? ", " : "", tensors[i]->name);
  if (tensors.size() > kShown) out += concat(" and ", tensors.size() - kShown, " more");
  return out;
}

/// The module that a weight belongs to: its name without ".weight".
std::string module_of(const std::string& tensor) {
  constexpr std::string_view kWeight = ".weight";
  return tensor.ends_with(kWeight) ? tensor.substr(0, tensor.size() - kWeight.size()) : tensor;
}

bool is_weight_float(const StoredTensor& tensor) {
  const auto& type = tensor.type->type;
  return type == DType::f32 || type == DType::bf16 || type == DType::f16;
}

struct Matrix {
  Tensor data;   ///< [rows, cols], or [E, rows, cols]
  Tensor scale;  ///< absent for float matrices
  const StoredTensor* stored = nullptr;
};

class LayerReader {
 public:
  LayerReader(const ModelView& model, const LayerConfig& config, std::int64_t index) : model_(model) {
    out_.index = index;
    out_.config = config;
  }

  LayerTensors read() {
    choose_block();
    if (per_expert_)
      read_per_expert();
    else if (model_.family.flat.gate.empty())
      read_fused();
    else
      read_flat();
    set_types();
    read_router();
    if (out_.config.shared.intermediate > 0) read_shared();
    refuse_leftovers();
    return std::move(out_);
  }

 private:
  // ---- finding ----------------------------------------------------------------------------------------------------

  [[noreturn]] void bad(std::string_view what, std::string hint = {}) const {
    throw Error(StatusCode::bad_file,
                concat("[checkpoint] ", model_.tensors.source(), ": layer ", out_.index, ": ", what), std::move(hint));
  }
  [[noreturn]] void not_read(std::string_view what) const {
    throw Error(StatusCode::unsupported,
                concat("[checkpoint] ", model_.tensors.source(), ": layer ", out_.index, ": ", what));
  }

  /// Which spelling of the block's name is in the file, and whether its experts are apart or in one tensor.
  void choose_block() {
    for (const BlockName& block : model_.family.blocks) {
      if (block.prefix.empty()) continue;
      prefix_ = replace(block.prefix, '#', out_.index);
      out_.module = replace(block.module, '#', out_.index);
      if (!model_.family.per_expert.up.empty() && has_numbered_experts()) {
        per_expert_ = true;
        return;
      }
      for (const std::string_view name : {model_.family.fused.gate_up, model_.family.fused.down,
                                          model_.family.flat.gate, model_.family.flat.up, model_.family.flat.down})
        if (!name.empty() && model_.tensors.find(prefix_ + std::string(name))) return;
    }
    no_experts();
  }
  bool has_numbered_experts() const {
    for (char digit = '0'; digit <= '9'; ++digit)
      if (!model_.tensors.with_prefix(concat(prefix_, "experts.", digit)).empty()) return true;
    return false;
  }
  /// Lists what stands where the experts should be.
  [[noreturn]] void no_experts() const {
    std::vector<const StoredTensor*> there;
    for (const BlockName& block : model_.family.blocks)
      if (!block.prefix.empty())
        for (const StoredTensor* tensor : model_.tensors.with_prefix(replace(block.prefix, '#', out_.index)))
          there.push_back(tensor);
    const bool unmatched = !there.empty();
    if (there.empty())
      for (const StoredTensor* tensor : model_.tensors.all())
        if (tensor->name.find("expert") != std::string::npos) there.push_back(tensor);
    if (there.empty()) there.assign(model_.tensors.all().begin(), model_.tensors.all().end());
    bad(concat("no experts under the names of family ", model_.family.name, " (", expected_name(), "); ",
               unmatched ? "not matched: " : "the file has: ", list_names(there)));
  }
  std::string expected_name() const {
    const Family& family = model_.family;
    const std::string_view name = !family.per_expert.up.empty() ? family.per_expert.up
                                  : !family.flat.up.empty()     ? family.flat.up
                                                                : family.fused.gate_up;
    return replace(concat(replace(family.blocks[0].prefix, '#', out_.index), name), '@', 0);
  }

  const StoredTensor& need(const std::string& name) {
    const StoredTensor* tensor = model_.tensors.find(name);
    if (!tensor) missing(name);
    if (used_.insert(tensor).second) out_.weight_bytes += tensor->bytes();
    return *tensor;
  }
  [[noreturn]] void missing(const std::string& name) const {
    std::string beside = name.substr(0, name.rfind('.') + 1);
    if (name.ends_with(".weight")) beside = beside.substr(0, beside.rfind('.', beside.size() - 2) + 1);
    std::vector<const StoredTensor*> there;
    for (const StoredTensor* tensor : model_.tensors.with_prefix(beside))
      if (!used_.contains(tensor)) there.push_back(tensor);
    const std::string who = expert_ >= 0 ? concat("expert ", expert_, ": ") : std::string();
    bad(concat(who, "tensor ", name, " is missing"),
        there.empty() ? std::string() : concat("not matched there: ", list_names(there)));
  }

  Tensor shaped(const StoredTensor& tensor, std::initializer_list<std::int64_t> shape, std::string_view meaning) const {
    if (!std::equal(shape.begin(), shape.end(), tensor.shape.begin(), tensor.shape.end()))
      bad(concat("tensor ", tensor.name, " must be ", shape_text(shape), " (", meaning, "), got ",
                 shape_string(tensor.shape)),
          is_transposed(tensor.shape, shape) ? "it seems to be stored the other way round" : "");
    return tensor.view();
  }
  static bool is_transposed(const std::vector<std::int64_t>& got, std::initializer_list<std::int64_t> wanted) {
    std::vector<std::int64_t> turned(wanted);
    if (turned.size() < 2 || got.size() != turned.size()) return false;
    std::swap(turned[turned.size() - 1], turned[turned.size() - 2]);
    return got == turned;
  }

  Tensor float_tensor(const std::string& name, std::initializer_list<std::int64_t> shape, std::string_view meaning) {
    const StoredTensor& tensor = need(name);
    const Tensor view = shaped(tensor, shape, meaning);
    if (!is_weight_float(tensor)) bad(concat("tensor ", name, " is ", tensor.type->name, ", must be F32, BF16 or F16"));
    return view;
  }

  // ---- storage of matrices ----------------------------------------------------------------------------------------

  bool is_quantised(const StoredTensor& tensor) const {
    return model_.scheme.present() && tensor.type->type == model_.scheme.type;
  }
  void check_type(const StoredTensor& tensor) const {
    if (is_weight_float(tensor) || is_quantised(tensor)) return;
    const bool narrow = tensor.type->bits <= 8 && !model_.scheme.present();
    bad(concat("tensor ", tensor.name, " is ", tensor.type->name, "; weights must be F32, BF16 or F16",
               model_.scheme.present() ? concat(", or ", name(model_.scheme.type), " as quantization_config says")
                                       : std::string(),
               narrow ? ", and config.json has no quantization_config" : ""));
  }
  /// The config's word against the file's, for the first of several matrices that must all be alike.
  void check_against_config(const StoredTensor& tensor) const {
    if (!model_.scheme.present()) return;
    const bool ignored = model_.scheme.ignores(module_of(tensor.name));
    if (ignored == !is_quantised(tensor)) return;
    bad(concat("tensor ", tensor.name, " is stored as ", tensor.type->name, ", but ", model_.config_file, " says ",
               ignored ? concat("that it is not quantised (", model_.scheme.ignore_key, ")")
                       : concat(model_.scheme.name, " and does not list it in ", model_.scheme.ignore_key)));
  }
  /// All matrices of a group (the experts, the shared expert) have the type of the group's first one.
  void check_alike(const StoredTensor& tensor, const StoredTensor*& first) const {
    check_type(tensor);
    if (!first) {
      first = &tensor;
      check_against_config(tensor);
    } else if (first->type != tensor.type) {
      bad(concat("tensor ", tensor.name, " is ", tensor.type->name, ", but ", first->name, " is ", first->type->name,
                 "; all experts of a layer must be stored alike"));
    }
  }

  Tensor read_scale(const StoredTensor& weight, std::initializer_list<std::int64_t> shape) {
    const std::string scale_name = concat(weight.name, model_.scheme.scale_suffix);
    const StoredTensor& scale = need(scale_name);
    const Tensor view = shaped(scale, shape, "one scale per block of the weights");
    if (scale.type->type != DType::f32 && scale.type->type != DType::bf16)
      bad(concat("tensor ", scale_name, " is ", scale.type->name, ", scales must be F32 or BF16"));
    out_.scales.push_back(&scale);
    return view;
  }

  Matrix matrix(const std::string& name, std::int64_t rows, std::int64_t cols, const StoredTensor*& first,
                std::string_view meaning) {
    const StoredTensor& tensor = need(name);
    check_alike(tensor, first);
    Matrix out{shaped(tensor, {rows, cols}, meaning), {}, &tensor};
    const Granularity& block = model_.scheme.granularity;
    if (is_quantised(tensor))
      out.scale = read_scale(tensor, {QuantScheme::blocks(rows, block.rows), QuantScheme::blocks(cols, block.cols)});
    return out;
  }

  /// [E, rows, cols], or [E, cols, rows] if stored in_out; seen as [E, rows, cols] either way.
  Matrix stack(const std::string& name, std::int64_t rows, std::int64_t cols, std::string_view meaning) {
    const std::int64_t E = out_.config.num_experts;
    const bool in_out = model_.family.fused.in_out;
    const StoredTensor& tensor = need(name);
    check_alike(tensor, first_);
    const std::int64_t a = in_out ? cols : rows, b = in_out ? rows : cols;
    Matrix out{turned(shaped(tensor, {E, a, b}, meaning), in_out), {}, &tensor};
    if (!is_quantised(tensor)) return out;
    const Granularity& block = model_.scheme.granularity;
    if (in_out && block.rows != block.cols)
      not_read(concat("tensor ", name, ": ", model_.scheme.name, " in [E, in, out] order is not read"));
    const std::int64_t scale_a = QuantScheme::blocks(a, block.rows), scale_b = QuantScheme::blocks(b, block.cols);
    out.scale = turned(read_scale(tensor, {E, scale_a, scale_b}), in_out);
    return out;
  }
  static Tensor turned(Tensor t, bool turn) {
    if (!turn) return t;
    std::swap(t.shape[1], t.shape[2]);
    std::swap(t.stride[1], t.stride[2]);
    return t;
  }

  // ---- the three forms --------------------------------------------------------------------------------------------

  void read_per_expert() {
    const PerExpertNames& names = model_.family.per_expert;
    const std::int64_t H = out_.config.hidden, I = out_.config.intermediate;
    const auto full = [this](std::string_view name) { return prefix_ + replace(name, '@', expert_); };
    for (expert_ = 0; expert_ < out_.config.num_experts; ++expert_) {
      CanonicalExpert expert;
      const Matrix gate = matrix(full(names.gate), I, H, first_, "expert width x hidden size");
      const Matrix up = matrix(full(names.up), I, H, first_, "expert width x hidden size");
      const Matrix down = matrix(full(names.down), H, I, first_, "hidden size x expert width");
      expert.gate = gate.data, expert.up = up.data, expert.down = down.data;
      expert.gate_scale = gate.scale, expert.up_scale = up.scale, expert.down_scale = down.scale;
      out_.experts.push_back(expert);
    }
    expert_ = -1;
  }

  void read_fused() {
    const FusedNames& names = model_.family.fused;
    const std::int64_t E = out_.config.num_experts, H = out_.config.hidden, I = out_.config.intermediate;
    const auto full = [this](std::string_view name) { return prefix_ + std::string(name); };
    const Matrix gate_up =
        stack(full(names.gate_up), 2 * I, H,
              names.in_out ? "experts x hidden size x 2 expert widths" : "experts x 2 expert widths x hidden size");
    const Matrix down =
        stack(full(names.down), H, I,
              names.in_out ? "experts x expert width x hidden size" : "experts x hidden size x expert width");
    Tensor gate_up_bias, down_bias;
    if (!names.gate_up_bias.empty())
      gate_up_bias = float_tensor(full(names.gate_up_bias), {E, 2 * I}, "experts x 2 expert widths");
    if (!names.down_bias.empty()) down_bias = float_tensor(full(names.down_bias), {E, H}, "experts x hidden size");
    const bool interleaved = names.layout == GateLayout::interleaved;
    const Granularity& block = model_.scheme.granularity;
    if (gate_up.scale.present() && (interleaved || I % block.rows != 0))
      not_read(concat("tensor ", gate_up.stored->name, ": gate and up share blocks of scales (expert width ", I, ")"));
    for (std::int64_t e = 0; e < E; ++e) {
      CanonicalExpert expert;
      expert.gate = half(gate_up.data.index(e), I, 0, interleaved);
      expert.up = half(gate_up.data.index(e), I, 1, interleaved);
      expert.down = down.data.index(e);
      if (gate_up.scale.present()) {
        expert.gate_scale = half(gate_up.scale.index(e), I / block.rows, 0, false);
        expert.up_scale = half(gate_up.scale.index(e), I / block.rows, 1, false);
        expert.down_scale = down.scale.index(e);
      }
      if (gate_up_bias.present()) {
        expert.gate_bias = half(gate_up_bias.index(e), I, 0, interleaved);
        expert.up_bias = half(gate_up_bias.index(e), I, 1, interleaved);
      }
      if (down_bias.present()) expert.down_bias = down_bias.index(e);
      out_.experts.push_back(expert);
    }
  }
  /// Gate (which = 0) or up (1) of 2 · rows rows: one after the other, or alternating.
  static Tensor half(const Tensor& both, std::int64_t rows, std::int64_t which, bool interleaved) {
    Tensor out = both;
    out.shape[0] = rows;
    const std::int64_t offset = (interleaved ? 1 : rows) * both.stride[0] * which;
    if (interleaved) out.stride[0] = 2 * both.stride[0];
    out.data = static_cast<std::byte*>(both.data) + offset * bytes(both.dtype);
    return out;
  }

  void read_flat() {
    const FlatNames& names = model_.family.flat;
    const std::int64_t E = out_.config.num_experts, H = out_.config.hidden, I = out_.config.intermediate;
    const auto read = [&](std::string_view name) {
      const StoredTensor& tensor = need(prefix_ + std::string(name));
      check_alike(tensor, first_);
      const Tensor view = shaped(tensor, {E * I, H}, "experts · expert width x hidden size");
      if (is_quantised(tensor)) not_read(concat("tensor ", tensor.name, ": ", model_.scheme.name, " in this form"));
      return view;
    };
    const Tensor gate = read(names.gate), up = read(names.up), down = read(names.down);
    for (std::int64_t e = 0; e < E; ++e) {
      CanonicalExpert expert;
      expert.gate = gate.slice_rows(e * I, (e + 1) * I);
      expert.up = up.slice_rows(e * I, (e + 1) * I);
      expert.down = down.slice_rows(e * I, (e + 1) * I).transposed();
      out_.experts.push_back(expert);
    }
  }

  // ---- what all forms have ----------------------------------------------------------------------------------------

  void set_types() {
    LayerConfig& config = out_.config;
    const bool quantised = is_quantised(*first_);
    config.dtype = quantised ? model_.activations : *first_->type->type;
    throw_if_failed(quant_from_names(quantised ? model_.scheme.name : name(config.dtype), {}, config.quant));
  }

  void read_router() {
    const RouterRule& rule = model_.family.router;
    const std::int64_t E = out_.config.num_experts, H = out_.config.hidden;
    std::string weight = prefix_ + std::string(rule.weight[0]);
    for (const std::string_view other : rule.weight)
      if (!other.empty() && model_.tensors.find(prefix_ + std::string(other))) {
        weight = prefix_ + std::string(other);
        break;
      }
    out_.router.weight = float_tensor(weight, {E, H}, "experts x hidden size");
    if (!rule.logit_bias.empty())
      out_.router.logit_bias = float_tensor(prefix_ + std::string(rule.logit_bias), {E}, "experts");
    if (!rule.selection_bias.empty())
      out_.router.selection_bias = float_tensor(prefix_ + std::string(rule.selection_bias), {E}, "experts");
  }

  void read_shared() {
    LayerConfig& config = out_.config;
    const std::int64_t H = config.hidden, S = config.shared.intermediate;
    const std::string prefix = prefix_ + std::string(model_.family.shared.prefix);
    const StoredTensor* first = nullptr;
    const Matrix gate = matrix(prefix + "gate_proj.weight", S, H, first, "shared width x hidden size");
    const Matrix up = matrix(prefix + "up_proj.weight", S, H, first, "shared width x hidden size");
    const Matrix down = matrix(prefix + "down_proj.weight", H, S, first, "hidden size x shared width");
    CanonicalExpert& expert = out_.shared.expert;
    expert.gate = gate.data, expert.up = up.data, expert.down = down.data;
    expert.gate_scale = gate.scale, expert.up_scale = up.scale, expert.down_scale = down.scale;
    config.shared.quantised = is_quantised(*first);
    if (config.shared.quantised && !is_quantised(*first_))
      not_read(concat("tensor ", first->name, " is quantised, but the experts (", first_->name, ") are not"));
    if (!config.shared.quantised && *first->type->type != config.dtype)
      not_read(concat("tensor ", first->name, " is ", first->type->name, " in a layer of ", name(config.dtype)));
    if (config.shared.sigmoid_gate)
      out_.shared.gate_vector =
          float_tensor(prefix_ + std::string(model_.family.shared.gate_vector), {1, H}, "1 x hidden size");
  }

  /// A tensor of the block that nobody asked for would change the result if somebody did.
  void refuse_leftovers() const {
    std::vector<const StoredTensor*> left;
    for (const StoredTensor* tensor : model_.tensors.with_prefix(prefix_))
      if (!used_.contains(tensor)) left.push_back(tensor);
    if (!left.empty())
      bad(concat("tensors that a ", model_.family.name, " layer with ", out_.config.num_experts,
                 " experts does not have: ", list_names(left)));
  }

  const ModelView& model_;
  LayerTensors out_;
  std::string prefix_;
  bool per_expert_ = false;
  std::int64_t expert_ = -1;             ///< being read; -1 = none
  const StoredTensor* first_ = nullptr;  ///< first matrix of the experts
  std::unordered_set<const StoredTensor*> used_;
};

}  // namespace

LayerTensors find_layer_tensors(const ModelView& model, const LayerConfig& config, std::int64_t index) {
  return LayerReader(model, config, index).read();
}

void check_scales(const LayerTensors& layer) {
  for (const StoredTensor* scale : layer.scales) {
    const DType type = *scale->type->type;
    const std::int64_t count = scale->bytes() / bytes(type);
    for (std::int64_t i = 0; i < count; ++i) {
      const float value = numeric::load_f32(scale->data, type, i);
      if (std::isfinite(value)) continue;
      std::string position;
      std::int64_t rest = i;
      for (std::size_t axis = scale->shape.size(); axis-- > 0; rest /= scale->shape[axis])
        position = concat(rest % scale->shape[axis], position.empty() ? "" : ", ", position);
      throw Error(StatusCode::bad_file, concat("[checkpoint] ", *scale->file, ": scale ", scale->name, " is ", value,
                                               " at [", position, "]; scales must be finite"));
    }
  }
}

}  // namespace moekit::io
