// Which implementation runs each stage, for each token bucket: ask every entry of every list, keep every answer.
#include <fnmatch.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu/ceilings.hpp"
#include "plan_impl.hpp"
#include "text.hpp"

namespace moekit::inline v0 {
using text::concat;

namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

bool forced_match(const std::string& pattern, std::string_view name) {
  return pattern.empty() || ::fnmatch(pattern.c_str(), std::string(name).c_str(), 0) == 0;
}

/// Token counts at which the choice may change.
std::vector<std::int64_t> bucket_limits(std::int64_t max_tokens) {
  std::vector<std::int64_t> limits;
  for (std::int64_t limit = 1; limit < max_tokens; limit *= 4) limits.push_back(limit);
  limits.push_back(max_tokens);
  return limits;
}

Problem routed_problem(const Plan::Impl& plan, std::int64_t tokens) {
  const LayerConfig& config = plan.config;
  Problem problem;
  problem.device = plan.device;
  problem.size = {config.num_experts, tokens, config.w1_rows(), config.hidden, config.top_k};
  problem.num_experts = config.num_experts;
  problem.weights = plan.spec;
  problem.quant = config.quant;
  problem.activation = config.activation;
  problem.activation.layout = GateLayout::halves;  // packs put gate and up where kernels want them
  problem.hidden_dtype = config.dtype;
  problem.out_dtype = plan.options.expert_out_dtype;
  problem.determinism = plan.options.determinism;
  problem.weight_on_input = config.router.weight_on_input;
  problem.threads = plan.executor->concurrency();
  return problem;
}

/// Shared experts as a layer of one expert that every token passes.
Problem shared_problem(const Plan::Impl& plan, std::int64_t tokens) {
  const LayerConfig& config = plan.config;
  Problem problem = routed_problem(plan, tokens);
  problem.size = {1, tokens, plan.shared_spec.w1_rows(), config.hidden, 1};
  problem.num_experts = 1;
  problem.weights = plan.shared_spec;
  problem.quant.w1 = plan.shared_spec.w1;
  problem.quant.w2 = plan.shared_spec.w2;
  if (!config.shared.quantised) problem.quant.a1 = problem.quant.a2 = {config.dtype, {}};
  problem.activation = config.shared.activation;
  problem.activation.layout = GateLayout::halves;
  problem.weight_on_input = false;
  problem.out_dtype = DType::f32;  // added to the routed sum in f32
  return problem;
}

double floor_us(const Problem& p, const Ceilings& ceilings) {
  const double experts = static_cast<double>(p.size.L), k = static_cast<double>(std::min(p.size.k, p.size.L));
  const double rows = static_cast<double>(p.size.M);
  const double hit = experts * (1 - std::pow(1 - k / experts, rows));  // expected, uniform routing
  const double weights = static_cast<double>(p.size.N * p.size.K + p.size.K * p.weights.intermediate);
  const double bytes =
      hit * weights * bits(p.weights.w1.type) / 8 + 2 * rows * static_cast<double>(p.size.K) * bits(p.hidden_dtype) / 8;
  const double operations = 2 * rows * static_cast<double>(p.size.k) * weights;
  const bool int8 = p.quant.a1.type == DType::i8;
  const double peak =
      int8 ? ceilings.int8_gops
           : std::max(ceilings.f32_gflops, p.weights.w1.type == DType::bf16 ? ceilings.bf16_dot_gflops : 0.0);
  const double read_us = ceilings.read_gbps > 0 ? bytes / ceilings.read_gbps * 1e-3 : 0;
  const double compute_us = peak > 0 ? operations / peak * 1e-3 : 0;
  return std::max(read_us, compute_us);
}

/// One experts entry asked about one problem.
struct Answer {
  std::string_view name;
  std::shared_ptr<const Experts> experts;  // null if it cannot be made
  std::string refusal;                     // empty = yes
  double estimate = kNever;
};

struct Dispatcher {
  std::string_view name;
  std::shared_ptr<PrepareFinalize> object;
};

class Chooser {
 public:
  explicit Chooser(Plan::Impl& plan) : plan_(plan) {}

  void run() {
    list_entries();
    pick_format(plan_.spec, &routed_problem, plan_.options.experts, plan_.format);
    if (plan_.config.shared.intermediate > 0) {
      const std::string forced = shared_force();
      pick_format(plan_.shared_spec, &shared_problem, forced, plan_.shared_format);
    }
    for (std::int64_t limit : bucket_limits(plan_.options.max_tokens)) add_bucket(limit);
  }

