#include "dispatch/rows.hpp"

#include <cstring>

#include "reduce/row_sum.hpp"
#include "tensor_checks.hpp"
#include "text.hpp"

namespace moekit::dispatch {
using text::concat;

Status check_prepare(const PrepareArgs& args) {
  const Tensor none;
  const std::pair<const char*, const Tensor*> all[] = {
      {"hidden", &args.hidden},
      {"routing.ids", &args.routing.ids},
      {"routing.weights", &args.routing.weights},
      {"expert_map", args.expert_map ? args.expert_map : &none},
      {"quant.a1_scale", args.quant ? &args.quant->a1_scale() : &none}};
  for (const auto& [field, tensor] : all)
    if (Status s = tensors::check(*tensor, Device{}, "prepare", field); !s.ok()) return s;
  if (args.hidden.rank == 2 && args.routing.ids.rank == 2 && args.hidden.shape[0] == args.routing.ids.shape[0])
    return {};
  return Status(StatusCode::invalid_shape,
                concat("[prepare] hidden must be [M, K] and ids [M, k], got ", shape_string(args.hidden), " and ",
                       shape_string(args.routing.ids)),
                {}, "hidden");
}

Verdict can_make(const InputSpec& input) {
  if (!input.quantised()) {
    const bool known = input.dtype == DType::f32 || input.dtype == DType::bf16 || input.dtype == DType::f16;
    return input.deferred || known ? Verdict::yes()
                                   : Verdict::no(concat("rows can be f32, bf16 or f16, asked for ", name(input.dtype)));
  }
  if (input.dtype != DType::i8 && input.dtype != DType::e4m3)
    return Verdict::no(concat("rows can be quantised to int8 or e4m3, asked for ", name(input.dtype)));
  if (input.scale_layout != InputSpec::ScaleLayout::row_major)
    return Verdict::no("scales can be row-major only, asked for another layout");
  const Granularity& g = input.granularity;
  if (g.per_tensor() && input.static_scale) return Verdict::yes();
  if (g.per_tensor())
    return Verdict::no("a dynamic scale per tensor would mix the tokens; per row or in groups it can be");
  if (g.rows != 1) return Verdict::no(concat("one scale can cover one row or a part of it, asked for ", to_string(g)));
  if (g.cols == 0) return Verdict::no("groups of 0 columns");
  return Verdict::yes();
}

RowPlan plan_rows(const InputSpec& input, DType hidden, std::int64_t K, bool must_copy) {
  RowPlan plan;
  if (!input.quantised()) {
    plan.type = input.deferred ? hidden : input.dtype;
    plan.kind = must_copy || plan.type != hidden ? RowPlan::Kind::values : RowPlan::Kind::pass;
    return plan;
  }
  plan.kind = RowPlan::Kind::codes;
  plan.type = input.dtype;
  plan.granularity = input.granularity;
  plan.scheme = {input.dtype, input.granularity.cols < 0 ? -1 : input.granularity.cols, input.int8_divisor, 0.0f};
  plan.num_groups = plan.scheme.num_groups(K);
  return plan;
}

Status bind_static_scale(const InputSpec& input, const QuantConfig* quant, std::int64_t rows, RowPlan& plan) {
  if (plan.kind != RowPlan::Kind::codes || !input.static_scale) return {};
  const Tensor scale = quant ? quant->a1_scale() : Tensor();
  if (!scale.present())
    return Status(StatusCode::invalid_argument, "[prepare] the experts want a static a1_scale, and none was given",
                  "put it into QuantTensors::a1_scale", "quant.a1_scale");
  const bool by_row = scale.rank == 2 && scale.shape[0] == rows && scale.shape[1] == 1;
  if (scale.numel() != 1 && !by_row)
    return Status(StatusCode::unsupported,
                  concat("[prepare] a1_scale is ", shape_string(scale),
                         "; rows that are not yet at an expert take [1] or [", rows, ", 1]"),
                  "use the largest of the experts' scales for all", "quant.a1_scale");
  plan.static_scale = scale;
  return {};
}

void make_row(const RowPlan& plan, const Tensor& hidden, std::int64_t row, float factor, void* data, float* scales) {
  const Tensor from = hidden.index(row);
  const std::int64_t K = from.shape[0];
  if (plan.kind == RowPlan::Kind::codes) {
    quant::RowScheme scheme = plan.scheme;
    const Tensor& given = plan.static_scale;
    if (given.present()) scheme.static_scale = given.as<float>()[given.numel() == 1 ? 0 : row * given.stride[0]];
    quant::quantise_row({from.data, from.dtype, K, factor}, scheme, data, scales);
  } else if (factor == 1.0f && plan.type == from.dtype) {
    std::memcpy(data, from.data, plan.row_bytes(K));
  } else {
    reduce::convert_row(from.data, from.dtype, data, plan.type, K, factor);
  }
}

}  // namespace moekit::dispatch
