// The questions that a plan asks its lists, and what an answer may look like.
#pragma once
#include <fnmatch.h>

#include <cmath>
#include <limits>
#include <string>
#include <string_view>

#include "plan_impl.hpp"
#include "text.hpp"

namespace moekit::inline v0 {

Problem routed_problem(const Plan::Impl& plan, std::int64_t tokens);
/// Shared experts as a layer of one expert that every token passes.
Problem shared_problem(const Plan::Impl& plan, std::int64_t tokens);
/// What the machine's limits allow for a problem with weights from memory and uniform routing.
double floor_us(const Problem& problem, const Ceilings& ceilings);

inline constexpr double kNever = std::numeric_limits<double>::infinity();

/// Names by glob; an empty pattern forces nothing.
inline bool forced_match(const std::string& pattern, std::string_view name) {
  return pattern.empty() || ::fnmatch(pattern.c_str(), std::string(name).c_str(), 0) == 0;
}

/// Null where an entry has no make() or its make() gives nothing: such an entry is refused, not called.
template <class Entry, class... Context>
auto make_of(const Entry& entry, const Context&... context) -> decltype(entry.make(context...)) {
  return entry.make ? entry.make(context...) : nullptr;
}
inline constexpr const char* kMakesNothing = "makes nothing: its make() is missing or returned null";

/// Why an estimate cannot be compared with others; empty if it can.
inline std::string bad_estimate(double us) {
  if (std::isfinite(us) && us >= 0) return {};
  return text::concat("its estimate is ", us, " us, which cannot be compared");
}

/// Why `name` is not taken where every bucket takes `only`; empty if it is.
inline std::string other_than(std::string_view only, std::string_view name) {
  if (only.empty() || only == name) return {};
  return text::concat("batch_invariant: ", only, " runs every number of tokens, for the same bits");
}

/// Among the candidates of `stage` that say yes: marks the winner, gives the others their reason.
void explain_losers(std::vector<Candidate>& candidates, std::string_view stage, const std::string& winner, double best);
/// Fills bucket.router and described.router; throws Error with every refusal when none can do it.
/// `only`: the router that every bucket takes; empty = any.
void choose_router(const Plan::Impl& plan, std::string_view only, Plan::Impl::Bucket& bucket, BucketPlan& described);
/// Who closes the output of a bucket whose other stages are chosen: described.tail and the candidates of that stage.
void choose_tail(const Plan::Impl& plan, Plan::Impl::Bucket& bucket, BucketPlan& described);

}  // namespace moekit::inline v0
