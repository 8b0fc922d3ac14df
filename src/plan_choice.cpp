// Which implementation runs each stage, for each token bucket: ask every entry of every list, keep every answer.
#include <algorithm>
#include <utility>

#include "cpu/ceilings.hpp"
#include "plan_problem.hpp"

namespace moekit::inline v0 {
using text::concat;

namespace {

/// Token counts at which the choice may change.
std::vector<std::int64_t> bucket_limits(const PlanOptions& options) {
  std::vector<std::int64_t> limits;
  for (std::int64_t limit = 1; limit < options.max_tokens; limit *= 4) limits.push_back(limit);
  limits.push_back(options.max_tokens);
  if (options.output != OutputKind::tensor && options.tail_max_tokens > 0 &&
      options.tail_max_tokens < options.max_tokens)
    limits.push_back(options.tail_max_tokens);  // above it nothing stays open
  std::sort(limits.begin(), limits.end());
  limits.erase(std::unique(limits.begin(), limits.end()), limits.end());
  return limits;
}

/// One experts entry asked about one problem.
struct Answer {
  std::string_view name;
  std::shared_ptr<const Experts> experts;  // null if it cannot be made
  std::string refusal;                     // empty = yes
  double estimate = kNever;
  bool extra = false;  // not of the built-in list
};

struct Dispatcher {
  std::string_view name;
  std::shared_ptr<PrepareFinalize> object;
  std::string refusal;  // nothing works behind it
};

/// What is asked of every entry beside the problem.
struct Wish {
  std::string forced{};                // name or glob; empty = any
  const PackFormat* format = nullptr;  // null = any
  bool open = false;                   // the output stays open
  std::string_view only{};             // the one that every bucket takes; empty = any
};

class Chooser {
 public:
  explicit Chooser(Plan::Impl& plan) : plan_(plan), routed_{&routed_problem, plan.options.experts, true} {}

  void run() {
    for (const PrepareFinalizeEntry& entry : plan_.options.extra_prepare_finalize) dispatchers_.push_back(entry);
    for (const PrepareFinalizeEntry& entry : prepare_finalize_implementations()) dispatchers_.push_back(entry);
    plan_.format = pick_format(plan_.spec, routed_);
    if (plan_.config.shared.intermediate > 0) {
      shared_ = {&shared_problem, shared_force(), false};
      plan_.shared_format = pick_format(plan_.shared_spec, shared_);
    }
    std::vector<std::int64_t> limits = bucket_limits(plan_.options);
    std::reverse(limits.begin(), limits.end());  // the largest chooses for all, where all must give the same bits
    for (std::int64_t limit : limits) add_bucket(limit);
    std::reverse(plan_.buckets.begin(), plan_.buckets.end());
    std::reverse(plan_.described.begin(), plan_.described.end());
  }

 private:
  /// The routed experts, or the shared ones.
  struct Part {
    Problem (*problem)(const Plan::Impl&, std::int64_t tokens) = nullptr;
    std::string forced{};
    bool may_open = false;
  };

  /// A forced name that only speaks batched experts cannot run the shared ones: they keep the plan's own choice.
  std::string shared_force() const {
    for (const Dispatcher& dispatcher : dispatchers_for(1))
      if (dispatcher.object && dispatcher.object->activation_format() == ActivationFormat::standard)
        for (const Answer& answer : ask(shared_problem(plan_, 1), dispatcher, {plan_.options.experts}))
          if (answer.refusal.empty()) return plan_.options.experts;
    return {};
  }

  std::vector<Dispatcher> dispatchers_for(std::int64_t tokens) const {
    std::vector<Dispatcher> out;
    for (const PrepareFinalizeEntry& entry : dispatchers_)
      if (forced_match(plan_.options.prepare_finalize, entry.name)) out.push_back(make_dispatcher(entry, tokens));
    if (!out.empty()) return out;
    std::string names;
    for (const PrepareFinalizeEntry& entry : dispatchers_) names.append(" ").append(entry.name);
    throw Error(StatusCode::invalid_argument,
                concat("[plan] no dispatcher is called '", plan_.options.prepare_finalize, "'"),
                concat("there are:", names), "options.prepare_finalize");
  }

