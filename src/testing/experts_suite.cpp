#include <moekit/testing/experts_suite.hpp>

#include <cmath>
#include <cstring>

#include "experts/canonical.hpp"
#include "testing/suite.hpp"
#include "text.hpp"

namespace moekit::inline v0::conformance {
using namespace suite;

std::string to_string(const CheckResult& r) {
  std::string out = text::concat(r.implementation, " ", r.check, " ", r.shape, ": ");
  if (r.refused) return text::concat(out, r.ok ? "refused: " : "refused without a reason", r.note);
  if (!r.note.empty()) return text::concat(out, r.note);
  return text::concat(out, "[", r.t, ", ", r.c, "] is ", r.value, ", should be ", r.reference, " ± ", r.bound,
                      r.ok ? ", ok" : "");
}

std::vector<CheckResult> run_experts_suite(std::span<const ExpertsEntry> entries, const SuiteOptions& options) {
  static const std::vector<std::string> kBuiltIn = {"e4k2h64i96 M=5", "e8k2h48i17 M=33", "e1k1h17i33 M=1",
                                                    "e16k16h96i40 M=7"};
  Suite suite(entries, options);
  for (const std::string& text : options.shapes.empty() ? kBuiltIn : options.shapes) {
    ShapeLine line;
    throw_if_failed(parse_shape_line(text, line));
    for (const std::string& scheme : options.schemes) {
      LayerConfig config = line.shape.config;
      throw_if_failed(quant_from_names(scheme, "", config.quant));
      config.dtype = is_float(config.quant.a1.type) ? config.quant.a1.type : DType::bf16;
      const std::int64_t M = options.max_tokens > 0 ? std::min(options.max_tokens, line.tokens) : line.tokens;
      auto weights = std::make_shared<SuiteWeights>(spec_of(config), SuiteWeights::Fill::random, options.seed);
      const SuiteCase base = make_case(config, M, std::move(weights), options.seed);
      suite.check_values(base);
      if (options.values_only) continue;
      check_variants(suite, base);
      check_bits(suite, base);
      check_refusals(suite, base);
    }
  }
  return suite.take();
}

}  // namespace moekit::inline v0::conformance

