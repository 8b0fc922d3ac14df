// The two ends of a bucket: which router gives the ids, and who closes the output.
#include <algorithm>

#include "plan_problem.hpp"

namespace moekit::inline v0 {
using text::concat;

namespace {

std::vector<RouterEntry> routers_of(const Plan::Impl& plan) {
  std::vector<RouterEntry> out(plan.options.extra_routers.begin(), plan.options.extra_routers.end());
  if (plan.config.router.source != RouterSource::custom)
    for (const RouterEntry& entry : router_implementations()) out.push_back(entry);
  return out;
}

std::shared_ptr<const Router> ask(const Plan::Impl& plan, const RouterEntry& entry, std::int64_t tokens,
                                  Candidate& candidate) {
  if (Verdict verdict = entry.available ? entry.available() : Verdict::yes(); !verdict) {
    candidate.reason = verdict.reason();
    return nullptr;
  }
  std::shared_ptr<const Router> router = make_of(entry);
  if (!router) {
    candidate.reason = kMakesNothing;
    return nullptr;
  }
  const RouteProblem problem{plan.device, tokens, plan.config.num_experts, plan.config.top_k, plan.config.router};
  if (Verdict verdict = router->supports(problem); !verdict) {
    candidate.reason = verdict.reason();
    return nullptr;
  }
  const double estimate = router->estimate_us(problem, plan.ceilings);
  candidate.reason = bad_estimate(estimate);
  if (candidate.reason.empty()) candidate.estimate_us = estimate;
  return router;
}

}  // namespace

void explain_losers(std::vector<Candidate>& candidates, std::string_view stage, const std::string& winner,
                    double best) {
  for (Candidate& candidate : candidates) {
    if (candidate.stage != stage || !candidate.reason.empty()) continue;
    if (candidate.name == winner)
      candidate.chosen = true;
    else
      candidate.reason = candidate.estimate_us > best
                             ? concat("slower: ", candidate.estimate_us, " us against ", best, " us")
                             : concat(winner, " comes first in the list");
  }
}

void choose_router(const Plan::Impl& plan, std::string_view only, Plan::Impl::Bucket& bucket, BucketPlan& described) {
  const RouterConfig& config = plan.config.router;
  if (config.source == RouterSource::external || config.source == RouterSource::simulated) {
    described.router = to_string(config);
    return;
  }
  const bool custom = config.source == RouterSource::custom;  // two of them need not mean the same: the first one
  double best = kNever;
  std::string reasons;
  for (const RouterEntry& entry : routers_of(plan)) {
    if (!forced_match(plan.options.router, entry.name)) continue;
    Candidate candidate{"router", std::string(entry.name), false, {}, 0, {}};
    const std::shared_ptr<const Router> router = ask(plan, entry, bucket.max_tokens, candidate);
    if (candidate.reason.empty()) candidate.reason = other_than(only, entry.name);
    if (candidate.reason.empty() && (custom ? !bucket.router : candidate.estimate_us < best)) {
      best = candidate.estimate_us;
      bucket.router = router;
      described.router = candidate.name;
    }
    reasons += concat("\n  ", candidate.name, ": ", candidate.reason);
    described.candidates.push_back(std::move(candidate));
  }
  if (!bucket.router)
    throw Error(plan.options.router.empty() ? StatusCode::unsupported : StatusCode::invalid_argument,
                concat("[plan] no router can do this (", to_string(config), ", forced name '", plan.options.router,
                       "'):", reasons),
                custom ? "pass yours in PlanOptions::extra_routers" : "", "options.router");
  explain_losers(described.candidates, "router", described.router, custom ? kNever : best);
}

void choose_tail(const Plan::Impl& plan, Plan::Impl::Bucket& bucket, BucketPlan& described) {
  const OutputKind kind = plan.options.output;
  const std::int64_t ceiling = plan.options.tail_max_tokens;
  std::string closed;  // why the experts' rows do not stay open
  if (bucket.max_tokens > ceiling)
    closed = concat("more than tail_max_tokens = ", ceiling, " tokens");
  else if (!bucket.experts->supports_open_output())
    closed = concat(described.experts, " closes its output");
  else if (!bucket.prepare_finalize->supports_open_output())
    closed = concat(described.prepare_finalize, " must close the output itself");
  bucket.may_open = kind != OutputKind::tensor && closed.empty();

  Candidate caller{"tail", "caller", false, {}, 0, "takes GEMM2's rows, weights and map"};
  Candidate cpu{"tail", "cpu", false, {}, 0, "shared, residual and norm in one pass over "};
  Candidate layer{"tail", "layer", false, {}, 0, "finalize writes [M, K]"};
  cpu.detail += closed.empty() ? "GEMM2's rows" : "the finalised rows: " + closed;
  if (kind == OutputKind::open && !closed.empty()) layer.detail += ", which the caller gets: " + closed;
  if (!bucket.may_open || kind != OutputKind::open)
    caller.reason = kind == OutputKind::open ? closed : "an open output was not asked for";
  if (kind != OutputKind::tail) cpu.reason = "a tail was not asked for";
  if (caller.reason.empty() || cpu.reason.empty())
    layer.reason = concat("the ", caller.reason.empty() ? "caller" : "tail", " closes the output");
  for (Candidate* candidate : {&caller, &cpu, &layer}) {
    candidate->chosen = candidate->reason.empty();
    if (candidate->chosen) described.tail = candidate->name;
    described.candidates.push_back(std::move(*candidate));
  }
}

}  // namespace moekit::inline v0
