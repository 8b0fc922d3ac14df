#include "io/layer_tensors.hpp"

#include <algorithm>
#include <cmath>

#include <moekit/status.hpp>

#include "io/block_tensors.hpp"
#include "quant/numeric.hpp"
#include "text.hpp"

namespace moekit::io {
using text::concat;

namespace {

/// The module that a weight belongs to: its name without ".weight".
std::string module_of(const std::string& tensor) {
  constexpr std::string_view kWeight = ".weight";
  return tensor.ends_with(kWeight) ? tensor.substr(0, tensor.size() - kWeight.size()) : tensor;
}

struct Matrix {
  Tensor data;   ///< [rows, cols], or [E, rows, cols]
  Tensor scale;  ///< absent for float matrices
  const StoredTensor* stored = nullptr;
};

class LayerReader {
 public:
  LayerReader(const ModelView& model, const LayerConfig& config, std::int64_t index)
      : model_(model), block_(model.tensors, model.family, index) {
    out_.index = index;
    out_.module = block_.module();
    out_.config = config;
  }

  LayerTensors read() {
    if (block_.per_expert())
      read_per_expert();
    else if (model_.family.flat.gate.empty())
      read_fused();
    else
      read_flat();
    set_types();
    read_router();
    if (out_.config.shared.intermediate > 0) read_shared();
    block_.refuse_leftovers();
    out_.weight_bytes = block_.bytes_needed();
    return std::move(out_);
  }

 private:
  // ---- storage of matrices ----------------------------------------------------------------------------------------

