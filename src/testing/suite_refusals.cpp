// Questions that are answered with no and a reason, calls that are refused and leave everything as it was, and
// workspace sizes that only grow.
#include <algorithm>

#include "testing/suite.hpp"
#include "text.hpp"

namespace moekit::suite {
namespace {

std::string reasons(const ExpertsEntry& entry, const SuiteCase& c) {
  const Subject subject(entry, c, 4);
  std::vector<Problem> questions(6, subject.problem());
  questions[0].format =
      format_of(entry) == ActivationFormat::standard ? ActivationFormat::batched_experts : ActivationFormat::standard;
  questions[1].weights.w1.type = questions[1].quant.w1.type = DType::nvfp4;
  questions[2].weights.w2.zero_point = questions[2].quant.w2.zero_point = true;
  questions[3].hidden_dtype = DType::i8;
  questions[4].weights.gated = !questions[4].weights.gated;
  questions[5].device = {subject.problem().device.type == DeviceType::cpu ? DeviceType::cuda : DeviceType::cpu, 0};
  for (std::size_t i = 0; i < questions.size(); ++i) {
    const Verdict verdict = subject.experts().supports(questions[i]);
    if (!verdict.ok() && verdict.reason().empty()) return text::concat("refuses question ", i, " without a reason");
    if (verdict.ok() && i != 1 && i != 2 && i != 5)
      return text::concat("says yes to question ", i, ", which is nonsense");
  }
  return {};
}

std::string workspace_grows(const ExpertsEntry& entry, const SuiteCase& c) {
  const Subject subject(entry, c, 4);
  Problem p = subject.problem();
  ExpertsWorkspace before;
  for (std::int64_t M : {0, 1, 2, 3, 7, 8, 15, 16, 17, 33, 64, 127, 128, 1000, 4096}) {
    p.size.M = M;
    const ExpertsWorkspace now = subject.experts().workspace(p);
    if (now.w13_bytes < before.w13_bytes || now.w2_bytes < before.w2_bytes)
      return text::concat("needs less for M = ", M, " than for a smaller M");
    const std::int64_t rows = now.output.rank > 0 ? now.output.shape[now.output.rank - 2] : -1;
    const WeightAndReduce::Kind kind = subject.experts().weight_and_reduce().kind;
    const std::int64_t expected = kind == WeightAndReduce::Kind::contiguous ? M * c.k : M;
    if (now.output.rank < 2 || now.output.shape[now.output.rank - 1] != c.K() || rows != expected)
      return text::concat("announces an output of ", shape_string(now.output.on(nullptr, {})), " for M = ", M);
    before = now;
  }
  for (std::int64_t k = c.k; k > 0; --k) {
    p.size.k = k;
    const ExpertsWorkspace now = subject.experts().workspace(p);
    if (now.w13_bytes > before.w13_bytes || now.w2_bytes > before.w2_bytes)
      return text::concat("needs more for k = ", k, " than for a larger k");
    before = now;
  }
  return {};
}

/// A call that must fail: its output keeps every byte.
class BadCall {
 public:
  BadCall(const ExpertsEntry& entry, const SuiteCase& c)
      : call_(c, format_of(entry), Subject(entry, c, 1).wants_quantised_rows()), subject_(entry, c, call_.capacity()) {
    const ExpertsWorkspace needed = subject_.experts().workspace(subject_.problem());
    w13_ = Guarded(needed.w13_bytes, std::byte{0xff});
    w2_ = Guarded(needed.w2_bytes, std::byte{0xff});
    output_ = Guarded(needed.output.bytes(), std::byte{0xff});
    args = call_.args();
    args.weights = c.weights->view(subject_.experts().preferred_format(subject_.problem().weights), c.num_local);
    args.output = needed.output.on(output_.data(), {});
    args.workspace13 = w13_.bytes();
    args.workspace2 = w2_.bytes();
  }
  /// Empty if the call is refused as it should be.
  std::string run(const char* what) const {
    ExpertsResult result;
    const Status status = subject_.experts().apply(args, result);
    if (status.ok()) return text::concat("accepts ", what);
    if (status.message().empty()) return text::concat("refuses ", what, " without a message");
    const bool untouched =
        std::all_of(output_.data(), output_.data() + output_.size(), [](std::byte b) { return b == std::byte{0xff}; });
    return untouched ? "" : text::concat("refuses ", what, ", but wrote output first");
  }
  ExpertsArgs args;

 private:
  PreparedCall call_;
  Subject subject_;
  Guarded w13_, w2_, output_;
};

std::string bad_calls(const ExpertsEntry& entry, const SuiteCase& c) {
  if (c.M == 0) return {};
  const BadCall good(entry, c);
  std::string problems;
  auto expect_refusal = [&](const char* what, const std::function<void(ExpertsArgs&)>& change) {
    BadCall bad(entry, c);
    change(bad.args);
    const std::string problem = bad.run(what);
    if (!problem.empty()) problems += (problems.empty() ? "" : "; ") + problem;
  };
  if (good.args.workspace13.size > 0)
    expect_refusal("a workspace13 that is too small", [](ExpertsArgs& a) { a.workspace13.size -= 1; });
  if (good.args.workspace2.size > 0)
    expect_refusal("a workspace2 that is too small", [](ExpertsArgs& a) { a.workspace2.size -= 1; });
  const int last = good.args.activations.data.rank - 1;
  expect_refusal("activations of another K", [&](ExpertsArgs& a) { a.activations.data.shape[last] += 1; });
  expect_refusal("i64 ids", [](ExpertsArgs& a) { a.routing.ids.dtype = DType::i64; });
  expect_refusal("an output of another shape", [](ExpertsArgs& a) { a.output.shape[a.output.rank - 1] += 1; });
  if (last == 1) expect_refusal("ids for fewer rows", [](ExpertsArgs& a) { a.routing.ids.shape[0] -= 1; });
  if (last == 2) expect_refusal("batched rows without counts", [](ExpertsArgs& a) { a.tokens = nullptr; });
  if (good.args.activations.scale.present())
    expect_refusal("codes without scales", [](ExpertsArgs& a) { a.activations.scale = {}; });
  return problems;
}

}  // namespace

void check_refusals(Suite& suite, const SuiteCase& base) {
  suite.for_each(base, "refusals_have_reasons", reasons);
  suite.for_each(base, "workspace_is_monotone", workspace_grows);
  suite.for_each(base, "calls_that_do_not_fit_are_refused", bad_calls);
}

}  // namespace moekit::suite
