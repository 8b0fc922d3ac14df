// moekit verify: published results where a folder has them, float64 where it has none; then determinism.
#include <algorithm>
#include <filesystem>

#include "console.hpp"
#include "files.hpp"
#include "route.hpp"
#include "session.hpp"
#include "shapes.hpp"
#include "spelling.hpp"
#include "verbs.hpp"
#include "verify_checks.hpp"

namespace moekit::cli {
namespace {

std::vector<const ExpertsEntry*> matching(const VerifyArgs& args) {
  const std::string glob = args.impl.value_or("*");
  std::vector<const ExpertsEntry*> out;
  std::vector<std::string> names;
  for (const std::span<const ExpertsEntry> entries : {args.extra_experts, experts_implementations()})
    for (const ExpertsEntry& entry : entries) {
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

/// Those that this machine can run; the others become one n/a line each. None at all is an error: a report on what was
/// asked for would be empty, and look like a success.
std::vector<const ExpertsEntry*> runnable(const VerifyArgs& args, VerifyReport& report) {
  std::vector<const ExpertsEntry*> out;
  std::string reasons;
  for (const ExpertsEntry* entry : matching(args)) {
    const Verdict verdict = entry->available();
    if (verdict.ok()) {
      out.push_back(entry);
      continue;
    }
    report.add(Check::refuse("this machine", "experts", std::string(entry->name), verdict.reason()));
    reasons += "\n  " + std::string(entry->name) + ": " + verdict.reason();
  }
  if (out.empty())
    throw Error(StatusCode::unsupported, "[verify] nothing that --impl " + *args.impl + " names runs here:" + reasons,
                "leave --impl out to check all that do");
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
void verify_generated(Subjected& s, const VerifyArgs& args) {
  const LayerConfig& config = s.layer.config;
  const std::uint64_t seed = args.seed.value_or(1);
  for (const std::int64_t M : args.tokens.value_or(std::vector<std::int64_t>{1, 37})) {
    const Buffer x = generated_rows(M, config.hidden, DType::f32, 10 + seed + static_cast<std::uint64_t>(M));
    Buffer logits;
    if (s.source.router.weight.present()) {
      logits = router_logits(x.tensor, s.source.router, config.num_experts);
    } else {
      const RoutingRows wanted = make_routing(parse_routing(args.routing.value_or("uniform")), config, 0, M, 4 + seed);
      logits = logits_for(wanted.ids.tensor, config.num_experts, 6 + seed);
    }
    const RoutingRows routing = route_with("reference", logits.tensor, config, s.source.router);
    const CaseRows rows{rows_name(M), x.tensor, routing.view()};
    if (s.source.router.weight.present()) check_routers(s, rows, {});
    check_against_oracle(s, rows);
    if (M > 1) check_determinism(s, rows);
  }
}

void verify_bits(Subjected& s, const VerifyArgs& args) {
  std::vector<std::string> impls{""};  // the plan's choice
  if (args.impl) {
    impls.clear();
    for (const ExpertsEntry* entry : s.experts) impls.emplace_back(entry->name);
  }
  check_bits(s, impls, args.tokens.value_or(std::vector<std::int64_t>{1, 33, 512}));
}

/// The layers of one shape or checkpoint.
void verify_subject(const std::string& text, VerifyArgs args, VerifyReport& report) {
  const Subject subject = Subject::open(text);
  subject.settle("verify", {{"tokens", &args.tokens},
                            {"impl", &args.impl},
                            {"device", &args.device},
                            {"routing", &args.routing},
                            {"threads", &args.threads},
                            {"seed", &args.seed}});
  if (device_from_name(args.device.value_or("cpu")).type != DeviceType::cpu)
    throw Error(StatusCode::unsupported, "[verify] no CUDA module is loaded", "verify on the CPU: --device cpu");
  std::vector<const ExpertsEntry*> entries;
  if (!args.bits || args.impl) entries = runnable(args, report);
  const std::vector<SubjectLayer> layers = subject.layers(args.layer);
  const std::optional<io::Golden> golden = open_golden(subject);
  if (golden && args.tokens && !args.bits)
    throw UsageError("--tokens: " + text + " has recorded rows, and they are what is checked");
  Progress progress("verify", static_cast<std::int64_t>(layers.size()));
  for (const SubjectLayer& layer : layers) {
    const WeightsSource source = subject.source(layer, layer.config, args.seed.value_or(1));
    Subjected s{layer,
                source,
                layer.module.empty() ? shape_string(layer.config) : layer.module,
                entries,
                report,
                args.threads.value_or(0),
                args.extra_experts};
    if (args.bits)
      verify_bits(s, args);
    else if (golden)
      verify_golden(s, subject, *golden);
    else
      verify_generated(s, args);
    progress.step(s.label);
  }
}

/// The shapes that a file lists, one a line; what follows a shape there (M=…, routing=…) counts as its settings.
std::vector<std::string> shapes_in(const std::string& path) {
  const std::string content = read_input(path, "shape", kLargestText);
  std::vector<std::string> out;
  std::size_t number = 0;
  for (std::size_t begin = 0; begin < content.size();) {
    const std::size_t end = std::min(content.find('\n', begin), content.size());
    const std::string text = content.substr(begin, end - begin);
    begin = end + 1;
    ++number;
    if (text.substr(0, text.find('#')).find_first_not_of(" \t\r") == std::string::npos) continue;
    ShapeLine line;
    if (const Status s = parse_shape_line(text, line); !s.ok())
      throw Error(StatusCode::bad_file, format("%s:%zu: %s", path.c_str(), number, s.message().c_str()),
                  "one shape a line, such as e128k8h2048i768:bf16");
    if (line.tokens > 0) line.shape.settings.emplace("tokens", std::to_string(line.tokens));
    if (!line.routing.empty()) line.shape.settings.emplace("routing", line.routing);
    out.push_back(to_string(line.shape));
  }
  if (out.empty()) throw Error(StatusCode::bad_file, "[shape] " + path + " lists no shape", "");
  return out;
}

}  // namespace

Exit run_verify(const VerifyArgs& args) {
  std::error_code ignored;
  const bool is_list = std::filesystem::exists(args.subject, ignored) && !std::filesystem::is_directory(args.subject);
  VerifyReport report(args.json);
  for (const std::string& subject : is_list ? shapes_in(args.subject) : std::vector<std::string>{args.subject})
    verify_subject(subject, args, report);
  return report.finish();
}

}  // namespace moekit::cli
