#include "experts/canonical.hpp"

#include <cmath>
#include <cstring>

#include "quant/quantise.hpp"
#include "tensor_checks.hpp"
#include "text.hpp"

namespace moekit::experts {
namespace {
using text::concat;
using Role = ExpertPart::Role;

constexpr std::size_t kAlign = 64;

std::string expected_shape(const ExpertPart& part) {
  return part.rank == 2 ? concat("[", part.shape[0], ", ", part.shape[1], "]") : concat("[", part.shape[0], "]");
}

bool has_shape(const Tensor& tensor, const ExpertPart& part) {
  if (tensor.rank != part.rank) return false;
  for (int axis = 0; axis < part.rank; ++axis)
    if (tensor.shape[axis] != part.shape[axis]) return false;
  return true;
}

bool float_up_to_32_bits(DType type) { return type == DType::f32 || type == DType::bf16 || type == DType::f16; }

bool can_fill(const ExpertPart& part, DType type) {
  switch (part.role) {
    case Role::matrix: return is_float(part.type) ? float_up_to_32_bits(type) : type == part.type;
    case Role::scale: return type == DType::f32 || type == DType::bf16;
    case Role::bias: return float_up_to_32_bits(type);
  }
  return false;
}

std::string accepted_types(const ExpertPart& part) {
  if (part.role == Role::scale) return "f32 or bf16";
  if (part.role == Role::matrix && !is_float(part.type)) return name(part.type);
  return "f32, bf16 or f16";
}

Status check_shape(const ExpertPart& part, const Tensor& tensor) {
  if (has_shape(tensor, part)) return {};
  return Status(StatusCode::invalid_shape,
                concat("[pack] ", part.name, " must be ", expected_shape(part), ", got ", shape_string(tensor)), "",
                part.name);
}

Status check_part(const ExpertPart& part, const Tensor& tensor) {
  if (Status s = tensors::check(tensor, Device{}, "pack", part.name); !s.ok()) return s;
  if (!part.wanted) {
    if (!tensor.present()) return {};
    return Status(StatusCode::invalid_argument,
                  concat("[pack] ", part.name, " ", shape_string(tensor), " is given, but the weights have none"),
                  "leave it out, or say in the configuration that there is one", part.name);
  }
  if (!tensor.present())
    return Status(StatusCode::invalid_argument,
                  concat("[pack] ", part.name, " must be ", expected_shape(part), ", but it is missing"), "",
                  part.name);
  if (Status s = check_shape(part, tensor); !s.ok()) return s;
  if (!can_fill(part, tensor.dtype))
    return Status(StatusCode::invalid_dtype,
                  concat("[pack] ", part.name, " must be ", accepted_types(part), ", got ", name(tensor.dtype)), "",
                  part.name);
  if (tensor.data == nullptr && part.numel() > 0)
    return Status(StatusCode::invalid_argument, concat("[pack] ", part.name, " has no memory"), "", part.name);
  return {};
}

Status check_finite(const ExpertPart& part, const Tensor& scale) {
  for (std::int64_t r = 0; r < scale.shape[0]; ++r)
    for (std::int64_t c = 0; c < scale.shape[1]; ++c) {
      const float value = numeric::load_f32(scale.data, scale.dtype, r * scale.stride[0] + c * scale.stride[1]);
      if (!std::isfinite(value))
        return Status(StatusCode::invalid_argument,
                      concat("[pack] ", part.name, "[", r, ", ", c, "] is ", value, "; scales must be finite"), "",
                      part.name);
    }
  return {};
}

class CanonicalFormat final : public PackFormat {
 public:
  std::string_view id() const override { return "canonical"; }
  int version() const override { return 1; }
  Verdict supports(const WeightsSpec& spec) const override { return check_spec(spec); }
  std::size_t bytes(const WeightsSpec& spec) const override { return CanonicalLayout(spec).bytes(); }

  Status pack_expert(std::byte* dst, const WeightsSpec& spec, const CanonicalExpert& expert) const override {
    if (Status s = check_expert(spec, expert); !s.ok()) return s;
    const CanonicalLayout layout(spec);
    std::memset(dst, 0, layout.bytes());
    const CanonicalExpert packed = layout.view(dst);
    for (const ExpertPart& part : expert_parts(spec))
      if (part.wanted) copy_elements(expert.*part.member, packed.*part.member);
    return {};
  }

