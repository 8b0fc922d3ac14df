#include <moekit/config.hpp>

#include <cmath>

#include "enum_values.hpp"
#include "text.hpp"

namespace moekit::inline v0 {
using text::concat;

namespace {

Status bad(std::string message, std::string hint, std::string field) {
  return Status(StatusCode::invalid_argument, std::move(message), std::move(hint), std::move(field));
}

struct WeightScheme {
  std::string_view name;
  DType type;
  Granularity granularity;
  std::string_view activations;  // as published
};
constexpr WeightScheme kWeightSchemes[] = {
    {"f32", DType::f32, {}, "f32"},
    {"bf16", DType::bf16, {}, "bf16"},
    {"f16", DType::f16, {}, "f16"},
    {"int8", DType::i8, {1, -1}, "int8_token"},
    {"fp8_block128", DType::e4m3, {128, 128}, "fp8_group128"},
};
struct ActivationScheme {
  std::string_view name, alias;
  DType type;
  Granularity granularity;
};
constexpr ActivationScheme kActivationSchemes[] = {
    {"f32", "", DType::f32, {}},
    {"bf16", "", DType::bf16, {}},
    {"f16", "", DType::f16, {}},
    {"int8_token", "int8", DType::i8, {1, -1}},
    {"fp8_group128", "fp8", DType::e4m3, {1, 128}},
};
template <class Table>
std::string list_names(const Table& table) {
  std::string out;
  for (const auto& entry : table) {
    if (!out.empty()) out += ' ';
    out += entry.name;
  }
  return out;
}
template <class Scheme>
bool describes(const Scheme& scheme, const QuantDesc& desc) {
  return scheme.type == desc.type && (is_float(desc.type) || scheme.granularity == desc.granularity);
}

Status validate_scores(const RouterConfig& router, std::int64_t num_experts, std::int64_t top_k) {
  const std::int64_t groups = router.num_groups;
  if (groups < 1 || num_experts % groups != 0)
    return bad(concat("[router] ", groups, " groups do not divide ", num_experts, " experts"),
               "num_groups must divide num_experts", "router.num_groups");
  const std::int64_t per_group = num_experts / groups;
  if (router.keep_groups < 1 || router.keep_groups > groups)
    return bad(concat("[router] keep_groups is ", router.keep_groups, " of ", groups, " groups"),
               "1 ≤ keep_groups ≤ num_groups", "router.keep_groups");
  if (groups > 1 && router.group_score == GroupScore::top2_sum && per_group < 2)
    return bad(concat("[router] group score top2_sum needs at least 2 experts a group, got ", per_group),
               "use fewer groups or group score max", "router.group_score");
  if (router.group_fill == GroupFill::neg_inf && top_k > router.keep_groups * per_group)
    return bad(concat("[router] top_k ", top_k, " is more than the ", router.keep_groups * per_group,
                      " experts of the kept groups"),
               "keep more groups", "router.keep_groups");
  if (router.softmax_over == SoftmaxOver::selected && router.score != Score::softmax)
    return bad("[router] softmax_over = selected needs score = softmax", "", "router.softmax_over");
  if (router.softmax_over == SoftmaxOver::selected && groups > 1)
    return bad("[router] groups need softmax_over = all", "", "router.num_groups");
  return {};
}

/// Float activations keep at least what the rows have.
Status validate_types(const LayerConfig& c) {
  for (const auto& [desc, field] : {std::pair{c.quant.a1, "quant.a1.type"}, std::pair{c.quant.a2, "quant.a2.type"}})
    if (is_float(desc.type) && desc.type != c.dtype && desc.type != DType::f32)
      return bad(concat("[config] ", field, " is ", name(desc.type), ", which is narrower than the layer's rows, ",
                        name(c.dtype)),
                 concat("set quant = QuantSpec::plain(dtype), or the activations to f32 or ", name(c.dtype)), field);
  return {};
}

}  // namespace

const char* name(ActivationKind kind) {
  switch (kind) {
    case ActivationKind::silu: return "silu";
    case ActivationKind::gelu: return "gelu";
    case ActivationKind::gelu_tanh: return "gelu_tanh";
    case ActivationKind::swigluoai: return "swigluoai";
    case ActivationKind::relu2: return "relu2";
    case ActivationKind::none: return "none";
  }
  return "?";
}

std::string to_string(const Activation& a) {
  std::string out = name(a.kind);
  if (!a.gated) out += " ungated";
  if (a.layout == GateLayout::interleaved) out += " interleaved";
  if (a.alpha != 1.0f) out += concat(" alpha=", a.alpha);
  if (a.beta != 0.0f) out += concat(" beta=", a.beta);
  if (std::isfinite(a.clamp_gate)) out += concat(" clamp_gate=", a.clamp_gate);
  if (std::isfinite(a.clamp_up)) out += concat(" clamp_up=", a.clamp_up);
  return out;
}

Status validate(const Activation& a) {
  if (Status s = values::check_all(a); !s.ok()) return s;
  if (!(a.clamp_gate > 0))
    return bad(concat("[activation] clamp_gate must be above 0, got ", a.clamp_gate), "infinity means no clamp",
               "activation.clamp_gate");
  if (!(a.clamp_up > 0))
    return bad(concat("[activation] clamp_up must be above 0, got ", a.clamp_up), "infinity means no clamp",
               "activation.clamp_up");
  if (!std::isfinite(a.alpha) || !std::isfinite(a.beta))
    return bad(concat("[activation] alpha and beta must be finite, got ", a.alpha, " and ", a.beta), "",
               "activation.alpha");
  if (a.kind == ActivationKind::swigluoai && !a.gated)
    return bad("[activation] swigluoai is gated by definition", "set gated = true, or use silu ungated",
               "activation.gated");
  if (a.kind == ActivationKind::none && a.gated)
    return bad("[activation] none has no gated form", "set gated = false", "activation.gated");
  if (!a.gated && a.layout == GateLayout::interleaved)
    return bad("[activation] an ungated activation has nothing to interleave", "set layout = halves",
               "activation.layout");
  const bool uses_alpha = a.kind == ActivationKind::silu || a.kind == ActivationKind::swigluoai;
  if (!uses_alpha && a.alpha != 1.0f)
    return bad(concat("[activation] ", name(a.kind), " has no alpha, got ", a.alpha), "leave alpha at 1",
               "activation.alpha");
  if (a.kind != ActivationKind::swigluoai && a.beta != 0.0f)
    return bad(concat("[activation] ", name(a.kind), " has no beta, got ", a.beta), "leave beta at 0",
               "activation.beta");
  return {};
}

std::string to_string(const RouterConfig& r) {
  switch (r.source) {
    case RouterSource::external: return "external";
    case RouterSource::custom: return "custom";
    case RouterSource::simulated: {
      constexpr const char* kNames[] = {"uniform", "balanced", "zipf", "hot", "single"};
      const auto at = static_cast<std::size_t>(r.simulated);
      return concat("simulated ", at < std::size(kNames) ? kNames[at] : "?");
    }
    case RouterSource::logits: break;
  }
  constexpr const char* kScores[] = {"softmax", "sigmoid", "sqrt_softplus", "identity"};
  const auto at = static_cast<std::size_t>(r.score);
  std::string out = at < std::size(kScores) ? kScores[at] : "?";
  if (r.softmax_over == SoftmaxOver::selected) out += " over the selected";
  if (r.logit_bias) out += ", logit bias";
  if (r.selection_bias) out += ", selection bias";
  if (r.num_groups > 1)
    out += concat(", best ", r.keep_groups, " of ", r.num_groups, " groups by ",
                  r.group_score == GroupScore::max ? "max" : "top2 sum");
  if (r.renormalise) out += r.renorm_p == 1.0f ? ", renormalised" : concat(", renormalised p=", r.renorm_p);
  if (r.scale != 1.0f) out += concat(", x ", r.scale);
  if (r.weight_on_input) out += ", weight on input";
  return out;
}

Status validate(const RouterConfig& r, std::int64_t num_experts, std::int64_t top_k) {
  if (Status s = values::check_all(r); !s.ok()) return s;
  if (num_experts < 1)
    return bad(concat("[router] num_experts must be at least 1, got ", num_experts), "", "num_experts");
  if (top_k < 1 || top_k > num_experts)
    return bad(concat("[router] top_k must be in [1, num_experts = ", num_experts, "], got ", top_k), "", "top_k");
  if (r.weight_on_input && top_k != 1)
    return bad(concat("[router] weight_on_input needs top_k = 1, got ", top_k), "", "router.weight_on_input");
  if (r.source == RouterSource::external || r.source == RouterSource::custom) return {};
  if (r.source == RouterSource::simulated) {
    if (r.simulated == Simulated::hot &&
        (r.simulated_n < 1 || r.simulated_n > num_experts || !(r.simulated_a >= 0 && r.simulated_a <= 1)))
      return bad(concat("[router] hot routing needs 1 ≤ n ≤ ", num_experts,
                        " and a share in [0, 1], got n = ", r.simulated_n, ", share = ", r.simulated_a),
                 "", "router.simulated_n");
    if (r.simulated == Simulated::zipf && !(r.simulated_a >= 0 && r.simulated_a <= 10))
      return bad(concat("[router] zipf exponent must be in [0, 10], got ", r.simulated_a), "", "router.simulated_a");
    return {};
  }
  if (num_experts > 2048)
    return Status(StatusCode::unsupported, concat("[router] ", num_experts, " experts, at most 2048 are routed here"),
                  "route outside and pass routing", "num_experts");
  if (top_k > 64)
    return Status(StatusCode::unsupported, concat("[router] top_k ", top_k, ", at most 64 are routed here"),
                  "route outside and pass routing", "top_k");
  if (!std::isfinite(r.scale)) return bad(concat("[router] scale must be finite, got ", r.scale), "", "router.scale");
  if (!std::isfinite(r.renorm_eps) || r.renorm_eps < 0)
    return bad(concat("[router] renorm_eps must be finite and not negative, got ", r.renorm_eps), "",
               "router.renorm_eps");
  if (r.renormalise && !(r.renorm_p > 0))
    return bad(concat("[router] renorm_p must be above 0, got ", r.renorm_p), "", "router.renorm_p");
  return validate_scores(r, num_experts, top_k);
}

Status quant_from_names(std::string_view weights, std::string_view activations, QuantSpec& out) {
  const WeightScheme* w = nullptr;
  for (const WeightScheme& scheme : kWeightSchemes)
    if (scheme.name == weights) w = &scheme;
  if (!w)
    return Status(StatusCode::unsupported, concat("[quant] unknown weight scheme '", weights, "'"),
                  concat("there are: ", list_names(kWeightSchemes)), "quant.w1.type");
  if (activations.empty()) activations = w->activations;
  const ActivationScheme* a = nullptr;
  for (const ActivationScheme& scheme : kActivationSchemes)
    if (scheme.name == activations || (!scheme.alias.empty() && scheme.alias == activations)) a = &scheme;
  if (!a)
    return Status(StatusCode::unsupported, concat("[quant] unknown activation scheme '", activations, "'"),
                  concat("there are: ", list_names(kActivationSchemes)), "quant.a1.type");
  QuantSpec spec;
  spec.w1 = spec.w2 = {w->type, w->granularity};
  spec.a1 = spec.a2 = {a->type, a->granularity};
  if (Status s = validate(spec); !s.ok()) return s;
  out = spec;
  return {};
}

std::string weights_scheme(const QuantSpec& quant) {
  for (const WeightScheme& scheme : kWeightSchemes)
    if (describes(scheme, quant.w1)) return std::string(scheme.name);
  return concat(name(quant.w1.type), " ", to_string(quant.w1.granularity));
}

std::string activations_scheme(const QuantSpec& quant) {
  for (const ActivationScheme& scheme : kActivationSchemes)
    if (describes(scheme, quant.a1)) return std::string(scheme.name);
  return concat(name(quant.a1.type), " ", to_string(quant.a1.granularity));
}

Status validate(const QuantSpec& quant) {
  if (Status s = values::check_all(quant); !s.ok()) return s;
  auto unsupported = [](std::string message, std::string field) {
    return Status(
        StatusCode::unsupported, std::move(message),
        concat("weight schemes: ", list_names(kWeightSchemes), "; activations: ", list_names(kActivationSchemes)),
        std::move(field));
  };
  auto known = [](const auto& table, const QuantDesc& desc) {
    for (const auto& scheme : table)
      if (describes(scheme, desc)) return true;
    return false;
  };
  if (!known(kWeightSchemes, quant.w1))
    return unsupported(
        concat("[quant] w1 as ", name(quant.w1.type), " ", to_string(quant.w1.granularity), " is no known scheme"),
        "quant.w1");
  if (!known(kWeightSchemes, quant.w2))
    return unsupported(
        concat("[quant] w2 as ", name(quant.w2.type), " ", to_string(quant.w2.granularity), " is no known scheme"),
        "quant.w2");
  if (!known(kActivationSchemes, quant.a1))
    return unsupported(
        concat("[quant] a1 as ", name(quant.a1.type), " ", to_string(quant.a1.granularity), " is no known scheme"),
        "quant.a1");
  if (!known(kActivationSchemes, quant.a2))
    return unsupported(
        concat("[quant] a2 as ", name(quant.a2.type), " ", to_string(quant.a2.granularity), " is no known scheme"),
        "quant.a2");
  if (quant.w1.type != quant.w2.type)
    return unsupported(concat("[quant] w1 is ", name(quant.w1.type), " and w2 is ", name(quant.w2.type),
                              "; one type for both is read here"),
                       "quant.w2.type");
  if (quant.a1.type != quant.a2.type)
    return unsupported(concat("[quant] a1 is ", name(quant.a1.type), " and a2 is ", name(quant.a2.type),
                              "; one type for both is done here"),
                       "quant.a2.type");
  if (!is_float(quant.a1.type) && quant.a1.type != quant.w1.type)
    return unsupported(concat("[quant] ", name(quant.a1.type), " activations with ", name(quant.w1.type), " weights"),
                       "quant.a1.type");
  if (quant.int8_divisor != 127.0f && quant.int8_divisor != 127.5f)
    return bad(concat("[quant] int8_divisor must be 127 or 127.5, got ", quant.int8_divisor), "", "quant.int8_divisor");
  return {};
}

const char* name(Determinism level) {
  switch (level) {
    case Determinism::fast: return "fast";
    case Determinism::repeatable: return "repeatable";
    case Determinism::batch_invariant: return "batch_invariant";
  }
  return "?";
}

Status validate(const LayerConfig& c) {
  auto positive = [](std::int64_t value, const char* field) {
    return value >= 1 ? Status() : bad(concat("[config] ", field, " must be at least 1, got ", value), "", field);
  };
  constexpr std::int64_t kLargest = std::int64_t{1} << 30;
  for (auto [value, field] : {std::pair{c.num_experts, "num_experts"},
                              {c.top_k, "top_k"},
                              {c.hidden, "hidden"},
                              {c.intermediate, "intermediate"}}) {
    if (Status s = positive(value, field); !s.ok()) return s;
    if (value > kLargest) return bad(concat("[config] ", field, " is ", value, ", at most ", kLargest), "", field);
  }
  if (Status s = values::check("config", "dtype", c.dtype); !s.ok()) return s;
  if (c.dtype != DType::f32 && c.dtype != DType::bf16 && c.dtype != DType::f16)
    return Status(StatusCode::invalid_dtype, concat("[config] dtype must be f32, bf16 or f16, got ", name(c.dtype)), "",
                  "dtype");
  if (Status s = validate(c.activation); !s.ok()) return s;
  if (Status s = validate(c.router, c.num_experts, c.top_k); !s.ok()) return s;
  if (Status s = validate(c.quant); !s.ok()) return s;
  if (Status s = validate_types(c); !s.ok()) return s;
  if (c.shared.intermediate > kLargest)
    return bad(concat("[config] shared.intermediate is ", c.shared.intermediate, ", at most ", kLargest), "",
               "shared.intermediate");
  if (c.shared.intermediate < 0)
    return bad(concat("[config] shared.intermediate must not be negative, got ", c.shared.intermediate), "",
               "shared.intermediate");
  if (c.shared.intermediate == 0) return {};
  const Status s = validate(c.shared.activation);
  return s.ok() ? s : Status(s.code(), concat("[shared] ", s.message()), s.hint(), concat("shared.", s.field()));
}

std::string shape_string(const LayerConfig& c) {
  return concat("e", c.num_experts, "k", c.top_k, "h", c.hidden, "i", c.intermediate, ":", weights_scheme(c.quant));
}

}  // namespace moekit::inline v0
