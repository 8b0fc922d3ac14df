#include <moekit/weights.hpp>

#include <cstring>

#include "plan_impl.hpp"
#include "quant/numeric.hpp"
#include "tensor_checks.hpp"
#include "text.hpp"
#include "weights_impl.hpp"

namespace moekit::inline v0 {
using text::concat;

namespace {

Status with_place(const Status& status, const std::string& place) {
  return Status(status.code(), concat("[weights] ", place, ": ", status.message()), status.hint(), status.field());
}

std::size_t padded_stride(const PackFormat& format, const WeightsSpec& spec) {
  return (format.bytes(spec) + 63) / 64 * 64;
}

/// A dense copy in `type`; absent stays absent.
Tensor own(const Tensor& given, DType type, const char* what, std::vector<std::vector<std::byte>>& storage) {
  if (!given.present()) return {};
  throw_if_failed(tensors::check(given, Device{}, "weights", what));
  if (given.data == nullptr || given.rank < 1 || given.rank > 2)
    throw Error(StatusCode::invalid_argument,
                concat("[weights] ", what, " is ", given.data ? shape_string(given) : "null"), "rank 1 or 2 with data",
                what);
  if (!is_float(given.dtype))
    throw Error(StatusCode::invalid_dtype, concat("[weights] ", what, " must be a float type, got ", name(given.dtype)),
                "", what);
  const std::int64_t rows = given.rank == 2 ? given.shape[0] : 1,
                     cols = given.rank == 2 ? given.shape[1] : given.numel();
  const std::int64_t row_step = given.rank == 2 ? given.stride[0] : 0,
                     col_step = given.rank >= 1 ? given.stride[given.rank - 1] : 1;
  std::vector<std::byte>& memory = storage.emplace_back(static_cast<std::size_t>(rows * cols * bytes(type)));
  for (std::int64_t r = 0; r < rows; ++r)
    for (std::int64_t c = 0; c < cols; ++c)
      numeric::store_f32(memory.data(), type, r * cols + c,
                         numeric::load_f32(given.data, given.dtype, r * row_step + c * col_step));
  return given.rank == 2 ? Tensor(memory.data(), type, {rows, cols}) : Tensor(memory.data(), type, {cols});
}

void check(const Tensor& tensor, std::initializer_list<std::int64_t> shape, const char* what) {
  throw_if_failed(tensors::check(tensor, Device{}, "weights", what));
  const Tensor expected(static_cast<void*>(nullptr), DType::f32, shape);
  bool same = tensor.rank == expected.rank && tensor.data != nullptr;
  for (int axis = 0; same && axis < expected.rank; ++axis) same = tensor.shape[axis] == expected.shape[axis];
  if (!same)
    throw Error(StatusCode::invalid_shape,
                concat("[weights] ", what, " must be ", shape_string(expected), ", got ",
                       tensor.present() ? shape_string(tensor) : "nothing"),
                "", what);
  if (!is_float(tensor.dtype))
    throw Error(StatusCode::invalid_dtype,
                concat("[weights] ", what, " must be a float type, got ", name(tensor.dtype)), "", what);
}

void own_router(const LayerConfig& config, const RouterTensors& given, Weights::Impl& out) {
  const bool wants = config.router.source == RouterSource::logits || config.router.source == RouterSource::custom;
  if (given.weight.present()) {
    check(given.weight, {config.num_experts, config.hidden}, "router.weight");
    out.router.weight = own(given.weight, given.weight.dtype, "router.weight", out.storage);
  }
  if (!wants) return;
  if (config.router.logit_bias) check(given.logit_bias, {config.num_experts}, "router.logit_bias");
  if (config.router.selection_bias) check(given.selection_bias, {config.num_experts}, "router.selection_bias");
  if (config.router.logit_bias)
    out.router.logit_bias = own(given.logit_bias, DType::f32, "router.logit_bias", out.storage);
  if (config.router.selection_bias)
    out.router.selection_bias = own(given.selection_bias, DType::f32, "router.selection_bias", out.storage);
}

void own_shared(const Plan::Impl& plan, const SharedTensors& given, Weights::Impl& out) {
  if (plan.config.shared.intermediate == 0) return;
  const WeightsSpec& spec = plan.shared_spec;
  out.shared_memory = cpu::Arena(padded_stride(*plan.shared_format, spec));
  if (Status s = plan.shared_format->pack_expert(out.shared_memory.data(), spec, given.expert); !s.ok())
    throw Error(with_place(s, "shared expert"));
  out.shared_view = {plan.shared_format, spec, out.shared_memory.data(), padded_stride(*plan.shared_format, spec)};
  if (!plan.config.shared.sigmoid_gate) return;
  Tensor gate = given.gate_vector;
  throw_if_failed(tensors::check(gate, Device{}, "weights", "shared.gate_vector"));
  if (gate.rank == 2 && gate.shape[0] == 1) gate = gate.index(0);
  check(gate, {plan.config.hidden}, "shared.gate_vector");
  out.shared_gate = own(gate, DType::f32, "shared.gate_vector", out.storage);
}

QuantTensors own_quant(const QuantTensors& given, std::vector<std::vector<std::byte>>& storage) {
  if (given.g1_alphas.present() || given.g2_alphas.present())
    throw Error(StatusCode::unsupported,
                "[weights] per-expert alphas are read by no experts implementation of this version",
                "fold them into the weights' scales", "source.quant");
  QuantTensors out;
  out.a1_scale = own(given.a1_scale, DType::f32, "a1_scale", storage);
  out.a2_scale = own(given.a2_scale, DType::f32, "a2_scale", storage);
  out.a1_gscale = own(given.a1_gscale, DType::f32, "a1_gscale", storage);
  out.a2_gscale = own(given.a2_gscale, DType::f32, "a2_gscale", storage);
  return out;
}

/// The values of `spec`. Rows are quantised before they are at an expert, so a1 has one static scale; a2 one, or one
/// for each of `num_experts`.
QuantConfig quant_config(const QuantSpec& spec, const QuantTensors& given, std::int64_t num_experts,
                         Weights::Impl& out) {
  if (given.a1_scale.present() && given.a1_scale.numel() != 1)
    throw Error(StatusCode::invalid_shape, concat("[weights] a1_scale must be [1], got ", shape_string(given.a1_scale)),
                "rows are quantised before they are at an expert: use the largest of the experts' scales", "a1_scale");
  const Tensor& a2 = given.a2_scale;
  if (a2.present() && a2.numel() != 1 && !(a2.rank == 1 && a2.shape[0] == num_experts))
    throw Error(StatusCode::invalid_shape,
                concat("[weights] a2_scale must be [1] or [", num_experts, "], got ", shape_string(a2)), "",
                "a2_scale");
  return {spec, own_quant(given, out.storage)};
}

/// Of the shared expert, which quantises its own activations: with scales of its own.
QuantConfig shared_quant_config(const LayerConfig& config, const QuantTensors& given, Weights::Impl& out) {
  if (config.shared.intermediate == 0) return {};
  QuantSpec spec = config.quant;
  if (!config.shared.quantised) {
    const QuantDesc dense{config.dtype, {}};
    spec = {dense, dense, dense, dense, config.quant.int8_divisor};
  }
  try {
    return quant_config(spec, given, 1, out);
  } catch (const Error& error) {
    Status failed = with_place(error.status(), "shared expert");
    throw Error(failed.code(), failed.message(),
                failed.hint().empty() ? "WeightsSource::shared.quant holds its scales" : failed.hint(),
                concat("source.shared.quant.", failed.field()));
  }
}

}  // namespace

Weights Weights::pack(const Plan& plan, const WeightsSource& source) {
  const Plan::Impl& chosen = plan.impl();
  if (!source.expert)
    throw Error(StatusCode::invalid_argument, "[weights] the source gives no experts", "set WeightsSource::expert",
                "source.expert");
  auto impl = std::make_shared<Impl>();
  impl->plan_fingerprint = plan.fingerprint();
  impl->stride = padded_stride(*chosen.format, chosen.spec);
  impl->spec = chosen.spec;
  impl->format = chosen.format;
  impl->memory = cpu::Arena(impl->stride * static_cast<std::size_t>(chosen.spec.num_local));
  for (std::int64_t e = 0; e < chosen.spec.num_local; ++e) {
    CanonicalExpert expert;
    if (Status s = source.expert(e, expert); !s.ok()) throw Error(with_place(s, concat("expert ", e)));
    std::byte* slot = impl->memory.data() + static_cast<std::size_t>(e) * impl->stride;
    if (Status s = chosen.format->pack_expert(slot, chosen.spec, expert); !s.ok())
      throw Error(with_place(s, concat("expert ", e)));
  }
  own_router(chosen.config, source.router, *impl);
  own_shared(chosen, source.shared, *impl);
  impl->quant = quant_config(chosen.config.quant, source.quant, chosen.spec.num_local, *impl);
  impl->shared_quant = shared_quant_config(chosen.config, source.shared.quant, *impl);
  Weights weights;
  weights.impl_ = std::move(impl);
  return weights;
}

Weights Weights::pack(const Plan& plan, const Tensor& w1, const Tensor& w2, const WeightsSource& rest) {
  const LayerConfig& config = plan.config();
  auto expect = [](const Tensor& tensor, std::initializer_list<std::int64_t> shape, const char* what,
                   const char* hint) {
    const Tensor expected(static_cast<void*>(nullptr), DType::f32, shape);
    throw_if_failed(tensors::check(tensor, Device{}, "weights", what));
    if (tensor.data == nullptr)
      throw Error(StatusCode::invalid_argument, concat("[weights] ", what, " is null"), "", what);
    if (tensor.rank != 3 || tensor.shape != expected.shape)
      throw Error(StatusCode::invalid_shape,
                  concat("[weights] ", what, " must be ", shape_string(expected), ", got ", shape_string(tensor)), hint,
                  what);
  };
  expect(w1, {config.num_experts, config.w1_rows(), config.hidden}, "w1",
         "gate and up may be stored apart: use WeightsSource::expert");
  expect(w2, {config.num_experts, config.hidden, config.intermediate}, "w2", "");
  const std::int64_t width = config.intermediate;
  WeightsSource source = rest;
  source.expert = [&](std::int64_t e, CanonicalExpert& expert) -> Status {
    if (rest.expert)  // scales and biases
      if (Status s = rest.expert(e, expert); !s.ok()) return s;
    const Tensor rows = w1.index(e);
    expert.down = w2.index(e);
    if (!config.activation.gated) {
      expert.up = rows;
    } else if (config.activation.layout == GateLayout::halves) {
      expert.gate = rows.slice_rows(0, width);
      expert.up = rows.slice_rows(width, 2 * width);
    } else {
      auto every_second = [&](std::int64_t first) {
        Tensor half = rows.slice_rows(first, first + width);
        half.stride[0] = 2 * rows.stride[0];
        return half;
      };
      expert.gate = every_second(0);
      expert.up = every_second(1);
    }
    return {};
  };
  return pack(plan, source);
}

WeightsView Weights::view() const { return {impl_->format, impl_->spec, impl_->memory.data(), impl_->stride}; }
std::size_t Weights::bytes() const { return impl_->memory.size() + impl_->shared_memory.size(); }
std::uint64_t Weights::plan_fingerprint() const { return impl_->plan_fingerprint; }

void Weights::replace_expert(std::int64_t slot, const CanonicalExpert& expert) {
  if (slot < 0 || slot >= impl_->spec.num_local)
    throw Error(StatusCode::invalid_argument, concat("[weights] slot ", slot, " of ", impl_->spec.num_local), "",
                "slot");
  std::vector<std::byte> packed(impl_->stride + 64);  // a failed pack leaves the slot as it was
  std::byte* aligned = packed.data() + (64 - reinterpret_cast<std::uintptr_t>(packed.data()) % 64) % 64;
  if (Status s = impl_->format->pack_expert(aligned, impl_->spec, expert); !s.ok())
    throw Error(with_place(s, concat("expert ", slot)));
  std::memcpy(impl_->memory.data() + static_cast<std::size_t>(slot) * impl_->stride, aligned,
              impl_->format->bytes(impl_->spec));
}

}  // namespace moekit::inline v0