 private:
  void list_entries() {
    for (const ExpertsEntry& entry : plan_.options.extra_experts) experts_.push_back(entry);
    for (const ExpertsEntry& entry : experts_implementations()) experts_.push_back(entry);
    for (const PrepareFinalizeEntry& entry : plan_.options.extra_prepare_finalize) dispatchers_.push_back(entry);
    for (const PrepareFinalizeEntry& entry : prepare_finalize_implementations()) dispatchers_.push_back(entry);
    for (const RouterEntry& entry : plan_.options.extra_routers) routers_.push_back(entry);
    if (plan_.config.router.source != RouterSource::custom)
      for (const RouterEntry& entry : router_implementations()) routers_.push_back(entry);
  }

  /// A forced name that only speaks batched experts cannot run the shared ones: they keep the plan's own choice.
  std::string shared_force() const {
    for (const Dispatcher& dispatcher : dispatchers_for(1))
      if (dispatcher.object->activation_format() == ActivationFormat::standard)
        for (const Answer& answer : ask(shared_problem(plan_, 1), dispatcher, plan_.options.experts, nullptr))
          if (answer.refusal.empty()) return plan_.options.experts;
    return {};
  }

  std::vector<Dispatcher> dispatchers_for(std::int64_t tokens) const {
    std::vector<Dispatcher> out;
    for (const PrepareFinalizeEntry& entry : dispatchers_)
      if (forced_match(plan_.options.prepare_finalize, entry.name))
        out.push_back({entry.name, entry.make(make_context(entry.format, tokens))});
    if (out.empty()) {
      std::string names;
      for (const PrepareFinalizeEntry& entry : dispatchers_) names += " " + std::string(entry.name);
      throw Error(StatusCode::invalid_argument,
                  concat("[plan] no dispatcher is called '", plan_.options.prepare_finalize, "'"),
                  concat("there are:", names), "options.prepare_finalize");
    }
    return out;
  }

  /// Rows of an expert: a routing of the caller's may name one expert in every slot of a token.
  BatchedShape batched_shape(std::int64_t tokens) const { return {tokens * plan_.config.top_k, 1}; }

  MakeContext make_context(ActivationFormat format, std::int64_t tokens) const {
    MakeContext context;
    context.device = plan_.device;
    if (format == ActivationFormat::batched_experts) context.batched = batched_shape(tokens);
    return context;
  }

  /// Every experts entry on `problem` behind `dispatcher`; `format` null = any pack format.
  std::vector<Answer> ask(Problem problem, const Dispatcher& dispatcher, const std::string& forced,
                          const PackFormat* format) const {
    problem.format = dispatcher.object->activation_format();
    const MakeContext context = make_context(problem.format, problem.size.M);
    if (context.batched) {
      problem.batched = context.batched;
      problem.size.M = context.batched->max_tokens_per_rank * context.batched->num_dispatchers;
    }
    std::vector<Answer> out;
    for (const ExpertsEntry& entry : experts_) {
      if (!forced_match(forced, entry.name)) continue;
      Answer answer{entry.name, nullptr, {}, kNever};
      if (Verdict verdict = entry.available ? entry.available() : Verdict::yes(); !verdict)
        answer.refusal = verdict.reason();
      else if ((answer.experts = entry.make(context)) == nullptr)
        answer.refusal =
            concat("speaks another activation format than ", dispatcher.name, " (", name(problem.format), ")");
      else
        answer.refusal = refusal(*answer.experts, problem, dispatcher, format);
      if (answer.refusal.empty()) answer.estimate = answer.experts->estimate_us(problem, plan_.ceilings);
      out.push_back(std::move(answer));
    }
    return out;
  }

  std::string refusal(const Experts& experts, const Problem& problem, const Dispatcher& dispatcher,
                      const PackFormat* format) const {
    if (experts.activation_formats().in != problem.format)
      return concat("reads ", name(experts.activation_formats().in), ", ", dispatcher.name, " delivers ",
                    name(problem.format));
    if (experts.determinism() < problem.determinism)
      return concat("is ", name(experts.determinism()), ", ", name(problem.determinism), " was asked for");
    if (Verdict verdict = experts.supports(problem); !verdict) return verdict.reason();
    if (Verdict verdict = dispatcher.object->supports(experts.input_spec(problem)); !verdict)
      return concat(dispatcher.name, ": ", verdict.reason());
    if (Verdict verdict = dispatcher.object->supports(problem); !verdict)
      return concat(dispatcher.name, ": ", verdict.reason());
    if (format && !experts.accepts(*format)) return concat("cannot read the pack format ", format->id());
    return {};
  }

