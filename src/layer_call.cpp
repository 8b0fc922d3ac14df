#include <algorithm>
#include <cmath>

#include "dispatch/finalize.hpp"
#include "layer_impl.hpp"
#include "tail/tail.hpp"
#include "tensor_checks.hpp"
#include "text.hpp"

namespace moekit::inline v0 {
using text::concat;

namespace {

Status bad(std::string message, std::string hint, std::string field) {
  return Status(StatusCode::invalid_argument, std::move(message), std::move(hint), std::move(field));
}

}  // namespace

LayerCall::LayerCall(const Layer::Impl& layer, const LayerInput& in, LayerOutput& out, const CallContext& context)
    : layer_(layer), plan_(layer.plan.impl()), weights_(layer.weights.impl()), in_(in), out_(out), context_(context) {
  if (!context_.stream.executor) context_.stream.executor = plan_.executor;
}

Status LayerCall::check() {
  if (context_.stream.device != plan_.device)
    return bad(concat("[layer] the stream is of ", to_string(context_.stream.device), ", the plan of ",
                      to_string(plan_.device)),
               "pass a stream of the plan's device", "context.stream");
  if (Status s = check_tensor(in_.hidden, "hidden", plan_.config.hidden, false); !s.ok()) return s;
  num_tokens_ = in_.hidden.rows();
  if (num_tokens_ > plan_.options.max_tokens)
    return bad(concat("[layer] ", num_tokens_, " tokens, but the plan takes at most ", plan_.options.max_tokens),
               concat("create the plan with max_tokens ≥ ", num_tokens_), "hidden");
  if (in_.group_tokens && *in_.group_tokens != 0 && *in_.group_tokens != num_tokens_)
    return bad(concat("[layer] group_tokens is ", *in_.group_tokens, ", but the group is this rank alone, with ",
                      num_tokens_, " tokens"),
               "leave it absent, or pass the tokens of this rank", "group_tokens");
  num_valid_ = in_.num_valid ? std::clamp<std::int64_t>(*in_.num_valid, 0, num_tokens_) : num_tokens_;
  bucket_ = &plan_.buckets[plan_.bucket_index(num_tokens_)];
  kernel_ = layer_.kernels[plan_.bucket_index(num_tokens_)].get();
  if (Status s = check_routing(); !s.ok()) return s;
  if (Status s = check_output(); !s.ok()) return s;
  return check_overlaps();
}

Status LayerCall::check_tensor(const Tensor& tensor, const char* what, std::int64_t columns, bool any_float) const {
  if (!tensor.present()) return bad(concat("[layer] ", what, " is missing"), "", what);
  if (Status s = tensors::check(tensor, plan_.device, "layer", what); !s.ok()) return s;
  if (tensor.rank != 2 || tensor.shape[1] != columns)
    return Status(StatusCode::invalid_shape,
                  concat("[layer] ", what, " must be [M, ", columns, "], got ", shape_string(tensor)), "", what);
  if (tensor.data == nullptr && tensor.rows() > 0) return bad(concat("[layer] ", what, " is null"), "", what);
  const bool right_type =
      any_float ? tensor.dtype != DType::f64 && is_float(tensor.dtype) : tensor.dtype == plan_.config.dtype;
  if (!right_type)
    return Status(StatusCode::invalid_dtype,
                  concat("[layer] ", what, " must be ", any_float ? "f32, bf16 or f16" : name(plan_.config.dtype),
                         ", got ", name(tensor.dtype)),
                  "", what);
  if (columns > 1 && tensor.stride[1] != 1)
    return Status(StatusCode::invalid_shape,
                  concat("[layer] the last stride of ", what, " must be 1, got ", tensor.stride[1]),
                  "pass a row-major tensor; rows may be padded", what);
  return {};
}

Status LayerCall::check_routing() {
  const LayerConfig& config = plan_.config;
  if (in_.top_k < 0 || in_.top_k > config.num_experts)
    return bad(concat("[layer] top_k ", in_.top_k, " of ", config.num_experts, " experts"), "0 = the layer's", "top_k");
  top_k_ = in_.top_k > 0 ? in_.top_k : config.top_k;
  if (in_.routing.ids.present()) {
    if (Status s = tensors::check(in_.routing.ids, plan_.device, "layer", "routing.ids"); !s.ok()) return s;
    if (Status s = tensors::check(in_.routing.weights, plan_.device, "layer", "routing.weights"); !s.ok()) return s;
    if (Status s = validate(in_.routing, num_tokens_); !s.ok()) return s;
    top_k_ = in_.routing.top_k();
    if (top_k_ < 1) return bad("[layer] routing has no slots", "k must be at least 1", "routing.ids");
    if (config.router.weight_on_input && top_k_ != 1)
      return bad(concat("[layer] weight on input needs k = 1, routing has ", top_k_), "", "routing.ids");
    return plan_.options.checked ? check_ids(in_.routing.ids.slice_rows(0, num_valid_), config.num_experts) : Status();
  }
  if (config.router.weight_on_input && top_k_ != 1)
    return bad(concat("[layer] weight on input needs k = 1, top_k is ", top_k_), "", "top_k");
  if (config.router.source == RouterSource::simulated) return {};
  if (config.router.source == RouterSource::external)
    return bad("[layer] the router is external, but the call brings no routing", "set LayerInput::routing", "routing");
  if (top_k_ > 64 && config.router.source != RouterSource::custom)
    return Status(StatusCode::unsupported, concat("[layer] top_k ", top_k_, ", at most 64 are routed here"),
                  "pass routing", "top_k");
  if (in_.logits.present()) {
    if (Status s = check_tensor(in_.logits, "logits", config.num_experts, true); !s.ok()) return s;
    if (in_.logits.rows() == num_tokens_) return {};
    return Status(StatusCode::invalid_shape,
                  concat("[layer] logits have ", in_.logits.rows(), " rows, hidden has ", num_tokens_), "", "logits");
  }
  if (!weights_.router.weight.present() && config.router.source != RouterSource::custom)
    return bad("[layer] neither logits nor routing were given, and the layer has no router weights",
               "give WeightsSource::router.weight, or pass logits or routing", "logits");
  return {};
}

Status LayerCall::check_tail() {
  const std::int64_t columns = plan_.config.hidden;
  if (Status s = check_tensor(out_.tail->residual, "tail.residual", columns, false); !s.ok()) return s;
  if (Status s = check_tensor(out_.tail->norm_out, "tail.norm_out", columns, false); !s.ok()) return s;
  if (Status s = check_tensor(out_.tail->residual_out, "tail.residual_out", columns, false); !s.ok()) return s;
  return tail::check(*out_.tail, num_tokens_, columns);
}

Status LayerCall::check_output() {
  const std::int64_t columns = plan_.config.hidden;
  if (plan_.options.output == OutputKind::tail) {
    if (!out_.tail)
      return bad("[layer] the plan ends in a tail, but the call brings none", "set LayerOutput::tail", "tail");
    if (Status s = check_tail(); !s.ok()) return s;
    open_ = bucket_->may_open && num_tokens_ > 0 && num_tokens_ <= plan_.options.tail_max_tokens;
    return {};
  }
  if (plan_.options.output == OutputKind::open && !out_.open)
    return bad("[layer] the plan leaves the output open, but the call brings no MoeOutput", "set LayerOutput::open",
               "open");
  open_ = bucket_->may_open && num_tokens_ > 0 && num_valid_ == num_tokens_ &&
          num_tokens_ <= plan_.options.tail_max_tokens && plan_.options.output == OutputKind::open;
  if (open_) return {};
  if (Status s = check_tensor(out_.tensor, "output", columns, false); !s.ok()) return s;
  if (out_.tensor.rows() != num_tokens_)
    return Status(StatusCode::invalid_shape,
                  concat("[layer] output has ", out_.tensor.rows(), " rows, hidden has ", num_tokens_), "", "output");
  if (num_tokens_ > 1 && std::abs(out_.tensor.stride[0]) < columns)
    return Status(
        StatusCode::invalid_shape,
        concat("[layer] rows of output overlap: row stride ", out_.tensor.stride[0], ", ", columns, " columns"), "",
        "output");
  const bool same =
      out_.tensor.data == in_.hidden.data && (num_tokens_ == 1 || out_.tensor.stride[0] == in_.hidden.stride[0]);
  if (out_.in_place && num_tokens_ > 0 && !same)
    return bad("[layer] in_place was asked for, but output is not hidden's memory with hidden's row stride",
               "pass hidden as the output, or leave in_place off", "output");
  if (same && num_tokens_ > 0 && !out_.in_place)
    return bad("[layer] output is hidden's memory, but in_place was not asked for",
               "set LayerOutput::in_place, or pass another tensor", "output");
  return {};
}

Status LayerCall::leave_empty() {
  if (out_.open) *out_.open = MoeOutput{out_.tensor, {}, 1.0f};
  return {};
}

Status LayerCall::cut() {
  WorkspaceCursor cursor(context_.workspace);
  scratch_ = cut_workspace(plan_, *bucket_, num_tokens_, top_k_, cursor);
  scratch_.kernel = cursor.take(kernel_->workspace_bytes(num_valid_, top_k_));
  const bool aligned = reinterpret_cast<std::uintptr_t>(context_.workspace.data) % kWorkspaceAlignment == 0;
  if (!aligned)
    return bad(concat("[layer] the workspace must be ", kWorkspaceAlignment, "-byte aligned"), "", "context.workspace");
  if (!cursor.fits() || (context_.workspace.data == nullptr && cursor.used() > 0))
    return Status(StatusCode::workspace_too_small,
                  concat("[layer] ", cursor.used(), " bytes of workspace are needed for ", num_tokens_, " tokens, got ",
                         context_.workspace.size),
                  "ask Plan::workspace_bytes", "context.workspace");
  return check_workspace(cursor.used());
}

Status LayerCall::route() {
  if (num_valid_ == 0) return {};
  if (in_.routing.ids.present()) {
    routing_ = in_.routing.slice_rows(0, num_valid_);
    return {};
  }
  routing_ = {valid(scratch_.ids), valid(scratch_.weights), IdSpace::physical};
  const RouterConfig& config = plan_.config.router;
  if (config.source == RouterSource::simulated)
    return simulate_routing(config, plan_.config.num_experts, 0, routing_.ids, routing_.weights);
  RouteArgs args;
  args.hidden = valid(in_.hidden);  // routers of the caller's may look at it
  if (in_.logits.present()) {
    args.logits = valid(in_.logits);
  } else if (weights_.router.weight.present()) {  // a custom router may do without logits
    args.logits = valid(scratch_.logits);
    if (Status s = router_gemm(args.hidden, weights_.router.weight, args.logits, context_); !s.ok()) return s;
  }
  args.config = &config;
  args.tensors = &weights_.router;
  args.ids = routing_.ids;
  args.weights = routing_.weights;
  args.checked = plan_.options.checked;
  args.context = context_;
  args.context.workspace = scratch_.router;
  if (Status s = bucket_->router->route(args); !s.ok()) return s;
  const bool doubted = plan_.options.checked && config.source == RouterSource::custom;
  return doubted ? check_ids(args.ids, plan_.config.num_experts) : Status();
}

Status LayerCall::run_kernel() {
  const bool added_here = scratch_.routed.present();
  KernelInput in;
  in.hidden = valid(in_.hidden);
  in.routing = routing_;
  in.weights = layer_.weights.view();
  in.quant = &weights_.quant;
  in.activation = bucket_->problem.activation;
  in.num_experts = plan_.config.num_experts;
  in.weight_on_input = plan_.config.router.weight_on_input;
  in.in_place = out_.in_place && !added_here;
  in.leave_open = open_;
  result_.output = added_here ? valid(scratch_.routed) : open_ ? Tensor() : valid(out_.tensor);
  if (bucket_->shared) result_.shared = valid(scratch_.shared);
  if (num_valid_ == 0) return {};
  CallContext inner = context_;
  inner.workspace = scratch_.kernel;
  return kernel_->forward(in, result_, inner);
}

Status LayerCall::finish() {
  if (plan_.options.output == OutputKind::tail) return finish_tail();
  if (open_) {
    *out_.open = result_.open;
    return {};
  }
  if (bucket_->shared && num_valid_ > 0)  // routed + shared in f32, one rounding
    if (Status s = close_output({result_.output, result_.shared, 1.0f}, valid(out_.tensor), context_); !s.ok())
      return s;
  dispatch::fill_zero(out_.tensor.slice_rows(num_valid_, num_tokens_));
  if (out_.open) *out_.open = MoeOutput{out_.tensor, {}, 1.0f};
  return {};
}

/// Open or finalised, routed and shared are folded into the residual and normalised; rows beyond num_valid become 0.
Status LayerCall::finish_tail() const {
  Tail valid_rows = *out_.tail;
  for (Tensor Tail::*rows : {&Tail::residual, &Tail::norm_out, &Tail::residual_out})
    valid_rows.*rows = valid(valid_rows.*rows);
  const MoeOutput routed = result_.left_open ? result_.open : MoeOutput{result_.output, result_.shared, 1.0f};
  if (num_valid_ > 0)
    if (Status s = tail::add_and_norm(routed, valid_rows, context_); !s.ok()) return s;
  dispatch::fill_zero(out_.tail->norm_out.slice_rows(num_valid_, num_tokens_));
  dispatch::fill_zero(out_.tail->residual_out.slice_rows(num_valid_, num_tokens_));
  return {};
}

}  // namespace moekit::inline v0