namespace moekit::suite {

struct Suite::Candidate {
  const ExpertsEntry* entry;
  Subject subject;
  std::size_t which;  // index of its roundings
};

Suite::Suite(std::span<const ExpertsEntry> entries, const SuiteOptions& options) : options_(options) {
  for (const ExpertsEntry& entry : entries)
    if (!entry.available || entry.available().ok()) entries_.push_back(entry);
}

CheckResult Suite::result(const ExpertsEntry& entry, const SuiteCase& c, const char* check) const {
  CheckResult out;
  out.implementation = std::string(entry.name);
  out.check = check;
  out.shape = c.shape;
  return out;
}

std::string not_applicable(const Experts& experts, const SuiteCase& c) {
  const bool batched = experts.activation_formats().in == ActivationFormat::batched_experts;
  if (!batched && !c.map.empty() && !experts.supports_expert_map()) return "takes no expert_map";
  if (batched && c.padding > 0) return "batched rows are dense";
  if (batched && c.a2_per_row) return "batched rows have no scales of their own";
  return {};
}

void Suite::check_values(const SuiteCase& c) { check_values(c, nullptr); }

void Suite::check_values(const SuiteCase& c, const std::function<double(std::int64_t, std::int64_t)>& exact) {
  for (ActivationFormat format : {ActivationFormat::standard, ActivationFormat::batched_experts})
    check_format(c, format, exact);
}

void Suite::check_format(const SuiteCase& c, ActivationFormat format,
                         const std::function<double(std::int64_t, std::int64_t)>& exact) {
  const PreparedCall call(c, format, true);
  std::vector<Candidate> candidates;
  std::vector<oracle::Rounded> rounded;
  for (const ExpertsEntry& entry : entries_) {
    if (format_of(entry) != format) continue;
    Subject subject(entry, c, call.capacity());
    CheckResult refusal = result(entry, c, c.check.c_str());
    refusal.refused = true;
    const Verdict verdict = subject.verdict();
    refusal.note = verdict.ok() ? not_applicable(subject.experts(), c) : verdict.reason();
    refusal.ok = !refusal.note.empty();
    if (!verdict.ok() || refusal.ok) {
      results_.push_back(std::move(refusal));
      continue;
    }
    const oracle::Rounded own = subject.rounded();
    std::size_t which = 0;
    while (which < rounded.size() && !(rounded[which] == own)) ++which;
    if (which == rounded.size()) rounded.push_back(own);
    candidates.push_back({&entry, std::move(subject), which});
  }
  if (candidates.empty()) return;
  ExpertsArgs question = call.args();
  question.weights = c.weights->view(experts::canonical_format(), c.num_local);
  const std::int64_t count = options_.sampled_rows > 0 ? options_.sampled_rows : c.M;
  const oracle::Expected expected =
      oracle::ask(question, rounded, oracle::sample_rows(c.M, count, options_.seed), cpu_executor());
  std::string oracle_problem;
  if (exact && format == ActivationFormat::standard)
    for (std::size_t i = 0; i < expected.value.size(); ++i) {
      const double closed = exact(expected.rows[i / static_cast<std::size_t>(expected.columns)],
                                  static_cast<std::int64_t>(i) % expected.columns);
      if (std::abs(closed - expected.value[i]) > 1e-12 * (1 + std::abs(closed)))
        oracle_problem = text::concat("the oracle says ", expected.value[i], ", the closed form ", closed);
    }
  for (const Candidate& candidate : candidates) {
    CheckResult r = result(*candidate.entry, c, c.check.c_str());
    const PreparedCall* own_call = &call;
    std::unique_ptr<PreparedCall> plain;
    if (!candidate.subject.wants_quantised_rows()) {
      plain = std::make_unique<PreparedCall>(c, format, false);
      own_call = plain.get();
    }
    const RunResult run = candidate.subject.run(c, *own_call, {});
    r.note = oracle_problem.empty() ? run.problem : oracle_problem;
    if (r.note.empty()) {
      const oracle::Worst worst = oracle::compare(run.output, expected, candidate.which);
      r.ok = worst.ok;
      r.t = worst.t, r.c = worst.c;
      r.value = worst.value, r.reference = worst.reference, r.bound = worst.bound;
    }
    results_.push_back(std::move(r));
  }
}

void Suite::for_each(const SuiteCase& c, const char* check,
                     const std::function<std::string(const ExpertsEntry&, const SuiteCase&)>& body) {
  for (const ExpertsEntry& entry : entries_) {
    CheckResult r = result(entry, c, check);
    const PreparedCall call(c, format_of(entry), true);
    const Subject subject(entry, c, call.capacity());
    const Verdict verdict = subject.verdict();
    const std::string skip = not_applicable(subject.experts(), c);
    if (!verdict.ok() || !skip.empty()) {
      r.refused = true;
      r.note = verdict.ok() ? skip : verdict.reason();
      r.ok = !r.note.empty();
    } else {
      r.note = body(entry, c);
      r.ok = r.note.empty();
    }
    results_.push_back(std::move(r));
  }
}

bool same_row(const Tensor& a, std::int64_t a_row, const Tensor& b, std::int64_t b_row) {
  if (a.dtype != b.dtype || a.shape[a.rank - 1] != b.shape[b.rank - 1]) return false;
  const auto row_bytes = static_cast<std::size_t>(a.shape[a.rank - 1] * bytes(a.dtype));
  return std::memcmp(a.as<std::byte>() + static_cast<std::size_t>(a_row) * row_bytes,
                     b.as<std::byte>() + static_cast<std::size_t>(b_row) * row_bytes, row_bytes) == 0;
}

bool same_bits(const Tensor& a, const Tensor& b) {
  if (a.dtype != b.dtype || a.numel() != b.numel()) return false;
  return a.numel() == 0 || std::memcmp(a.data, b.data, static_cast<std::size_t>(a.numel() * bytes(a.dtype))) == 0;
}

}  // namespace moekit::suite