  Dispatcher make_dispatcher(const PrepareFinalizeEntry& entry, std::int64_t tokens) const {
    Dispatcher out{entry.name, make_of(entry, make_context(entry.format, tokens)), {}};
    if (!out.object) {
      out.refusal = kMakesNothing;
    } else if (out.object->activation_format() != entry.format) {
      out.refusal =
          concat("its entry says ", name(entry.format), ", it delivers ", name(out.object->activation_format()));
      out.object = nullptr;
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

  /// Every experts entry on `problem` behind `dispatcher`.
  std::vector<Answer> ask(Problem problem, const Dispatcher& dispatcher, const Wish& wish) const {
    std::vector<Answer> out;
    if (!dispatcher.object) return out;
    problem.format = dispatcher.object->activation_format();
    const MakeContext context = make_context(problem.format, problem.size.M);
    if (context.batched) {
      problem.batched = context.batched;
      problem.size.M = context.batched->max_tokens_per_rank * context.batched->num_dispatchers;
    }
    const auto ask_all = [&](std::span<const ExpertsEntry> entries, bool extra) {
      for (const ExpertsEntry& entry : entries)
        if (forced_match(wish.forced, entry.name)) {
          out.push_back(ask_one(entry, context, problem, dispatcher, wish));
          out.back().extra = extra;
        }
    };
    ask_all(plan_.options.extra_experts, true);
    ask_all(experts_implementations(), false);
    return out;
  }

  Answer ask_one(const ExpertsEntry& entry, const MakeContext& context, const Problem& problem,
                 const Dispatcher& dispatcher, const Wish& wish) const {
    Answer answer{entry.name, nullptr, {}, kNever};
    if (Verdict verdict = entry.available ? entry.available() : Verdict::yes(); !verdict) {
      answer.refusal = verdict.reason();
      return answer;
    }
    answer.experts = make_of(entry, context);
    answer.refusal = answer.experts ? refusal(*answer.experts, problem, dispatcher, wish)
                                    : concat("makes nothing for ", name(problem.format), " activations, which ",
                                             dispatcher.name, " delivers");
    if (answer.refusal.empty()) answer.refusal = other_than(wish.only, entry.name);
    if (!answer.refusal.empty()) return answer;
    const double estimate = answer.experts->estimate_us(problem, plan_.ceilings);
    answer.refusal = bad_estimate(estimate);
    if (answer.refusal.empty()) answer.estimate = estimate;
    return answer;
  }

  std::string refusal(const Experts& experts, const Problem& problem, const Dispatcher& dispatcher,
                      const Wish& wish) const {
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
    if (wish.format && !experts.accepts(*wish.format)) return concat("cannot read the pack format ", wish.format->id());
    if (wish.open && !experts.supports_open_output()) return "closes its output, an open one was asked for";
    if (wish.open && !dispatcher.object->supports_open_output())
      return concat(dispatcher.name, " must close the output itself, an open one was asked for");
    return {};
  }

  /// The caller takes the output over from calls of up to `limit` tokens, if somebody can leave it.
  bool wants_open(const Part& part, std::int64_t limit) const {
    return part.may_open && plan_.options.output == OutputKind::open && limit <= plan_.options.tail_max_tokens;
  }

  /// The format with which the most buckets stay open that should, and all together are fastest; earlier in the list on
  /// ties.
  const PackFormat* pick_format(const WeightsSpec& spec, const Part& part) const {
    std::vector<const PackFormat*> formats = own_formats(spec, part);
    for (const PackFormat* format : pack_formats()) formats.push_back(format);
    const PackFormat* picked = nullptr;
    std::pair<int, double> best{0, kNever};  // buckets that are closed against the wish, time per token
    for (const PackFormat* format : formats) {
      if (!format->supports(spec)) continue;
      std::pair<int, double> total{0, 0.0};
      for (std::int64_t limit : bucket_limits(plan_.options)) {
        const bool open = wants_open(part, limit);
        double us = best_estimate(part.problem(plan_, limit), {part.forced, format, open});
        if (open && us == kNever) {
          us = best_estimate(part.problem(plan_, limit), {part.forced, format, false});
          ++total.first;
        }
        total.second += us / static_cast<double>(limit);
      }
      if (total.second < kNever && (!picked || total < best)) best = total, picked = format;
    }
    if (!picked) refuse(part.problem(plan_, 1), part.forced);
    return picked;
  }

  /// What the caller's own experts read best, of those that can run.
  std::vector<const PackFormat*> own_formats(const WeightsSpec& spec, const Part& part) const {
    std::vector<const PackFormat*> out;
    if (plan_.options.extra_experts.empty()) return out;
    for (std::int64_t limit : bucket_limits(plan_.options))
      for (const Dispatcher& dispatcher : dispatchers_for(limit))
        for (const Answer& answer : ask(part.problem(plan_, limit), dispatcher, {part.forced})) {
          if (!answer.extra || !answer.refusal.empty()) continue;
          const PackFormat* format = &answer.experts->preferred_format(spec);
          if (std::find(out.begin(), out.end(), format) == out.end()) out.push_back(format);
        }
    return out;
  }

  double best_estimate(const Problem& problem, const Wish& wish) const {
    double best = kNever;
    for (const Dispatcher& dispatcher : dispatchers_for(problem.size.M)) {
      for (const Answer& answer : ask(problem, dispatcher, wish)) best = std::min(best, answer.estimate);
      if (best < kNever) break;  // the first dispatcher that works, as in the choice itself
    }
    return best;
  }

  [[noreturn]] void refuse(const Problem& problem, const std::string& forced) const {
    std::string reasons, names;
    bool known = false;
    const auto note = [&](const ExpertsEntry& entry) {
      names.append(" ").append(entry.name);
      known = known || forced_match(forced, entry.name);
    };
    for (const ExpertsEntry& entry : plan_.options.extra_experts) note(entry);
    for (const ExpertsEntry& entry : experts_implementations()) note(entry);
    if (!known)
      throw Error(StatusCode::invalid_argument, concat("[plan] no experts implementation is called '", forced, "'"),
                  concat("there are:", names), "options.experts");
    for (const Dispatcher& dispatcher : dispatchers_for(problem.size.M)) {
      if (!dispatcher.object) reasons += concat("\n  ", dispatcher.name, ": ", dispatcher.refusal);
      for (const Answer& answer : ask(problem, dispatcher, {forced}))
        reasons += concat("\n  ", answer.name, " (", dispatcher.name,
                          "): ", answer.refusal.empty() ? "no pack format" : answer.refusal);
    }
    throw Error(StatusCode::unsupported, concat("[plan] nothing here can run ", to_string(problem), ":", reasons), "",
                "options.experts");
  }

  void add_bucket(std::int64_t limit) {
    Plan::Impl::Bucket bucket;
    BucketPlan described;
    bucket.max_tokens = described.max_tokens = limit;
    described.format = plan_.format->id();
    choose_router(plan_, shared_by_all_.router, bucket, described);
    bucket.problem = routed_problem(plan_, limit);
    const std::size_t asked = described.candidates.size();
    bool open = wants_open(routed_, limit);
    choose_experts(bucket, described, open);
    if (!bucket.experts && open) {  // better closed than not at all
      described.candidates.resize(asked);
      choose_experts(bucket, described, open = false);
    }
    if (!bucket.experts) refuse(bucket.problem, plan_.options.experts);
    if (plan_.config.shared.intermediate > 0) bucket.shared = choose_shared(limit, described);
    choose_tail(plan_, bucket, described);
    if (plan_.options.determinism == Determinism::batch_invariant) {
      shared_by_all_.router = described.router;
      shared_by_all_.experts[open] = described.experts;
      if (bucket.shared) shared_by_all_.dense = bucket.shared->experts().name();
    }
    bucket.kernel_options.chunk = plan_.options.chunk;
    if (bucket.may_open) bucket.kernel_options.open_max_tokens = plan_.options.tail_max_tokens;
    bucket.kernel = std::make_shared<ModularKernel>(bucket.prepare_finalize, bucket.experts, bucket.shared,
                                                    bucket.problem, bucket.kernel_options);
    described.floor_us = floor_us(bucket.problem, plan_.ceilings);
    plan_.buckets.push_back(std::move(bucket));
    plan_.described.push_back(std::move(described));
  }

  void choose_experts(Plan::Impl::Bucket& bucket, BucketPlan& described, bool open) const {
    for (const Dispatcher& dispatcher : dispatchers_for(bucket.max_tokens)) {
      Candidate taken{"prepare_finalize", std::string(dispatcher.name), false, dispatcher.refusal, 0, {}};
      if (bucket.experts && taken.reason.empty())
        taken.reason = concat("not needed: ", described.prepare_finalize, " comes first");
      if (taken.reason.empty()) {
        choose_behind(dispatcher, open, bucket, described);
        taken.chosen = bucket.experts != nullptr;
        if (!taken.chosen) taken.reason = "no experts implementation works behind it";
      }
      described.candidates.push_back(std::move(taken));
    }
    explain_losers(described.candidates, "experts", described.experts, described.estimate_us);
  }

  void choose_behind(const Dispatcher& dispatcher, bool open, Plan::Impl::Bucket& bucket, BucketPlan& described) const {
    double best = kNever;
    for (Answer& answer :
         ask(bucket.problem, dispatcher, {plan_.options.experts, plan_.format, open, shared_by_all_.experts[open]})) {
      Candidate candidate{"experts", std::string(answer.name), false, answer.refusal, 0, {}};
      if (answer.refusal.empty()) {
        candidate.estimate_us = answer.estimate;
        candidate.detail = answer.experts->describe(bucket.problem);
      }
      if (answer.estimate < best) {
        best = answer.estimate;
        bucket.experts = answer.experts;
        described.experts = candidate.name;
      }
      described.candidates.push_back(std::move(candidate));
    }
    if (!bucket.experts) return;
    described.estimate_us = best;
    described.prepare_finalize = dispatcher.name;
    bucket.prepare_finalize = dispatcher.object;
    bucket.problem.format = dispatcher.object->activation_format();
    if (bucket.problem.format == ActivationFormat::batched_experts)
      bucket.problem.batched = batched_shape(bucket.max_tokens);
  }

  std::shared_ptr<const DenseExperts> choose_shared(std::int64_t limit, BucketPlan& described) const {
    for (const Dispatcher& dispatcher : dispatchers_for(limit))
      if (dispatcher.object && dispatcher.object->activation_format() == ActivationFormat::standard)
        return shared_behind(dispatcher, limit, described);
    for (const PrepareFinalizeEntry& entry : prepare_finalize_implementations())  // a batched dispatcher was forced
      if (entry.format == ActivationFormat::standard)
        return shared_behind(make_dispatcher(entry, limit), limit, described);
    throw Error(StatusCode::unsupported, "[plan] shared experts need a standard dispatcher");
  }

  std::shared_ptr<const DenseExperts> shared_behind(const Dispatcher& dispatcher, std::int64_t limit,
                                                    BucketPlan& described) const {
    const Problem problem = shared_problem(plan_, limit);
    double best = kNever;
    std::shared_ptr<const Experts> chosen;
    for (const Answer& answer :
         ask(problem, dispatcher, {shared_.forced, plan_.shared_format, false, shared_by_all_.dense}))
      if (answer.estimate < best) {
        best = answer.estimate;
        chosen = answer.experts;
      }
    if (!chosen) refuse(problem, shared_.forced);
    described.candidates.push_back(
        {"shared experts", std::string(chosen->name()), true, {}, best, chosen->describe(problem)});
    described.estimate_us += best;
    return std::make_shared<const DenseExperts>(
        DenseExperts::Parts{dispatcher.object, chosen, problem, problem.activation, plan_.config.shared.sigmoid_gate});
  }

  Plan::Impl& plan_;
  /// Names that the buckets share for the sake of equal bits; experts of closed and of open outputs.
  struct {
    std::string router, experts[2], dense;
  } shared_by_all_;
  Part routed_, shared_;
  std::vector<PrepareFinalizeEntry> dispatchers_;
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