  /// The format with which the buckets together are fastest; earlier in the list on ties.
  void pick_format(const WeightsSpec& spec, Problem (*problem_for)(const Plan::Impl&, std::int64_t),
                   const std::string& forced, const PackFormat*& out) {
    std::vector<const PackFormat*> formats;
    for (const ExpertsEntry& entry : plan_.options.extra_experts)
      if (auto experts = entry.make(make_context(ActivationFormat::standard, 1)))
        formats.push_back(&experts->preferred_format(spec));
    for (const PackFormat* format : pack_formats()) formats.push_back(format);
    double best = kNever;
    for (const PackFormat* format : formats) {
      if (!format->supports(spec)) continue;
      double total = 0;
      for (std::int64_t limit : bucket_limits(plan_.options.max_tokens))
        total += best_estimate(problem_for(plan_, limit), forced, format) / static_cast<double>(limit);
      if (total < best) {
        best = total;
        out = format;
      }
    }
    if (!out) refuse(problem_for(plan_, 1), forced);
  }

  double best_estimate(const Problem& problem, const std::string& forced, const PackFormat* format) const {
    double best = kNever;
    for (const Dispatcher& dispatcher : dispatchers_for(problem.size.M)) {
      for (const Answer& answer : ask(problem, dispatcher, forced, format)) best = std::min(best, answer.estimate);
      if (best < kNever) break;  // the first dispatcher that works, as in the choice itself
    }
    return best;
  }

  [[noreturn]] void refuse(const Problem& problem, const std::string& forced) const {
    std::string reasons, names;
    bool any = false;
    for (const Dispatcher& dispatcher : dispatchers_for(problem.size.M))
      for (const Answer& answer : ask(problem, dispatcher, forced, nullptr)) {
        any = true;
        reasons += concat("\n  ", answer.name, " (", dispatcher.name,
                          "): ", answer.refusal.empty() ? "no pack format" : answer.refusal);
      }
    for (const ExpertsEntry& entry : experts_) names += " " + std::string(entry.name);
    if (!any)
      throw Error(StatusCode::invalid_argument, concat("[plan] no experts implementation is called '", forced, "'"),
                  concat("there are:", names), "options.experts");
    throw Error(StatusCode::unsupported, concat("[plan] nothing here can run ", to_string(problem), ":", reasons), "",
                "options.experts");
  }

  void add_bucket(std::int64_t limit) {
    Plan::Impl::Bucket bucket;
    BucketPlan described;
    bucket.max_tokens = described.max_tokens = limit;
    described.format = plan_.format->id();
    choose_router(bucket, described);
    bucket.problem = routed_problem(plan_, limit);
    choose_experts(bucket, described);
    if (plan_.config.shared.intermediate > 0) bucket.shared = choose_shared(limit, described);
    bucket.may_open = plan_.options.output != OutputKind::tensor && bucket.experts->supports_open_output() &&
                      bucket.prepare_finalize->supports_open_output();
    bucket.kernel_options.chunk = plan_.options.chunk;
    if (bucket.may_open) bucket.kernel_options.open_max_tokens = plan_.options.tail_max_tokens;
    bucket.kernel = std::make_shared<ModularKernel>(bucket.prepare_finalize, bucket.experts, bucket.shared,
                                                    bucket.problem, bucket.kernel_options);
    described.floor_us = floor_us(bucket.problem, plan_.ceilings);
    plan_.buckets.push_back(std::move(bucket));
    plan_.described.push_back(std::move(described));
  }

  void choose_router(Plan::Impl::Bucket& bucket, BucketPlan& described) const {
    const LayerConfig& config = plan_.config;
    if (config.router.source == RouterSource::external || config.router.source == RouterSource::simulated) {
      described.router = to_string(config.router);
      return;
    }
    const RouteProblem problem{plan_.device, bucket.max_tokens, config.num_experts, config.top_k, config.router};
    double best = kNever;
    std::string reasons;
    for (const RouterEntry& entry : routers_) {
      if (!forced_match(plan_.options.router, entry.name)) continue;
      Candidate candidate{"router", std::string(entry.name), false, {}, 0, {}};
      std::shared_ptr<const Router> router;
      if (Verdict verdict = entry.available ? entry.available() : Verdict::yes(); !verdict)
        candidate.reason = verdict.reason();
      else if (router = entry.make(); Verdict verdict2 = router->supports(problem))
        candidate.estimate_us = router->estimate_us(problem, plan_.ceilings);
      else
        candidate.reason = verdict2.reason();
      if (candidate.reason.empty() && candidate.estimate_us < best) {
        best = candidate.estimate_us;
        bucket.router = router;
        described.router = candidate.name;
      }
      reasons += concat("\n  ", candidate.name, ": ", candidate.reason);
      described.candidates.push_back(std::move(candidate));
    }
    if (!bucket.router)
      throw Error(plan_.options.router.empty() ? StatusCode::unsupported : StatusCode::invalid_argument,
                  concat("[plan] no router can do this (", to_string(config.router), ", forced name '",
                         plan_.options.router, "'):", reasons),
                  config.router.source == RouterSource::custom ? "pass yours in PlanOptions::extra_routers" : "",
                  "options.router");
    explain_losers(described.candidates, "router", described.router, best);
  }