  bool is_quantised(const StoredTensor& tensor) const {
    return model_.scheme.present() && tensor.type->type == model_.scheme.type;
  }
  void check_type(const StoredTensor& tensor) const {
    if (is_weight_float(tensor) || is_quantised(tensor)) return;
    const bool narrow = tensor.type->bits <= 8 && !model_.scheme.present();
    block_.bad(concat("tensor ", tensor.name, " is ", tensor.type->name, "; weights must be F32, BF16 or F16",
                      model_.scheme.present()
                          ? concat(", or ", name(model_.scheme.type), " as quantization_config says")
                          : std::string(),
                      narrow ? ", and config.json has no quantization_config" : ""));
  }
  /// The config's word against the file's, for the first of several matrices that must all be alike.
  void check_against_config(const StoredTensor& tensor) const {
    if (!model_.scheme.present()) return;
    const bool ignored = model_.scheme.ignores(module_of(tensor.name));
    if (ignored == !is_quantised(tensor)) return;
    block_.bad(concat("tensor ", tensor.name, " is stored as ", tensor.type->name, ", but ", model_.config_file,
                      " says ",
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
      block_.bad(concat("tensor ", tensor.name, " is ", tensor.type->name, ", but ", first->name, " is ",
                        first->type->name, "; all experts of a layer must be stored alike"));
    }
  }

  Tensor read_scale(const StoredTensor& weight, std::initializer_list<std::int64_t> shape) {
    const std::string scale_name = concat(weight.name, model_.scheme.scale_suffix);
    const StoredTensor& scale = block_.need(scale_name, expert_);
    const Tensor view = block_.shaped(scale, shape, "one scale per block of the weights");
    if (scale.type->type != DType::f32 && scale.type->type != DType::bf16)
      block_.bad(concat("tensor ", scale_name, " is ", scale.type->name, ", scales must be F32 or BF16"));
    out_.scales.push_back(&scale);
    return view;
  }

  Matrix matrix(const std::string& name, std::int64_t rows, std::int64_t cols, const StoredTensor*& first,
                std::string_view meaning) {
    const StoredTensor& tensor = block_.need(name, expert_);
    check_alike(tensor, first);
    Matrix out{block_.shaped(tensor, {rows, cols}, meaning), {}, &tensor};
    const Granularity& block = model_.scheme.granularity;
    if (is_quantised(tensor))
      out.scale = read_scale(tensor, {QuantScheme::blocks(rows, block.rows), QuantScheme::blocks(cols, block.cols)});
    return out;
  }

  /// [E, rows, cols], or [E, cols, rows] if stored in_out; seen as [E, rows, cols] either way.
  Matrix stack(const std::string& name, std::int64_t rows, std::int64_t cols, std::string_view meaning) {
    const std::int64_t E = out_.config.num_experts;
    const bool in_out = model_.family.fused.in_out;
    const StoredTensor& tensor = block_.need(name);
    check_alike(tensor, first_);
    const std::int64_t a = in_out ? cols : rows, b = in_out ? rows : cols;
    Matrix out{turned(block_.shaped(tensor, {E, a, b}, meaning), in_out), {}, &tensor};
    if (!is_quantised(tensor)) return out;
    const Granularity& block = model_.scheme.granularity;
    if (in_out && block.rows != block.cols)
      block_.not_read(concat("tensor ", name, ": ", model_.scheme.name, " in [E, in, out] order is not read"));
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
    const auto full = [this](std::string_view name) { return block_.full_name(replace_mark(name, '@', expert_)); };
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
    const auto full = [this](std::string_view name) { return block_.full_name(name); };
    const Matrix gate_up =
        stack(full(names.gate_up), 2 * I, H,
              names.in_out ? "experts x hidden size x 2 expert widths" : "experts x 2 expert widths x hidden size");
    const Matrix down =
        stack(full(names.down), H, I,
              names.in_out ? "experts x expert width x hidden size" : "experts x hidden size x expert width");
    Tensor gate_up_bias, down_bias;
    if (!names.gate_up_bias.empty())
      gate_up_bias = block_.float_tensor(full(names.gate_up_bias), {E, 2 * I}, "experts x 2 expert widths");
    if (!names.down_bias.empty())
      down_bias = block_.float_tensor(full(names.down_bias), {E, H}, "experts x hidden size");
    const bool interleaved = names.layout == GateLayout::interleaved;
    const Granularity& block = model_.scheme.granularity;
    if (gate_up.scale.present() && (interleaved || I % block.rows != 0))
      block_.not_read(
          concat("tensor ", gate_up.stored->name, ": gate and up share blocks of scales (expert width ", I, ")"));
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
      const StoredTensor& tensor = block_.need(block_.full_name(name));
      check_alike(tensor, first_);
      const Tensor view = block_.shaped(tensor, {E * I, H}, "experts · expert width x hidden size");
      if (is_quantised(tensor))
        block_.not_read(concat("tensor ", tensor.name, ": ", model_.scheme.name, " in this form"));
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
    std::string weight = block_.full_name(rule.weight[0]);
    for (const std::string_view other : rule.weight)
      if (!other.empty() && block_.has(block_.full_name(other))) {
        weight = block_.full_name(other);
        break;
      }
    out_.router.weight = block_.float_tensor(weight, {E, H}, "experts x hidden size");
    if (!rule.logit_bias.empty())
      out_.router.logit_bias = block_.float_tensor(block_.full_name(rule.logit_bias), {E}, "experts");
    if (!rule.selection_bias.empty())
      out_.router.selection_bias = block_.float_tensor(block_.full_name(rule.selection_bias), {E}, "experts");
  }

  void read_shared() {
    LayerConfig& config = out_.config;
    const std::int64_t H = config.hidden, S = config.shared.intermediate;
    const std::string prefix = block_.full_name(model_.family.shared.prefix);
    const StoredTensor* first = nullptr;
    const Matrix gate = matrix(prefix + "gate_proj.weight", S, H, first, "shared width x hidden size");
    const Matrix up = matrix(prefix + "up_proj.weight", S, H, first, "shared width x hidden size");
    const Matrix down = matrix(prefix + "down_proj.weight", H, S, first, "hidden size x shared width");
    CanonicalExpert& expert = out_.shared.expert;
    expert.gate = gate.data, expert.up = up.data, expert.down = down.data;
    expert.gate_scale = gate.scale, expert.up_scale = up.scale, expert.down_scale = down.scale;
    config.shared.quantised = is_quantised(*first);
    if (config.shared.quantised && !is_quantised(*first_))
      block_.not_read(concat("tensor ", first->name, " is quantised, but the experts (", first_->name, ") are not"));
    if (!config.shared.quantised && *first->type->type != config.dtype)
      block_.not_read(concat("tensor ", first->name, " is ", first->type->name, " in a layer of ", name(config.dtype)));
    if (config.shared.sigmoid_gate)
      out_.shared.gate_vector =
          block_.float_tensor(block_.full_name(model_.family.shared.gate_vector), {1, H}, "1 x hidden size");
  }

  const ModelView& model_;
  BlockTensors block_;
  LayerTensors out_;
  std::int64_t expert_ = -1;             ///< being read; -1 = none
  const StoredTensor* first_ = nullptr;  ///< first matrix of the experts
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
