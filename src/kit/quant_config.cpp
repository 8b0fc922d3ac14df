#include <moekit/kit/quant_config.hpp>

#include <cmath>

#include "quant/numeric.hpp"
#include "tensor_checks.hpp"
#include "text.hpp"

namespace moekit::inline v0 {
namespace {
using text::concat;

Status bad(std::string message, const char* field) {
  return Status(StatusCode::invalid_argument, std::move(message), "", field);
}

/// A value that the spec announces must be there, and one that is there must have been announced.
Status check_announced(const Tensor& tensor, bool announced, const char* tensor_name, const char* flag) {
  if (announced == tensor.present()) return {};
  return bad(announced
                 ? concat("[quant] ", flag, " is true, but ", tensor_name, " is missing")
                 : concat("[quant] ", tensor_name, " ", shape_string(tensor), " is given, but ", flag, " is false"),
             tensor_name);
}

Status check_rank(const Tensor& tensor, int rank, const char* tensor_name, const char* shape) {
  if (!tensor.present() || tensor.rank == rank) return {};
  return Status(StatusCode::invalid_shape,
                concat("[quant] ", tensor_name, " must be ", shape, ", got ", shape_string(tensor)), "", tensor_name);
}

/// Static activation scales: f32, at least one, and (where the host can read them) positive and finite.
Status check_activation_scale(const Tensor& scale, const char* tensor_name) {
  if (!scale.present()) return {};
  if (scale.dtype != DType::f32)
    return Status(StatusCode::invalid_dtype, concat("[quant] ", tensor_name, " must be f32, got ", name(scale.dtype)),
                  "", tensor_name);
  if (scale.rank > 2 || scale.numel() < 1)
    return Status(StatusCode::invalid_shape,
                  concat("[quant] ", tensor_name, " must be [1], [L] or [rows, 1], got ", shape_string(scale)), "",
                  tensor_name);
  if (scale.device.type != DeviceType::cpu || scale.data == nullptr) return {};
  for (std::int64_t i = 0; i < scale.shape[0]; ++i) {
    const float value = scale.as<float>()[i * scale.stride[0]];
    if (!(value > 0) || !std::isfinite(value))
      return bad(concat("[quant] ", tensor_name, "[", i, "] must be above 0 and finite, got ", value), tensor_name);
  }
  return {};
}

Status check_weight_scale(const Tensor& scale, const QuantDesc& desc, const char* tensor_name) {
  if (!scale.present()) return {};
  if (is_float(desc.type))
    return bad(
        concat("[quant] ", tensor_name, " ", shape_string(scale), " is given, but the weights are ", name(desc.type)),
        tensor_name);
  if (scale.dtype != DType::f32 && scale.dtype != DType::bf16)
    return Status(StatusCode::invalid_dtype,
                  concat("[quant] ", tensor_name, " must be f32 or bf16, got ", name(scale.dtype)), "", tensor_name);
  return check_rank(scale, 3, tensor_name, "[L, rows, groups]");
}

Status check_static(const QuantDesc& desc, const char* operand) {
  if (!desc.static_scale || !is_float(desc.type)) return {};
  return bad(concat("[quant] ", operand, ".static_scale is true, but ", operand, " is ", name(desc.type),
                    ", which has no scale"),
             operand);
}

Status check_tensors(const QuantTensors& t) {
  const std::pair<const char*, const Tensor*> all[] = {
      {"a1_scale", &t.a1_scale}, {"a2_scale", &t.a2_scale}, {"a1_gscale", &t.a1_gscale}, {"a2_gscale", &t.a2_gscale},
      {"w1_scale", &t.w1_scale}, {"w2_scale", &t.w2_scale}, {"w1_zp", &t.w1_zp},         {"w2_zp", &t.w2_zp},
      {"w1_bias", &t.w1_bias},   {"w2_bias", &t.w2_bias},   {"g1_alphas", &t.g1_alphas}, {"g2_alphas", &t.g2_alphas}};
  for (const auto& [name, tensor] : all)
    if (Status s = tensors::check(*tensor, tensor->device, "quant", name); !s.ok()) return s;
  return {};
}

Status check_operands(const QuantSpec& spec, const QuantTensors& t) {
  struct Activations {
    const QuantDesc& desc;
    const Tensor &scale, &global;
    const char *operand, *scale_name, *scale_flag, *global_name, *global_flag;
  };
  for (const Activations& a : {Activations{spec.a1, t.a1_scale, t.a1_gscale, "a1", "a1_scale", "a1.static_scale",
                                           "a1_gscale", "a1.global_scale"},
                               Activations{spec.a2, t.a2_scale, t.a2_gscale, "a2", "a2_scale", "a2.static_scale",
                                           "a2_gscale", "a2.global_scale"}}) {
    if (Status s = check_static(a.desc, a.operand); !s.ok()) return s;
    if (Status s = check_announced(a.scale, a.desc.static_scale, a.scale_name, a.scale_flag); !s.ok()) return s;
    if (Status s = check_announced(a.global, a.desc.global_scale, a.global_name, a.global_flag); !s.ok()) return s;
    if (Status s = check_activation_scale(a.scale, a.scale_name); !s.ok()) return s;
  }
  struct Weights {
    const QuantDesc& desc;
    const Tensor &scale, &zero_point, &bias, &alphas;
    const char *scale_name, *zero_point_name, *zero_point_flag, *bias_name, *alphas_name;
  };
  for (const Weights& w : {Weights{spec.w1, t.w1_scale, t.w1_zp, t.w1_bias, t.g1_alphas, "w1_scale", "w1_zp",
                                   "w1.zero_point", "w1_bias", "g1_alphas"},
                           Weights{spec.w2, t.w2_scale, t.w2_zp, t.w2_bias, t.g2_alphas, "w2_scale", "w2_zp",
                                   "w2.zero_point", "w2_bias", "g2_alphas"}}) {
    if (Status s = check_weight_scale(w.scale, w.desc, w.scale_name); !s.ok()) return s;
    if (Status s = check_announced(w.zero_point, w.desc.zero_point, w.zero_point_name, w.zero_point_flag); !s.ok())
      return s;
    if (Status s = check_rank(w.bias, 2, w.bias_name, "[L, rows]"); !s.ok()) return s;
    if (Status s = check_rank(w.alphas, 1, w.alphas_name, "[L]"); !s.ok()) return s;
  }
  return {};
}

}  // namespace

QuantConfig::QuantConfig(const QuantSpec& spec, const QuantTensors& tensors) : spec_(spec), tensors_(tensors) {
  throw_if_failed(validate(spec));
  throw_if_failed(check_tensors(tensors));
  throw_if_failed(check_operands(spec, tensors));
}

std::optional<DType> QuantConfig::quant_dtype() const {
  return is_float(spec_.a1.type) ? std::nullopt : std::optional(spec_.a1.type);
}

std::optional<Granularity> QuantConfig::block_shape() const {
  const Granularity& block = spec_.w1.granularity;
  const bool true_block = !is_float(spec_.w1.type) && block.rows > 1 && block.cols > 1;
  return true_block ? std::optional(block) : std::nullopt;
}

bool QuantConfig::per_act_token_quant() const { return !is_float(spec_.a1.type) && spec_.a1.granularity.per_row(); }

bool QuantConfig::per_out_ch_quant() const { return !is_float(spec_.w1.type) && spec_.w1.granularity.per_row(); }

}  // namespace moekit::inline v0
