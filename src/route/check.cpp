#include "route/check.hpp"

#include <cmath>

#include "quant/numeric.hpp"
#include "tensor_checks.hpp"
#include "text.hpp"

namespace moekit::route {
using text::concat;

namespace {

Status bad_shape(std::string message, std::string field) {
  return Status(StatusCode::invalid_shape, std::move(message), {}, std::move(field));
}

Status check_logits(const Tensor& logits) {
  if (Status s = tensors::check(logits, Device{}, "router", "logits"); !s.ok()) return s;
  if (logits.rank != 2)
    return bad_shape(concat("[router] logits must be [M, E], got ", shape_string(logits)), "logits");
  if (logits.dtype != DType::f32 && logits.dtype != DType::bf16 && logits.dtype != DType::f16)
    return Status(StatusCode::invalid_dtype,
                  concat("[router] logits must be f32, bf16 or f16, got ", name(logits.dtype)), {}, "logits");
  if (logits.shape[1] > 1 && logits.stride[1] != 1)
    return bad_shape(concat("[router] logits must have column stride 1, got ", logits.stride[1]), "logits");
  if (logits.numel() > 0 && !logits.data)
    return Status(StatusCode::invalid_argument, "[router] logits have no data", {}, "logits");
  return {};
}

Status check_output(const Tensor& out, const char* what, DType type, std::int64_t num_rows, std::int64_t top_k) {
  if (Status s = tensors::check(out, Device{}, "router", what); !s.ok()) return s;
  if (out.rank != 2 || out.shape[0] != num_rows || out.shape[1] != top_k)
    return bad_shape(concat("[router] ", what, " must be [", num_rows, ", ", top_k, "], got ", shape_string(out)),
                     what);
  if (out.dtype != type)
    return Status(StatusCode::invalid_dtype,
                  concat("[router] ", what, " must be ", name(type), ", got ", name(out.dtype)), {}, what);
  if (top_k > 1 && out.stride[1] != 1)
    return bad_shape(concat("[router] ", what, " must have column stride 1, got ", out.stride[1]), what);
  if (num_rows > 1 && std::abs(out.stride[0]) < top_k)
    return bad_shape(concat("[router] rows of ", what, " overlap: row stride ", out.stride[0], ", ", top_k, " columns"),
                     what);
  if (num_rows > 0 && !out.data)
    return Status(StatusCode::invalid_argument, concat("[router] ", what, " has no data"), {}, what);
  return {};
}

Status check_bias(const Tensor* bias, bool wanted, const char* what, std::int64_t num_experts) {
  const bool given = bias && bias->present();
  if (given != wanted)
    return Status(StatusCode::invalid_argument,
                  concat("[router] the configuration has ", wanted ? "a " : "no ", what, ", the tensors have ",
                         given ? "one" : "none"),
                  concat("set both config.", what, " and tensors.", what, ", or neither"), what);
  if (!wanted) return {};
  if (Status s = tensors::check(*bias, Device{}, "router", what); !s.ok()) return s;
  if (bias->rank < 1 || bias->shape[bias->rank - 1] != num_experts || bias->numel() != num_experts)
    return bad_shape(concat("[router] ", what, " must be [", num_experts, "], got ", shape_string(*bias)), what);
  if (!is_float(bias->dtype))
    return Status(StatusCode::invalid_dtype,
                  concat("[router] ", what, " must be a float type, got ", name(bias->dtype)), {}, what);
  if (num_experts > 1 && bias->stride[bias->rank - 1] != 1)
    return bad_shape(concat("[router] ", what, " must have stride 1, got ", bias->stride[bias->rank - 1]), what);
  if (!bias->data) return Status(StatusCode::invalid_argument, concat("[router] ", what, " has no data"), {}, what);
  return {};
}

Status check_no_nan(const Tensor& logits, std::int64_t num_rows) {
  for (std::int64_t row = 0; row < num_rows; ++row)
    for (std::int64_t expert = 0; expert < logits.shape[1]; ++expert)
      if (std::isnan(numeric::load_f32(logits.data, logits.dtype, row * logits.stride[0] + expert)))
        return Status(StatusCode::invalid_argument,
                      concat("[router] the logit of row ", row, ", expert ", expert, " is NaN"),
                      "without checked mode such an expert ranks last and the row's weights are NaN", "logits");
  return {};
}

Status check_no_nan_bias(const Tensor& bias, const char* what) {
  for (std::int64_t expert = 0; expert < bias.numel(); ++expert)
    if (std::isnan(numeric::load_f32(bias.data, bias.dtype, expert)))
      return Status(StatusCode::invalid_argument, concat("[router] the ", what, " of expert ", expert, " is NaN"), {},
                    what);
  return {};
}

}  // namespace

Status check(const RouteArgs& args, RouteSize& size) {
  if (!args.config) return Status(StatusCode::invalid_argument, "[router] no configuration given", {}, "config");
  const RouterConfig& config = *args.config;
  if (config.source != RouterSource::logits)
    return Status(StatusCode::unsupported,
                  concat("[router] this router reads logits; the source is ", to_string(config)),
                  "set source = logits, or call a router made for that source", "router.source");
  if (Status s = check_logits(args.logits); !s.ok()) return s;
  const std::int64_t num_rows = args.logits.shape[0], num_experts = args.logits.shape[1];
  const std::int64_t top_k = args.ids.rank == 2 ? args.ids.shape[1] : 0;
  if (Status s = check_output(args.ids, "ids", DType::i32, num_rows, top_k); !s.ok()) return s;
  if (Status s = check_output(args.weights, "weights", DType::f32, num_rows, top_k); !s.ok()) return s;
  for (const auto& [what, out] : {std::pair{"ids", &args.ids}, std::pair{"weights", &args.weights}})
    if (tensors::overlap(*out, args.logits))
      return Status(StatusCode::invalid_argument, concat("[router] ", what, " overlap the logits"),
                    "give them memory of their own", what);
  if (tensors::overlap(args.weights, args.ids))
    return Status(StatusCode::invalid_argument, "[router] weights overlap the ids", "give them memory of their own",
                  "weights");
  if (Status s = validate(config, num_experts, top_k); !s.ok()) return s;
  const RouterTensors* given = args.tensors;
  if (Status s = check_bias(given ? &given->logit_bias : nullptr, config.logit_bias, "logit_bias", num_experts);
      !s.ok())
    return s;
  if (Status s =
          check_bias(given ? &given->selection_bias : nullptr, config.selection_bias, "selection_bias", num_experts);
      !s.ok())
    return s;
  if (args.num_valid < -1 || args.num_valid > num_rows)
    return Status(StatusCode::invalid_argument,
                  concat("[router] num_valid must be in [-1, ", num_rows, "], got ", args.num_valid), {}, "num_valid");
  const std::int64_t num_valid = args.num_valid < 0 ? num_rows : args.num_valid;
  if (args.checked) {
    if (Status s = check_no_nan(args.logits, num_valid); !s.ok()) return s;
    if (config.logit_bias)
      if (Status s = check_no_nan_bias(given->logit_bias, "logit_bias"); !s.ok()) return s;
    if (config.selection_bias)
      if (Status s = check_no_nan_bias(given->selection_bias, "selection_bias"); !s.ok()) return s;
  }
  size = {num_rows, num_valid, num_experts, top_k};
  return {};
}

Verdict supports(const RouteProblem& problem) {
  if (problem.device.type != DeviceType::cpu) return Verdict::no(concat("needs cpu, got ", to_string(problem.device)));
  if (problem.config.source != RouterSource::logits)
    return Verdict::no(concat("reads logits, the router is ", to_string(problem.config)));
  if (const Status s = validate(problem.config, problem.num_experts, problem.top_k); !s.ok())
    return Verdict::no(s.message());
  return Verdict::yes();
}

void clear_rows(const RouteArgs& args, std::int64_t begin, std::int64_t end) {
  for (std::int64_t row = begin; row < end; ++row)
    for (std::int64_t slot = 0; slot < args.ids.shape[1]; ++slot) {
      args.ids.as<std::int32_t>()[row * args.ids.stride[0] + slot] = -1;
      args.weights.as<float>()[row * args.weights.stride[0] + slot] = 0.0f;
    }
}

}  // namespace moekit::route