  Status unpack_expert(const std::byte* src, const WeightsSpec& spec, const CanonicalExpert& expert) const override {
    if (Status s = check_destination(spec, expert); !s.ok()) return s;
    const CanonicalExpert packed = CanonicalLayout(spec).view(src);
    for (const ExpertPart& part : expert_parts(spec))
      if (part.wanted && (expert.*part.member).present()) copy_elements(packed.*part.member, expert.*part.member);
    return {};
  }
};

}  // namespace

std::array<ExpertPart, 9> expert_parts(const WeightsSpec& spec) {
  const std::int64_t I = spec.intermediate, K = spec.hidden;
  auto matrix = [](const char* name, Tensor CanonicalExpert::*member, std::int64_t rows, std::int64_t cols,
                   const QuantDesc& desc, bool wanted) {
    return ExpertPart{name, member, 2, {rows, cols}, desc.type, Role::matrix, wanted};
  };
  auto scale = [](const char* name, Tensor CanonicalExpert::*member, std::int64_t rows, std::int64_t cols,
                  const QuantDesc& desc, bool wanted) {
    const Granularity& block = desc.granularity;
    return ExpertPart{name,
                      member,
                      2,
                      {quant::scale_extent(rows, block.rows), quant::scale_extent(cols, block.cols)},
                      DType::f32,
                      Role::scale,
                      wanted && !is_float(desc.type)};
  };
  auto bias = [](const char* name, Tensor CanonicalExpert::*member, std::int64_t rows, bool wanted) {
    return ExpertPart{name, member, 1, {rows, 1}, DType::f32, Role::bias, wanted};
  };
  using E = CanonicalExpert;
  return {matrix("gate", &E::gate, I, K, spec.w1, spec.gated),
          matrix("up", &E::up, I, K, spec.w1, true),
          matrix("down", &E::down, K, I, spec.w2, true),
          scale("gate_scale", &E::gate_scale, I, K, spec.w1, spec.gated),
          scale("up_scale", &E::up_scale, I, K, spec.w1, true),
          scale("down_scale", &E::down_scale, K, I, spec.w2, true),
          bias("gate_bias", &E::gate_bias, I, spec.gated && spec.w1_bias),
          bias("up_bias", &E::up_bias, I, spec.w1_bias),
          bias("down_bias", &E::down_bias, K, spec.w2_bias)};
}

Verdict check_spec(const WeightsSpec& spec) {
  for (const auto& [label, desc] : {std::pair{"w1", &spec.w1}, std::pair{"w2", &spec.w2}}) {
    const bool int8_rows = desc->type == DType::i8 && desc->granularity.per_row();
    const bool e4m3_blocks = desc->type == DType::e4m3 && desc->granularity == Granularity{128, 128};
    if (!float_up_to_32_bits(desc->type) && !int8_rows && !e4m3_blocks)
      return Verdict::no(concat(label, " must be f32, bf16, f16, int8 per row or e4m3 in 128x128 blocks, got ",
                                name(desc->type),
                                is_float(desc->type) ? "" : concat(" ", to_string(desc->granularity))));
    if (desc->zero_point || desc->global_scale)
      return Verdict::no(concat(label, " must have neither zero points nor a global scale"));
  }
  if (spec.hidden < 1 || spec.intermediate < 1)
    return Verdict::no(
        concat("hidden and intermediate must be at least 1, got ", spec.hidden, " and ", spec.intermediate));
  return Verdict::yes();
}

Status check_expert(const WeightsSpec& spec, const CanonicalExpert& expert) {
  if (Verdict v = check_spec(spec); !v.ok()) return Status(StatusCode::unsupported, concat("[pack] ", v.reason()));
  for (const ExpertPart& part : expert_parts(spec)) {
    const Tensor& tensor = expert.*part.member;
    if (Status s = check_part(part, tensor); !s.ok()) return s;
    if (part.wanted && part.role == Role::scale)
      if (Status s = check_finite(part, tensor); !s.ok()) return s;
  }
  return {};
}

Status check_destination(const WeightsSpec& spec, const CanonicalExpert& expert) {
  for (const ExpertPart& part : expert_parts(spec)) {
    const Tensor& tensor = expert.*part.member;
    if (!part.wanted || !tensor.present()) continue;
    if (Status s = tensors::check(tensor, Device{}, "pack", part.name); !s.ok()) return s;
    if (Status s = check_shape(part, tensor); !s.ok()) return s;
    if (tensor.dtype != part.type)
      return Status(
          StatusCode::invalid_dtype,
          concat("[pack] ", part.name, " is stored as ", name(part.type), ", the destination is ", name(tensor.dtype)),
          "", part.name);
  }
  return {};
}

void copy_elements(const Tensor& src, const Tensor& dst) {
  const std::int64_t rows = src.shape[0], cols = src.rank == 2 ? src.shape[1] : 1;
  const std::int64_t src_step = src.rank == 2 ? src.stride[1] : 1, dst_step = dst.rank == 2 ? dst.stride[1] : 1;
  const auto size = static_cast<std::size_t>(bytes(dst.dtype));
  for (std::int64_t r = 0; r < rows; ++r) {
    const std::int64_t from = r * src.stride[0], to = r * dst.stride[0];
    if (src.dtype != dst.dtype) {
      for (std::int64_t c = 0; c < cols; ++c)
        numeric::store_f32(dst.data, dst.dtype, to + c * dst_step,
                           numeric::load_f32(src.data, src.dtype, from + c * src_step));
      continue;
    }
    const std::byte* s = src.as<const std::byte>() + from * static_cast<std::int64_t>(size);
    std::byte* d = dst.as<std::byte>() + to * static_cast<std::int64_t>(size);
    if (src_step == 1 && dst_step == 1) {
      std::memcpy(d, s, static_cast<std::size_t>(cols) * size);
      continue;
    }
    for (std::int64_t c = 0; c < cols; ++c)
      std::memcpy(d + c * dst_step * static_cast<std::int64_t>(size),
                  s + c * src_step * static_cast<std::int64_t>(size), size);
  }
}

CanonicalLayout::CanonicalLayout(const WeightsSpec& spec) : parts_(expert_parts(spec)) {
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    offsets_[i] = bytes_;
    if (!parts_[i].wanted) continue;
    bytes_ += static_cast<std::size_t>(parts_[i].numel() * moekit::bytes(parts_[i].type));
    const bool w1_goes_on = parts_[i].member == &CanonicalExpert::gate;  // up follows gate as one matrix [2I, K]
    if (!w1_goes_on) bytes_ = (bytes_ + kAlign - 1) / kAlign * kAlign;
  }
}

CanonicalExpert CanonicalLayout::view(const std::byte* data) const {
  CanonicalExpert out;
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    const ExpertPart& part = parts_[i];
    if (!part.wanted) continue;
    out.*part.member = part.rank == 2 ? Tensor(data + offsets_[i], part.type, {part.shape[0], part.shape[1]})
                                      : Tensor(data + offsets_[i], part.type, {part.shape[0]});
  }
  return out;
}

const PackFormat& canonical_format() {
  static const CanonicalFormat format;
  return format;
}

}  // namespace moekit::experts
