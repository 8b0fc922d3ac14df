#include "route/cpu.hpp"

#include <algorithm>

#include "cpu/isa.hpp"
#include "kit/for_rows.hpp"
#include "quant/numeric.hpp"
#include "route/reference.hpp"

namespace moekit::route {

static_assert(kRowLimit == kMaxExperts && kTopKLimit == kMaxTopK);

const CpuUnit& cpu_unit() {
#if defined(__x86_64__)
  static const CpuUnit& unit = cpu::usable_isa() >= cpu::Isa::avx2 ? kAvx2Unit : kPortableUnit;
  return unit;
#else
  return kPortableUnit;
#endif
}

namespace {

FloatType float_type(DType type) {
  return type == DType::f32 ? FloatType::f32 : type == DType::bf16 ? FloatType::bf16 : FloatType::f16;
}

ScoreKind score_kind(const RouterConfig& config) {
  if (config.softmax_over == SoftmaxOver::selected) return ScoreKind::softmax_selected;
  switch (config.score) {
    case Score::softmax: return ScoreKind::softmax;
    case Score::sigmoid: return ScoreKind::sigmoid;
    case Score::sqrt_softplus: return ScoreKind::sqrt_softplus;
    case Score::identity: break;
  }
  return ScoreKind::identity;
}

/// What one call shares among its rows; on the caller's stack.
struct Call {
  Call(const RouteArgs& route_args, const RouteSize& route_size)
      : args(route_args), size(route_size) {}  // leaves the biases alone: 16 KiB
  const RouteArgs& args;
  const RouteSize& size;
  RowsTask task;
  alignas(32) float logit_bias[kMaxExperts];
  alignas(32) float selection_bias[kMaxExperts];
};

/// A bias as f32, padded with zeros, so that whole vectors of it can be read.
const float* widen_bias(const Tensor& bias, std::int64_t num_experts, float* to) {
  for (std::int64_t e = 0; e < num_experts; ++e) to[e] = numeric::load_f32(bias.data, bias.dtype, e);
  const std::int64_t end = (num_experts + kBlockColumns - 1) / kBlockColumns * kBlockColumns;
  for (std::int64_t e = num_experts; e < end; ++e) to[e] = 0;
  return to;
}

void fill_task(Call& call) {
  const RouteArgs& args = call.args;
  const RouterConfig& config = *args.config;
  RowsTask& t = call.task;
  t.logits = args.logits.data, t.type = float_type(args.logits.dtype), t.logits_stride = args.logits.stride[0];
  t.ids = args.ids.as<std::int32_t>(), t.ids_stride = args.ids.stride[0];
  t.weights = args.weights.as<float>(), t.weights_stride = args.weights.stride[0];
  t.num_experts = call.size.num_experts, t.top_k = call.size.top_k;
  t.score = score_kind(config);
  if (config.logit_bias) t.logit_bias = widen_bias(args.tensors->logit_bias, t.num_experts, call.logit_bias);
  if (config.selection_bias)
    t.selection_bias = widen_bias(args.tensors->selection_bias, t.num_experts, call.selection_bias);
  t.num_groups = config.num_groups, t.keep_groups = config.keep_groups;
  t.group_top2 = config.group_score == GroupScore::top2_sum, t.fill_zero = config.group_fill == GroupFill::zero;
  t.renormalise = config.renormalise;
  t.renorm_p = static_cast<double>(config.renorm_p), t.renorm_eps = static_cast<double>(config.renorm_eps);
  t.eps_is_floor = config.renorm_eps_mode == RenormEps::max;
  t.scale = static_cast<double>(config.scale);
  t.odd_row = [](const void* context, std::int64_t row) {
    const Call& self = *static_cast<const Call*>(context);
    reference_row(self.args, self.size, row);
  };
  t.context = &call;
}

/// Nanoseconds a row takes, roughly: half a cycle an element, 50 cycles a choice; with scores 3 cycles an element more.
double row_ns(const RouterConfig& config, std::int64_t num_experts, std::int64_t top_k) {
  const bool scores = config.selection_bias || (config.score == Score::softmax && !config.renormalise);
  return 30 + static_cast<double>(num_experts) * (scores ? 1.0 : 0.2) + 15 * static_cast<double>(top_k);
}

class Cpu final : public Router {
 public:
  explicit Cpu(const CpuUnit& unit) : unit_(unit) {}
  std::string_view name() const override { return "cpu"; }
  Verdict supports(const RouteProblem& problem) const override { return route::supports(problem); }
  double estimate_us(const RouteProblem& problem, const Ceilings& ceilings) const override {
    const double work =
        1e-3 * row_ns(problem.config, problem.num_experts, problem.top_k) * static_cast<double>(problem.num_tokens);
    return 0.2 + work / std::max(1, ceilings.threads);
  }
  Status route(const RouteArgs& args) const override;

 private:
  const CpuUnit& unit_;
};

Status Cpu::route(const RouteArgs& args) const {
  RouteSize size;
  if (Status s = check(args, size); !s.ok()) return s;
  Call call(args, size);
  fill_task(call);
  // Waking threads costs several microseconds: not for less than 20 of work.
  const double work_ns = row_ns(*args.config, size.num_experts, size.top_k) * static_cast<double>(size.num_valid);
  kit::cut_rows(args.context.stream, size.num_valid, work_ns > 20e3,
                [&](std::int64_t begin, std::int64_t end) { unit_.route_rows(call.task, begin, end); });
  clear_rows(args, size.num_valid, size.num_rows);
  return {};
}

}  // namespace

std::unique_ptr<Router> make_cpu() { return make_cpu(cpu_unit()); }
std::unique_ptr<Router> make_cpu(const CpuUnit& unit) { return std::make_unique<Cpu>(unit); }

}  // namespace moekit::route
