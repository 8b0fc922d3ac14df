#include "experts/call.hpp"

#include "experts/canonical.hpp"
#include "tensor_checks.hpp"
#include "text.hpp"

namespace moekit::experts {
namespace {
using text::concat;

Status bad(StatusCode code, std::string message, const char* field) {
  return Status(code, std::move(message), "", field);
}

/// Everything that is read or written lies in host memory and has addresses.
Status check_tensors(const ExpertsArgs& args) {
  const Tensor none;
  const std::pair<const char*, const Tensor*> all[] = {{"activations", &args.activations.data},
                                                       {"activations.scale", &args.activations.scale},
                                                       {"routing.ids", &args.routing.ids},
                                                       {"routing.weights", &args.routing.weights},
                                                       {"expert_map", args.expert_map ? args.expert_map : &none},
                                                       {"tokens", args.tokens ? &args.tokens->counts : &none},
                                                       {"a2_scale", &args.a2_scale},
                                                       {"output", &args.output}};
  for (const auto& [field, tensor] : all)
    if (Status s = tensors::check(*tensor, Device{}, "experts", field); !s.ok()) return s;
  return {};
}

Status check_weights(const ExpertsArgs& args) {
  const WeightsView& w = args.weights;
  if (w.format == nullptr || (w.data == nullptr && w.spec.num_local > 0))
    return bad(StatusCode::invalid_argument, "[experts] weights are missing", "weights");
  if (const std::size_t bytes = w.format->bytes(w.spec); w.spec.num_local > 1 && w.expert_stride < bytes)
    return bad(
        StatusCode::invalid_argument,
        concat("[experts] expert_stride is ", w.expert_stride, ", one expert as ", w.format->id(), " takes ", bytes),
        "weights.expert_stride");
  if (Status s = validate(args.activation); !s.ok()) return s;
  if (args.activation.gated != w.spec.gated)
    return bad(StatusCode::invalid_argument,
               concat("[experts] the activation is ", args.activation.gated ? "gated" : "ungated", ", the weights are ",
                      w.spec.gated ? "gated" : "ungated"),
               "activation.gated");
  if (args.quant != nullptr && (args.quant->spec().w1 != w.spec.w1 || args.quant->spec().w2 != w.spec.w2))
    return bad(StatusCode::invalid_argument,
               concat("[experts] quant speaks of ", weights_scheme(args.quant->spec()),
                      " weights, the pack holds w1 as ", name(w.spec.w1.type), " and w2 as ", name(w.spec.w2.type)),
               "quant");
  return {};
}

Status check_activations(const ExpertsArgs& args, ActivationFormat format) {
  const Tensor& x = args.activations.data;
  const int rank = format == ActivationFormat::standard ? 2 : 3;
  if (x.rank != rank)
    return bad(StatusCode::invalid_shape,
               concat("[experts] ", name(format), " activations must have rank ", rank, ", got ", shape_string(x)),
               "activations");
  const DType a1 = args.quant == nullptr ? x.dtype : args.quant->spec().a1.type;
  const bool quantised = !is_float(a1);
  if (quantised ? x.dtype != a1 : (x.dtype != DType::f32 && x.dtype != DType::bf16 && x.dtype != DType::f16))
    return bad(
        StatusCode::invalid_dtype,
        concat("[experts] activations must be ", quantised ? name(a1) : "f32, bf16 or f16", ", got ", name(x.dtype)),
        "activations");
  if (quantised != args.activations.scale.present())
    return bad(StatusCode::invalid_argument,
               concat("[experts] ", name(x.dtype), " activations ", quantised ? "need scales" : "have no scales"),
               "activations.scale");
  if (quantised && args.activations.scale.dtype != DType::f32)
    return bad(StatusCode::invalid_dtype,
               concat("[experts] scales of activations must be f32, got ", name(args.activations.scale.dtype)),
               "activations.scale");
  if (!quantised || args.quant == nullptr) return {};
  const Tensor& scale = args.activations.scale;
  const std::int64_t groups = quant::scale_extent(x.shape[rank - 1], args.quant->spec().a1.granularity.cols);
  if (scale.numel() == 1) return {};
  bool fits = scale.rank == rank && scale.shape[rank - 1] == groups;
  for (int axis = 0; fits && axis + 1 < rank; ++axis) fits = scale.shape[axis] == x.shape[axis];
  if (fits) return {};
  return bad(StatusCode::invalid_shape,
             concat("[experts] scales of activations ", shape_string(x), " must be one value or [rows, ", groups,
                    "], got ", shape_string(scale)),
             "activations.scale");
}

Status check_routing(const ExpertsArgs& args) {
  const Tensor &ids = args.routing.ids, &weights = args.routing.weights;
  if (ids.rank != 2 || ids.dtype != DType::i32)
    return bad(StatusCode::invalid_dtype,
               concat("[experts] ids must be i32 [M, k], got ", name(ids.dtype), " ", shape_string(ids)),
               "routing.ids");
  if (weights.rank != 2 || weights.dtype != DType::f32 || weights.shape[0] != ids.shape[0] ||
      weights.shape[1] != ids.shape[1])
    return bad(StatusCode::invalid_shape,
               concat("[experts] router weights must be f32 ", shape_string(ids), ", got ", name(weights.dtype), " ",
                      shape_string(weights)),
               "routing.weights");
  if (args.expert_map == nullptr) return {};
  if (args.expert_map->dtype != DType::i32 || args.expert_map->rank != 1 ||
      args.expert_map->shape[0] != args.num_experts)
    return bad(StatusCode::invalid_shape,
               concat("[experts] expert_map must be i32 [", args.num_experts, "], got ", name(args.expert_map->dtype),
                      " ", shape_string(*args.expert_map)),
               "expert_map");
  return {};
}

Status check_static_scale(const ExpertsArgs& args) {
  const bool announced = quantises_h(args) && args.quant->spec().a2.static_scale;
  const Tensor& scale = args.a2_scale;
  if (announced != scale.present())
    return bad(
        StatusCode::invalid_argument,
        concat("[experts] a2.static_scale is ", announced, ", but a2_scale is ", scale.present() ? "given" : "missing"),
        "a2_scale");
  if (!announced || scale.numel() == 1) return {};
  const std::int64_t L = args.weights.spec.num_local;
  if ((scale.rank == 1 && scale.shape[0] == L) ||
      (scale.rank == 2 && args.activations.data.rank == 2 && scale.shape[1] == 1 &&
       scale.shape[0] == args.activations.data.shape[0]))
    return {};
  return bad(StatusCode::invalid_shape,
             concat("[experts] a2_scale must be [1], [L = ", L, "] or [rows, 1], got ", shape_string(scale)),
             "a2_scale");
}

Status check_counts(const ExpertsArgs& args) {
  const std::int64_t L = args.weights.spec.num_local;
  if (args.tokens == nullptr || !args.tokens->counts.present())
    return bad(StatusCode::invalid_argument, "[experts] batched activations need the rows per expert", "tokens");
  const Tensor& counts = args.tokens->counts;
  if (counts.dtype != DType::i32 || counts.rank != 1 || counts.shape[0] != L)
    return bad(StatusCode::invalid_shape,
               concat("[experts] counts must be i32 [", L, "], got ", name(counts.dtype), " ", shape_string(counts)),
               "tokens");
  return {};
}

Status check_memory(const ExpertsArgs& args, const ExpertsWorkspace& needed) {
  const struct {
    const char* name;
    std::size_t needed, given;
  } pieces[] = {{"workspace13", needed.w13_bytes, args.workspace13.size},
                {"workspace2", needed.w2_bytes, args.workspace2.size}};
  for (const auto& piece : pieces)
    if (piece.given < piece.needed)
      return bad(StatusCode::workspace_too_small,
                 concat("[experts] ", piece.name, " has ", piece.given, " bytes, ", piece.needed, " are needed"),
                 piece.name);
  const TensorSpec& spec = needed.output;
  const Tensor& out = args.output;
  bool same = out.rank == spec.rank;
  for (int axis = 0; same && axis < spec.rank; ++axis) same = out.shape[axis] == spec.shape[axis];
  const bool type_fits = out.dtype == DType::f32 || out.dtype == DType::bf16 || out.dtype == DType::f16;
  if (same && type_fits && (out.data != nullptr || out.numel() == 0)) return {};
  return bad(StatusCode::invalid_shape,
             concat("[experts] output must be f32, bf16 or f16 ", shape_string(spec.on(nullptr, {})), ", got ",
                    name(out.dtype), " ", shape_string(out)),
             "output");
}

Status sizes(const ExpertsArgs& args, ProblemSize& size) {
  return ProblemSize::from(args.activations.data, args.weights.spec, args.routing.ids, size);
}

}  // namespace

Status call_size(const ExpertsArgs& args, ProblemSize& size) {
  if (Status s = check_tensors(args); !s.ok()) return s;
  return sizes(args, size);
}

Status check_call(const ExpertsArgs& args, ActivationFormat format, const ExpertsWorkspace& needed, ProblemSize& size) {
  if (Status s = check_weights(args); !s.ok()) return s;
  if (Status s = check_activations(args, format); !s.ok()) return s;
  if (Status s = check_routing(args); !s.ok()) return s;
  if (Status s = sizes(args, size); !s.ok()) return s;
  if (Status s = check_static_scale(args); !s.ok()) return s;
  if (format == ActivationFormat::batched_experts)
    if (Status s = check_counts(args); !s.ok()) return s;
  return check_memory(args, needed);
}

Verdict check_problem(const Problem& p, ActivationFormat format) {
  if (p.device.type != DeviceType::cpu) return Verdict::no(concat("runs on cpu, got ", to_string(p.device)));
  if (p.format != format) return Verdict::no(concat("takes ", name(format), " activations, got ", name(p.format)));
  if (Verdict v = check_spec(p.weights); !v.ok()) return v;
  if (Status s = validate(p.quant); !s.ok()) return Verdict::no(s.message());
  if (p.quant.a1.global_scale || p.quant.a2.global_scale)
    return Verdict::no("global activation scales are not supported");
  if (p.quant.w1.type != p.weights.w1.type || p.quant.w2.type != p.weights.w2.type)
    return Verdict::no(concat("quant speaks of ", name(p.quant.w1.type), " and ", name(p.quant.w2.type),
                              " weights, the weights are ", name(p.weights.w1.type), " and ", name(p.weights.w2.type)));
  if (Status s = validate(p.activation); !s.ok()) return Verdict::no(s.message());
  if (p.activation.gated != p.weights.gated)
    return Verdict::no(concat("the activation is ", p.activation.gated ? "gated" : "ungated", ", the weights are ",
                              p.weights.gated ? "gated" : "ungated"));
  for (DType type : {p.hidden_dtype, output_type(p)})
    if (type != DType::f32 && type != DType::bf16 && type != DType::f16)
      return Verdict::no(concat("rows and output must be f32, bf16 or f16, got ", name(type)));
  return Verdict::yes();
}

Verdict check_batched(const Problem& p, const std::optional<BatchedShape>& shape) {
  if (!shape) return Verdict::no("batched experts are built with the sizes of a batched dispatcher");
  if (!p.batched || *p.batched == *shape) return Verdict::yes();
  return Verdict::no(concat("built for T = ", shape->max_tokens_per_rank, ", D = ", shape->num_dispatchers,
                            ", the problem has T = ", p.batched->max_tokens_per_rank,
                            ", D = ", p.batched->num_dispatchers));
}

InputSpec input_spec(const Problem& problem) {
  InputSpec spec;
  const QuantDesc& a1 = problem.quant.a1;
  spec.dtype = is_float(a1.type) ? problem.hidden_dtype : a1.type;
  if (is_float(a1.type)) return spec;
  spec.granularity = a1.granularity;
  spec.static_scale = a1.static_scale;
  spec.int8_divisor = problem.quant.int8_divisor;
  return spec;
}

quant::RowScheme h_scheme(const ExpertsArgs& args, std::int64_t slot, std::int64_t row) {
  const QuantSpec& quant = args.quant->spec();
  quant::RowScheme scheme{quant.a2.type, quant.a2.granularity.cols, quant.int8_divisor};
  const Tensor& given = args.a2_scale;
  if (!given.present()) return scheme;
  const std::int64_t index = given.numel() == 1 ? 0 : given.rank == 1 ? slot : row;
  scheme.static_scale = given.as<const float>()[index * given.stride[0]];
  return scheme;
}

ActivationRow::ActivationRow(const ExpertsArgs& args, std::int64_t slot, std::int64_t row)
    : data_(args.activations.data) {
  const bool batched = data_.rank == 3;
  auto offset = [&](const Tensor& t) { return batched ? slot * t.stride[0] + row * t.stride[1] : row * t.stride[0]; };
  row_offset_ = offset(data_);
  const Tensor& scale = args.activations.scale;
  if (!scale.present()) return;
  group_ = args.quant->spec().a1.granularity.cols;
  const bool one = scale.numel() == 1;  // per tensor
  scale_ = scale.as<const float>() + (one ? 0 : offset(scale));
  scale_stride_ = one ? 0 : scale.stride[scale.rank - 1];
}

}  // namespace moekit::experts
