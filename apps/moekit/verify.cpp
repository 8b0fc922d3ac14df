// moekit verify: published results where a folder has them, float64 where it has none; then determinism.
#include <algorithm>

#include "console.hpp"
#include "route.hpp"
#include "session.hpp"
#include "spelling.hpp"
#include "verbs.hpp"
#include "verify_checks.hpp"

namespace moekit::cli {
namespace {

std::vector<const ExpertsEntry*> matching(const std::string& glob) {
  std::vector<const ExpertsEntry*> out;
  std::vector<std::string> names;
  for (const ExpertsEntry& entry : experts_implementations()) {
    names.emplace_back(entry.name);
    if (glob_match(glob, entry.name)) out.push_back(&entry);
  }
  if (!out.empty()) return out;
  std::string list;
  for (const std::string& name : names) list += " " + name;
  const std::string best = nearest(glob, names);
  throw UsageError("--impl " + glob + " matches nothing" + (best.empty() ? "" : "; did you mean " + best + "?") +
                   " There are:" + list);
}

/// Those that this machine can run; the others become one n/a line each.
std::vector<const ExpertsEntry*> runnable(const std::vector<const ExpertsEntry*>& entries, VerifyReport& report) {
  std::vector<const ExpertsEntry*> out;
  for (const ExpertsEntry* entry : entries) {
    const Verdict verdict = entry->available();
    if (verdict.ok())
      out.push_back(entry);
    else
      report.add(Check::refuse("this machine", "experts", std::string(entry->name), verdict.reason()));
  }
  return out;
}

std::string rows_name(std::int64_t rows) { return format("M%lld", static_cast<long long>(rows)); }

void verify_golden(Subjected& s, const Subject& subject, const io::Golden& golden) {
  const std::vector<io::GoldenCase> cases = golden_cases(golden, s.layer);
  if (cases.empty()) {
    s.report.add(Check::skip(s.label, "golden", "-", "golden.safetensors has no rows of this module"));
    return;
  }
  check_golden_codes(s, subject.text(), golden, cases);
  for (const io::GoldenCase& one : cases) {
    const RoutingRows routing = golden_routing(one, s.layer, s.source.router);
    const CaseRows rows{one.name, one.in, routing.view()};
    check_routers(s, rows, one.logits);
    check_golden_experts(s, golden, one, rows);
    if (&one != &cases.back()) continue;
    const std::int64_t n = std::min<std::int64_t>(one.in.rows(), 37);
    check_determinism(s, {rows_name(n), one.in.slice_rows(0, n), routing.view().slice_rows(0, n)});
  }
}

/// Generated rows. With a router matrix its own choice, else a seeded uniform one.
void verify_generated(Subjected& s, const Subject& subject) {
  const LayerConfig& config = s.layer.config;
  std::optional<std::vector<std::int64_t>> tokens;
  std::optional<std::string> spec;
  subject.fill("tokens", tokens);
  subject.fill("routing", spec);
  for (const std::int64_t M : tokens.value_or(std::vector<std::int64_t>{1, 37})) {
    const Buffer x = generated_rows(M, config.hidden, DType::f32, 11 + static_cast<std::uint64_t>(M));
    Buffer logits;
    if (s.source.router.weight.present()) {
      logits = router_logits(x.tensor, s.source.router, config.num_experts);
    } else {
      const RoutingRows wanted = make_routing(parse_routing(spec.value_or("uniform")), config, 0, M, 5);
      logits = logits_for(wanted.ids.tensor, config.num_experts, 7);
    }
    const RoutingRows routing = route_with("reference", logits.tensor, config, s.source.router);
    const CaseRows rows{rows_name(M), x.tensor, routing.view()};
    if (s.source.router.weight.present()) check_routers(s, rows, {});
    check_against_oracle(s, rows);
    if (M > 1) check_determinism(s, rows);
  }
}

}  // namespace

Exit run_verify(const VerifyArgs& args) {
  if (device_from_name(args.device).type != DeviceType::cpu)
    throw Error(StatusCode::unsupported, "[verify] no CUDA module is loaded", "verify on the CPU: --device cpu");
  const std::vector<const ExpertsEntry*> wanted = matching(args.impl);
  const Subject subject = Subject::open(args.subject);
  const std::vector<SubjectLayer> layers = subject.layers(args.layer);
  const std::optional<io::Golden> golden = open_golden(subject);
  VerifyReport report(args.json);
  const std::vector<const ExpertsEntry*> entries = runnable(wanted, report);
  {
    Progress progress("verify", static_cast<std::int64_t>(layers.size()));
    for (const SubjectLayer& layer : layers) {
      const WeightsSource source = subject.source(layer, layer.config, 1);
      Subjected s{layer, source, layer.module.empty() ? shape_string(layer.config) : layer.module, entries, report};
      if (golden)
        verify_golden(s, subject, *golden);
      else
        verify_generated(s, subject);
      progress.step(s.label);
    }
  }
  return report.finish();
}

}  // namespace moekit::cli