  void choose_experts(Plan::Impl::Bucket& bucket, BucketPlan& described) const {
    double best = kNever;
    for (const Dispatcher& dispatcher : dispatchers_for(bucket.max_tokens)) {
      Candidate taken{"prepare_finalize", std::string(dispatcher.name), false, {}, 0, {}};
      if (bucket.experts) {
        taken.reason = concat("not needed: ", described.prepare_finalize, " comes first");
        described.candidates.push_back(std::move(taken));
        continue;
      }
      for (Answer& answer : ask(bucket.problem, dispatcher, plan_.options.experts, plan_.format)) {
        Candidate candidate{
            "experts", std::string(answer.name), false, answer.refusal, answer.refusal.empty() ? answer.estimate : 0,
            {}};
        if (answer.refusal.empty()) candidate.detail = answer.experts->describe(bucket.problem);
        if (answer.refusal.empty() && answer.estimate < best) {
          best = answer.estimate;
          bucket.experts = answer.experts;
          described.experts = candidate.name;
        }
        described.candidates.push_back(std::move(candidate));
      }
      if (bucket.experts) {
        bucket.prepare_finalize = dispatcher.object;
        described.prepare_finalize = taken.name;
        taken.chosen = true;
        bucket.problem.format = dispatcher.object->activation_format();
        if (bucket.problem.format == ActivationFormat::batched_experts)
          bucket.problem.batched = batched_shape(bucket.max_tokens);
      } else {
        taken.reason = "no experts implementation works behind it";
      }
      described.candidates.push_back(std::move(taken));
    }
    if (!bucket.experts) refuse(bucket.problem, plan_.options.experts);
    described.estimate_us = best;
    explain_losers(described.candidates, "experts", described.experts, best);
  }

  std::shared_ptr<const DenseExperts> choose_shared(std::int64_t limit, BucketPlan& described) const {
    const Problem problem = shared_problem(plan_, limit);
    const std::string forced = shared_force();
    for (const Dispatcher& dispatcher : dispatchers_for(limit)) {
      if (dispatcher.object->activation_format() != ActivationFormat::standard) continue;
      return shared_behind(dispatcher, problem, forced, described);
    }
    for (const PrepareFinalizeEntry& entry : prepare_finalize_implementations())  // a batched dispatcher was forced
      if (entry.format == ActivationFormat::standard)
        return shared_behind({entry.name, entry.make(make_context(entry.format, limit))}, problem, forced, described);
    throw Error(StatusCode::unsupported, "[plan] shared experts need a standard dispatcher");
  }

  std::shared_ptr<const DenseExperts> shared_behind(const Dispatcher& dispatcher, const Problem& problem,
                                                    const std::string& forced, BucketPlan& described) const {
    double best = kNever;
    std::shared_ptr<const Experts> chosen;
    for (const Answer& answer : ask(problem, dispatcher, forced, plan_.shared_format))
      if (answer.estimate < best) {
        best = answer.estimate;
        chosen = answer.experts;
      }
    if (!chosen) refuse(problem, forced);
    described.candidates.push_back(
        {"shared experts", std::string(chosen->name()), true, {}, best, chosen->describe(problem)});
    described.estimate_us += best;
    return std::make_shared<const DenseExperts>(
        DenseExperts::Parts{dispatcher.object, chosen, problem, problem.activation, plan_.config.shared.sigmoid_gate});
  }

  static void explain_losers(std::vector<Candidate>& candidates, std::string_view stage, const std::string& winner,
                             double best) {
    for (Candidate& candidate : candidates) {
      if (candidate.stage != stage) continue;
      if (candidate.name == winner && candidate.reason.empty())
        candidate.chosen = true;
      else if (candidate.reason.empty())
        candidate.reason = candidate.estimate_us > best
                               ? concat("slower: ", candidate.estimate_us, " us against ", best, " us")
                               : concat(winner, " comes first in the list");
    }
  }

  Plan::Impl& plan_;
  std::vector<ExpertsEntry> experts_;
  std::vector<PrepareFinalizeEntry> dispatchers_;
  std::vector<RouterEntry> routers_;
};

}  // namespace

void choose_implementations(Plan::Impl& plan) {
  plan.ceilings = cpu::ceilings(cpu::usable_isa(), plan.executor->concurrency());
  if (plan.config.shared.intermediate > 0) {
    const QuantDesc dense{plan.config.dtype, {}};
    plan.shared_spec = {1,
                        plan.config.hidden,
                        plan.config.shared.intermediate,
                        plan.config.shared.activation.gated,
                        plan.config.shared.quantised ? plan.config.quant.w1 : dense,
                        plan.config.shared.quantised ? plan.config.quant.w2 : dense,
                        false,
                        false};
  }
  Chooser(plan).run();
}

}  // namespace moekit::inline v0
