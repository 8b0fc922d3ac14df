// What must hold: once, when a kernel is built, and per call, before anything is written.
#include <algorithm>

#include "enum_values.hpp"
#include "kit/kernel_call.hpp"
#include "kit/kernel_workspace.hpp"
#include "tensor_checks.hpp"
#include "text.hpp"

namespace moekit::inline v0 {
using text::concat;

namespace {

// ---- build ---------------------------------------------------------------------------------------------------------

[[noreturn]] void refuse(std::string message, std::string hint = {}, StatusCode code = StatusCode::invalid_argument) {
  throw Error(code, "[modular_kernel] " + std::move(message), std::move(hint));
}

void accept(const Verdict& verdict, std::string_view who) {
  if (!verdict) refuse(concat(who, ": ", verdict.reason()), {}, StatusCode::unsupported);
}

/// Every enumeration of the problem; the stages' own answers are asked for their formats.
void check_values(const Problem& problem) {
  const auto check = [](const char* field, auto value) {
    throw_if_failed(values::check("modular_kernel", field, value));
  };
  check("problem.device.type", problem.device.type);
  check("problem.format", problem.format);
  check("problem.hidden_dtype", problem.hidden_dtype);
  check("problem.out_dtype", problem.out_dtype.value_or(DType::f32));
  check("problem.determinism", problem.determinism);
  check("problem.weights.w1.type", problem.weights.w1.type);
  check("problem.weights.w2.type", problem.weights.w2.type);
  throw_if_failed(values::check_all(problem.quant));
  throw_if_failed(values::check_all(problem.activation));
}

void check_formats(const PrepareFinalize& dispatcher, const Experts& experts, const Problem& problem) {
  const ActivationFormat delivered = dispatcher.activation_format(), taken = experts.activation_formats().in;
  if (delivered != taken)
    refuse(concat(dispatcher.name(), " delivers ", name(delivered), " rows, ", experts.name(), " takes ", name(taken)),
           "choose a dispatcher and experts of one format");
  if (problem.format != taken)
    refuse(concat("the problem speaks of ", name(problem.format), " rows, ", experts.name(), " takes ", name(taken)));
  if (taken == ActivationFormat::standard) return;
  const std::int64_t max_tokens = dispatcher.max_tokens_per_rank().value_or(0);
  if (!problem.batched) refuse("the problem has batched rows, but no BatchedShape");
  if (problem.batched->max_tokens_per_rank != max_tokens ||
      problem.batched->num_dispatchers != dispatcher.num_dispatchers())
    refuse(concat(dispatcher.name(), " was built with T = ", max_tokens, ", D = ", dispatcher.num_dispatchers(),
                  ", the problem says T = ", problem.batched->max_tokens_per_rank,
                  ", D = ", problem.batched->num_dispatchers));
}

/// The shape that experts leave against the one that their reduce takes.
void check_reduce(const Experts& experts, const Problem& problem) {
  const ProblemSize& size = problem.size;
  const TensorSpec output = experts.workspace(problem).output;
  const WeightAndReduce reduce = experts.weight_and_reduce();
  const auto is = [&](std::initializer_list<std::int64_t> shape) {
    if (output.rank != static_cast<int>(shape.size())) return false;
    return std::equal(shape.begin(), shape.end(), output.shape.begin());
  };
  const auto must_be = [&](const std::string& wanted) {
    refuse(concat(experts.name(), " leaves ", shape_string(output.on(nullptr, problem.device)), " for M = ", size.M,
                  ", k = ", size.k, ", but its reduce ", to_string(reduce), " takes ", wanted));
  };
  switch (reduce.kind) {
    case WeightAndReduce::Kind::no_op:
      if (!is({size.M, size.K})) must_be("[M, K]");
      break;
    case WeightAndReduce::Kind::contiguous:
      if (!is({size.M * size.k, size.K}) && !is({size.M, size.k, size.K})) must_be("[M*k, K]");
      break;
    case WeightAndReduce::Kind::naive_batched:
      if (!is({size.L, size.M, size.K})) must_be("[L, T*D, K]");
      break;
    case WeightAndReduce::Kind::delegate: break;  // the dispatcher's word
  }
}

// ---- call ----------------------------------------------------------------------------------------------------------

Status bad(std::string message, std::string hint, const char* field, StatusCode code = StatusCode::invalid_argument) {
  return Status(code, "[modular_kernel] " + std::move(message), std::move(hint), field);
}

Status check_rows(const Tensor& tensor, const char* what, std::int64_t M, const Problem& problem) {
  const std::int64_t K = problem.weights.hidden;
  if (Status s = tensors::check(tensor, problem.device, "modular_kernel", what); !s.ok()) return s;
  if (tensor.rank != 2 || tensor.shape[0] != M || tensor.shape[1] != K)
    return bad(concat(what, " must be [", M, ", ", K, "], got ", shape_string(tensor)), {}, what,
               StatusCode::invalid_shape);
  if (tensor.stride[1] != 1 && K > 1)
    return bad(concat("the columns of ", what, " must lie side by side, got stride ", tensor.stride[1]),
               "pass a row-major view", what, StatusCode::invalid_shape);
  if (tensor.data == nullptr && tensor.numel() > 0) return bad(concat(what, " is a null pointer"), {}, what);
  if (tensor.dtype != DType::f32 && tensor.dtype != DType::bf16 && tensor.dtype != DType::f16)
    return bad(concat(what, " must be f32, bf16 or f16, got ", name(tensor.dtype)), {}, what,
               StatusCode::invalid_dtype);
  return {};
}

Status check_hidden(const Tensor& hidden, const Problem& problem) {
  if (Status s = tensors::check(hidden, problem.device, "modular_kernel", "hidden"); !s.ok()) return s;
  if (hidden.rank != 2)
    return bad(concat("hidden must be [M, K], got ", shape_string(hidden)), {}, "hidden", StatusCode::invalid_shape);
  if (Status s = check_rows(hidden, "hidden", hidden.shape[0], problem); !s.ok()) return s;
  if (hidden.dtype != problem.hidden_dtype)
    return bad(concat("hidden is ", name(hidden.dtype), ", the kernel was built for ", name(problem.hidden_dtype)), {},
               "hidden", StatusCode::invalid_dtype);
  return {};
}

Status check_weights(const KernelInput& in, const Problem& problem, const Experts& experts) {
  if (!(in.weights.spec == problem.weights))
    return bad(concat("the weights are ", in.weights.spec.num_local, " experts of K = ", in.weights.spec.hidden,
                      ", I = ", in.weights.spec.intermediate, ", ", name(in.weights.spec.w1.type),
                      "; the kernel was built for ", problem.weights.num_local, " of K = ", problem.weights.hidden,
                      ", I = ", problem.weights.intermediate, ", ", name(problem.weights.w1.type)),
               "pack them for this problem", "weights.spec");
  if (!(in.activation == problem.activation))
    return bad(concat("the activation is ", to_string(in.activation), ", the kernel was built for ",
                      to_string(problem.activation)),
               {}, "activation");
  if (in.weights.spec.num_local == 0) return {};
  if (!in.weights.format || !in.weights.data)
    return bad("the weights have no pack format or no data",
               "use Weights::view(), or pack with experts.preferred_format()", "weights");
  if (!experts.accepts(*in.weights.format))
    return bad(concat(experts.name(), " does not read the pack format ", in.weights.format->id()), {},
               "weights.format");
  return {};
}

Status check_experts(const KernelInput& in, std::int64_t num_experts, const Problem& problem) {
  if (num_experts != problem.num_experts)
    return bad(concat("num_experts is ", num_experts, ", the kernel was built for ", problem.num_experts),
               "-1 means as many as there are local ones", "num_experts");
  if (in.weight_on_input && in.routing.top_k() != 1)
    return bad(concat("weight_on_input needs k = 1, got k = ", in.routing.top_k()),
               "with more slots one row would need several weights", "weight_on_input");
  if (in.quant && !(in.quant->spec() == problem.quant))
    return bad("the quantisation of the call is not the one that the kernel was built for", {}, "quant");
  if (in.weight_on_input != problem.weight_on_input)
    return bad(
        concat("weight_on_input is ", in.weight_on_input, ", the kernel was built for ", problem.weight_on_input),
        "Problem::weight_on_input decides what the stages reserve", "weight_on_input");
  const Tensor* map = in.expert_map;
  if (map)
    if (Status s = tensors::check(*map, problem.device, "modular_kernel", "expert_map"); !s.ok()) return s;
  if (map && !problem.expert_map)
    return bad("an expert map was given, but the kernel was built without", "set Problem::expert_map", "expert_map");
  if (map && (map->dtype != DType::i32 || map->rank != 1 || map->shape[0] != num_experts || !map->is_contiguous() ||
              map->data == nullptr))
    return bad(
        concat("expert_map must be i32 [", num_experts, "], dense, got ", name(map->dtype), " ", shape_string(*map)),
        {}, "expert_map", StatusCode::invalid_shape);
  return {};
}

constexpr const char* kOwn = "give it memory of its own";

/// What is written, over the caller's routing: finalize reads it last.
Status check_over_routing(const Tensor& written, const char* what, const Routing& routing) {
  if (tensors::overlap(written, routing.ids)) return bad(concat(what, " overlaps routing.ids"), kOwn, what);
  if (tensors::overlap(written, routing.weights)) return bad(concat(what, " overlaps routing.weights"), kOwn, what);
  return {};
}

Status check_shared(const KernelInput& in, const KernelOutput& out, const Tensor& output, const Problem& problem) {
  if (Status s = check_rows(out.shared, "shared", in.hidden.shape[0], problem); !s.ok()) return s;
  if (tensors::overlap(out.shared, in.hidden)) return bad("shared overlaps hidden", kOwn, "shared");
  if (tensors::overlap(out.shared, output)) return bad("shared overlaps output", kOwn, "shared");
  return check_over_routing(out.shared, "shared", in.routing);
}

}  // namespace

ModularKernel::ModularKernel(std::shared_ptr<PrepareFinalize> prepare_finalize, std::shared_ptr<const Experts> experts,
                             std::shared_ptr<const SharedExperts> shared, const Problem& problem,
                             const KernelOptions& options)
    : prepare_finalize_(std::move(prepare_finalize)),
      experts_(std::move(experts)),
      shared_(std::move(shared)),
      problem_(problem),
      options_(options) {
  if (!prepare_finalize_ || !experts_) refuse("needs a dispatcher and experts, got a null pointer");
  check_build();
}

void ModularKernel::check_build() {
  if (options_.chunk < 0 || options_.open_max_tokens < 0)
    refuse(
        concat("chunk = ", options_.chunk, ", open_max_tokens = ", options_.open_max_tokens, ": neither may be < 0"));
  if (problem_.weight_on_input && problem_.size.k != 1)
    refuse(concat("weight_on_input needs k = 1, got k = ", problem_.size.k));
  check_values(problem_);
  check_formats(*prepare_finalize_, *experts_, problem_);
  const Problem problem = problem_for(prepare_finalize_->max_rows(problem_), 0);
  accept(experts_->supports(problem), experts_->name());
  input_ = experts_->input_spec(problem);
  accept(prepare_finalize_->supports(problem_), prepare_finalize_->name());
  accept(prepare_finalize_->supports(input_), concat(prepare_finalize_->name(), " for ", experts_->name()));
  check_reduce(*experts_, problem);
  if (options_.open_max_tokens == 0) return;
  if (!prepare_finalize_->supports_open_output())
    refuse(concat("open_max_tokens = ", options_.open_max_tokens, ", but the work of ", prepare_finalize_->name(),
                  "'s finalize cannot be left to a consumer"));
  if (!experts_->supports_open_output())
    refuse(concat("open_max_tokens = ", options_.open_max_tokens, ", but ", experts_->name(), " always finish"));
}

Status ModularKernel::check(Call& call) const {
  const KernelInput& in = call.in;
  KernelOutput& out = call.out;
  out.left_open = false;
  if (call.context.ubatch && call.context.ubatch->enabled() && !prepare_finalize_->supports_async())
    return bad(concat("overlap is on, but ", prepare_finalize_->name(), " is synchronous"),
               "choose an asynchronous dispatcher, or run without micro-batches", "context.ubatch",
               StatusCode::unsupported);
  if (Status s = check_hidden(in.hidden, problem_); !s.ok()) return s;
  call.num_tokens = in.hidden.shape[0];
  call.num_experts = in.num_experts == -1 ? problem_.weights.num_local : in.num_experts;
  if (call.context.stream.device != problem_.device)
    return bad(concat("the stream is of ", to_string(call.context.stream.device), ", the kernel was built for ",
                      to_string(problem_.device)),
               "pass a stream of that device", "context.stream");
  if (Status s = tensors::check(in.routing.ids, problem_.device, "modular_kernel", "routing.ids"); !s.ok()) return s;
  if (Status s = tensors::check(in.routing.weights, problem_.device, "modular_kernel", "routing.weights"); !s.ok())
    return s;
  if (Status s = validate(in.routing, call.num_tokens); !s.ok()) return s;
  if (Status s = check_weights(in, problem_, *experts_); !s.ok()) return s;
  if (Status s = check_experts(in, call.num_experts, problem_); !s.ok()) return s;
  if (in.leave_open && options_.open_max_tokens == 0)
    return bad("an open result was asked for, but the kernel was built without", "set KernelOptions::open_max_tokens",
               "leave_open");
  call.leave_open = in.leave_open && call.num_tokens > 0 && call.num_tokens <= options_.open_max_tokens;
  const bool in_place = in.in_place && !shared_;  // shared experts still read hidden
  call.output = in_place ? in.hidden : out.output;
  if (!call.leave_open || call.output.present()) {  // an open result needs none, unless nothing arrives
    if (Status s = check_rows(call.output, "output", call.num_tokens, problem_); !s.ok()) return s;
    if (!in_place && tensors::overlap(call.output, in.hidden))
      return bad("output overlaps hidden",
                 shared_ ? "shared experts read hidden: give output memory of its own" : "ask for in_place", "output");
    if (Status s = check_over_routing(call.output, "output", in.routing); !s.ok()) return s;
  }
  if (shared_)
    if (Status s = check_shared(in, out, call.output, problem_); !s.ok()) return s;
  return take_workspace(call);
}

}  // namespace moekit::inline v0
