// Equal bits where an implementation promises them, and tokens and calls that do not disturb each other.
#include <cmath>
#include <limits>
#include <thread>

#include "testing/suite.hpp"
#include "text.hpp"

namespace moekit::suite {
namespace {

/// One call of `c`, ready to be repeated.
struct Session {
  Session(const ExpertsEntry& entry, const SuiteCase& suite_case)
      : c(suite_case), call(c, format_of(entry), quantised(entry, c)), subject(entry, c, call.capacity()) {}
  RunResult run(const RunOptions& options = {}) const { return subject.run(c, call, options); }
  static bool quantised(const ExpertsEntry& entry, const SuiteCase& c) {
    return Subject(entry, c, 1).wants_quantised_rows();
  }
  const SuiteCase& c;
  PreparedCall call;
  Subject subject;
};

std::string compare_runs(const RunResult& a, const RunResult& b, const char* what) {
  if (!a.problem.empty()) return a.problem;
  if (!b.problem.empty()) return b.problem;
  return same_bits(a.output, b.output) ? "" : text::concat("bits differ ", what);
}

/// Rows `kept` of a case as a case of their own, in that order.
SuiteCase with_rows(const SuiteCase& c, const std::vector<std::int64_t>& kept) {
  SuiteCase out = c;
  out.M = static_cast<std::int64_t>(kept.size());
  out.rows.clear(), out.ids.clear(), out.route_weights.clear();
  for (std::int64_t t : kept) {
    out.rows.insert(out.rows.end(), c.rows.begin() + t * c.K(), c.rows.begin() + (t + 1) * c.K());
    out.ids.insert(out.ids.end(), c.ids.begin() + t * c.k, c.ids.begin() + (t + 1) * c.k);
    out.route_weights.insert(out.route_weights.end(), c.route_weights.begin() + t * c.k,
                             c.route_weights.begin() + (t + 1) * c.k);
  }
  return out;
}

/// Row i of the changed call must be row kept[i] of the whole one, bit for bit.
std::string compare_rows(const ExpertsEntry& entry, const SuiteCase& c, const std::vector<std::int64_t>& kept,
                         const char* what) {
  const SuiteCase changed = with_rows(c, kept);
  const Session whole(entry, c), part(entry, changed);
  const RunResult a = whole.run(), b = part.run();
  if (!a.problem.empty() || !b.problem.empty()) return text::concat(a.problem, b.problem);
  for (std::size_t i = 0; i < kept.size(); ++i)
    if (!same_row(b.output, static_cast<std::int64_t>(i), a.output, kept[i]))
      return text::concat("token ", kept[i], " has other bits ", what);
  return {};
}

bool standard(const ExpertsEntry& entry) { return format_of(entry) == ActivationFormat::standard; }
Determinism level(const ExpertsEntry& entry, const SuiteCase& c) {
  return Subject(entry, c, 1).experts().determinism();
}

std::string repeat(const ExpertsEntry& entry, const SuiteCase& c) {
  if (level(entry, c) == Determinism::fast) return {};
  const Session session(entry, c);
  const RunResult first = session.run();
  for (std::byte poison : {std::byte{0xff}, std::byte{0x00}, std::byte{0x7f}})
    if (const RunResult again = session.run({.poison = poison}); true)
      if (std::string s = compare_runs(first, again, "when the same call finds other workspace contents"); !s.empty())
        return s;
  if (std::string s = compare_runs(first, session.run({.output_over_w13 = true}), "when output lies over workspace13");
      !s.empty())
    return s;
  if (!standard(entry)) return {};
  return compare_runs(first, session.run({.give_counts = false}), "without the rows per expert");
}

std::string threads(const ExpertsEntry& entry, const SuiteCase& c) {
  const Session session(entry, c);
  RunResult first;
  for (int n : {1, 2, 3, 8}) {
    RunResult run = session.run({.executor = &cpu_executor(n)});
    if (!run.problem.empty()) return text::concat(n, " threads: ", run.problem);
    if (n == 1)
      first = std::move(run);
    else if (level(entry, c) == Determinism::batch_invariant && !same_bits(first.output, run.output))
      return text::concat("bits differ between 1 and ", n, " threads");
  }
  return {};
}

std::string batch_invariance(const ExpertsEntry& entry, const SuiteCase& c) {
  if (level(entry, c) != Determinism::batch_invariant || !standard(entry) || c.M == 0) return {};
  std::vector<std::int64_t> backwards, padded, halves;
  for (std::int64_t t = c.M - 1; t >= 0; --t) backwards.push_back(t);
  for (std::int64_t t = 0; t < c.M; ++t) padded.insert(padded.end(), {t, 0});
  for (std::int64_t t = 0; t < (c.M + 1) / 2; ++t) halves.push_back(t);
  if (std::string s = compare_rows(entry, c, backwards, "when the tokens come in another order"); !s.empty()) return s;
  if (std::string s = compare_rows(entry, c, padded, "among other tokens"); !s.empty()) return s;
  if (std::string s = compare_rows(entry, c, halves, "in a smaller batch"); !s.empty()) return s;
  for (std::int64_t t : {std::int64_t{0}, c.M / 2, c.M - 1})
    if (std::string s = compare_rows(entry, c, {t}, "when it comes alone"); !s.empty()) return s;
  return {};
}

std::string wild_ids(const ExpertsEntry& entry, const SuiteCase& c) {
  if (level(entry, c) == Determinism::fast || !standard(entry)) return {};
  SuiteCase clean = c, wild = c;
  for (std::int64_t t = 0; t < c.M; ++t) {
    clean.set_id(t, t % c.k, -1);
    wild.set_id(t, t % c.k, t % 2 == 0 ? c.num_experts() + t : std::numeric_limits<std::int32_t>::min() + t);
  }
  return compare_runs(Session(entry, clean).run(), Session(entry, wild).run(), "between -1 and ids out of range");
}

/// A NaN and an infinity in the input reach no other token.
std::string poisoned_token(const ExpertsEntry& entry, const SuiteCase& c) {
  if (level(entry, c) == Determinism::fast || !standard(entry) || c.M < 3 || c.config.quant.a1.static_scale) return {};
  SuiteCase sick = c;
  sick.rows[static_cast<std::size_t>(1 * c.K() + c.K() / 2)] = std::numeric_limits<float>::quiet_NaN();
  sick.rows[static_cast<std::size_t>(2 * c.K())] = std::numeric_limits<float>::infinity();
  const RunResult healthy = Session(entry, c).run(), ill = Session(entry, sick).run();
  if (!healthy.problem.empty() || !ill.problem.empty()) return healthy.problem + ill.problem;
  for (std::int64_t t = 0; t < c.M; ++t)
    if (t != 1 && t != 2 && !same_row(healthy.output, t, ill.output, t))
      return text::concat("a NaN in token 1 or an infinity in token 2 changed token ", t);
  for (std::int64_t t : {1, 2})
    for (std::int64_t i = 0; i < c.K(); ++i)
      if (std::isfinite(numeric::load_f32(ill.output.data, ill.output.dtype, t * c.K() + i)))
        return text::concat("element [", t, ", ", i, "] is finite although its token's input is not");
  return {};
}

std::string two_calls_at_once(const ExpertsEntry& entry, const SuiteCase& c) {
  const Session session(entry, c);
  const RunResult alone = session.run();
  RunResult together[2];
  std::thread other([&] {
    for (int i = 0; i < 3; ++i) together[0] = session.run();
  });
  for (int i = 0; i < 3; ++i) together[1] = session.run();
  other.join();
  for (const RunResult& run : together) {
    if (!run.problem.empty()) return run.problem;
    if (level(entry, c) != Determinism::fast && !same_bits(alone.output, run.output))
      return "bits differ when two calls run at once";
  }
  return {};
}

/// Batched: rows beyond the counts come out as zero.
std::string rows_beyond_counts(const ExpertsEntry& entry, const SuiteCase& c) {
  if (standard(entry)) return {};
  const Session session(entry, c);
  const RunResult run = session.run();
  if (!run.problem.empty()) return run.problem;
  const std::int64_t capacity = session.call.capacity();
  const auto* counts = session.call.args().tokens->counts.as<const std::int32_t>();
  for (std::int64_t e = 0; e < c.num_local; ++e)
    for (std::int64_t i = counts[e] * c.K(); i < capacity * c.K(); ++i)
      if (numeric::load_f32(run.output.data, run.output.dtype, e * capacity * c.K() + i) != 0.0f)
        return text::concat("expert ", e, " has ", counts[e], " rows, but row ", i / c.K(), " is not zero");
  return {};
}

}  // namespace

void check_bits(Suite& suite, const SuiteCase& base) {
  suite.for_each(base, "workspace_contents_and_counts_do_not_matter", repeat);
  suite.for_each(base, "threads_do_not_change_bits", threads);
  suite.for_each(base, "other_tokens_do_not_change_bits", batch_invariance);
  suite.for_each(base, "ids_out_of_range_equal_minus_one", wild_ids);
  suite.for_each(base, "nan_and_inf_stay_in_their_token", poisoned_token);
  suite.for_each(base, "two_calls_at_once", two_calls_at_once);
  suite.for_each(base, "rows_beyond_the_counts_are_zero", rows_beyond_counts);
}

}  // namespace moekit::suite
