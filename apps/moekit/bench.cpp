// moekit bench: which implementations, in which order; what is printed and what is refused.
#include <algorithm>

#include "bench.hpp"
#include "console.hpp"
#include "cpu/ceilings.hpp"
#include "cpu/isa.hpp"
#include "files.hpp"
#include "machine.hpp"
#include "spelling.hpp"
#include "svg.hpp"

namespace moekit::cli {
namespace {

std::vector<ExpertsEntry> all_experts(const BenchArgs& args) {
  std::vector<ExpertsEntry> out(args.extra_experts.begin(), args.extra_experts.end());
  for (const ExpertsEntry& entry : experts_implementations()) out.push_back(entry);
  return out;
}

/// Names that a glob means here and that this machine can run; talks about the others.
std::vector<std::string> names_for(const BenchArgs& args, const std::string& flag, const std::string& glob) {
  std::vector<std::string> out, known, refused;
  for (const ExpertsEntry& entry : all_experts(args)) {
    known.emplace_back(entry.name);
    if (!glob_match(glob, entry.name)) continue;
    const Verdict verdict = entry.available();
    if (verdict.ok())
      out.emplace_back(entry.name);
    else
      refused.push_back(std::string(entry.name) + ": " + verdict.reason());
  }
  for (const std::string& line : refused) talk("not here: " + line);
  if (!out.empty()) return out;
  if (!refused.empty()) throw Error(StatusCode::unsupported, "[bench] " + refused.front(), "");
  const std::string best = nearest(glob, known);
  std::string list;
  for (const std::string& name : known) list += " " + name;
  throw UsageError(flag + " " + glob + " matches nothing" + (best.empty() ? "" : "; did you mean " + best + "?") +
                   " There are:" + list);
}

BenchJob make_job(const BenchArgs& args, const Subject& subject) {
  BenchJob job{args, subject.layer(args.layer), {}, {}, parse_routing(args.routing.value_or("uniform")), nullptr,
               {},   environment_record()};
  job.config = with_schemes(job.layer.config, args.weights, args.activations);
  job.seed = args.seed.value_or(1);
  job.source = subject.source(job.layer, job.config, job.seed);
  job.executor = &executor_for(args.threads.value_or(0));
  job.tokens = args.tokens ? *args.tokens : std::vector<std::int64_t>{1, 16, 512};
  return job;
}

/// One call of a contender, packed once; empty if it does not take this layer.
Buffer result_of(const BenchJob& job, const BenchInput& input, Contender& contender) {
  Buffer y(job.config.dtype, {input.tokens, job.config.hidden});
  contender.poison();
  contender.call_us(input.view(), y.tensor);
  return y;
}

/// What the results will be held against: float64 for some rows, another implementation for all of them.
class Judge {
 public:
  Judge(const BenchJob& job, const std::vector<BenchInput>& inputs) : job_(job) {
    for (const BenchInput& input : inputs) {
      Expected expected;
      expected.rows = sampled_rows(input.tokens, job.seed + 4);
      expected.values = oracle({job.config, job.source, input.hidden.tensor, input.routing.view(), expected.rows});
      expected_.push_back(std::move(expected));
    }
  }
  /// Lets the first implementation that is not `tested` and can run compute all rows.
  void second_opinion(const std::string& tested, const std::vector<BenchInput>& inputs) {
    for (Expected& expected : expected_) expected.other = {};
    for (const ExpertsEntry& entry : experts_implementations()) {
      const std::string name(entry.name);
      if (name == tested || !entry.available().ok()) continue;
      if (name == "reference" && !small(inputs)) continue;
      try {
        BenchArgs plain = job_.args;
        plain.determinism = "fast";
        const BenchJob other{plain,         job_.layer,  job_.config, job_.source, job_.routing,
                             job_.executor, job_.tokens, {},          job_.seed};
        Contender contender(other, name, 1);
        for (std::size_t i = 0; i < inputs.size(); ++i) {
          expected_[i].other = result_of(other, inputs[i], contender);
          expected_[i].other_name = name;
        }
        return;
      } catch (const Error& error) {
        if (error.code() != StatusCode::unsupported) throw;
      }
    }
    talk("no second implementation takes this layer: " + tested + " is checked against float64 only");
  }
  const Expected& expected(std::size_t i) const { return expected_[i]; }

 private:
  /// The reference is scalar: a second or two of it, not more.
  static bool small(const std::vector<BenchInput>& inputs) {
    double flops = 0;
    for (const BenchInput& input : inputs) flops += input.work.flops;
    return flops < 4e9;
  }
  const BenchJob& job_;
  std::vector<Expected> expected_;
};

class Bench {
 public:
  Bench(const BenchArgs& args, const Subject& subject)
      : args_(args), job_(make_job(args, subject)), pins_(*job_.executor) {
    for (const std::int64_t tokens : job_.tokens) inputs_.push_back(make_input(job_, tokens));
    if (std::any_of(inputs_.begin(), inputs_.end(), [](const BenchInput& input) { return input.as_routing; }))
      talk("this layer's router cannot be made to choose that routing: ids and weights are handed in");
    const std::int64_t span = std::max<std::int64_t>(std::int64_t{256} << 20, 4 * this_machine().last_level_cache);
    read_.emplace(*job_.executor, span, read_slice());
    probes_ = calibrated();
    judge_.emplace(job_, inputs_);
  }

  Exit run() {
    std::vector<std::string> impls{""}, rivals;
    if (args_.impl) impls = names_for(args_, "--impl", *args_.impl);
    if (args_.vs) rivals = names_for(args_, "--vs", *args_.vs);
    std::string refusal;
    for (const std::string& impl : impls) {
      if (interrupted()) break;
      try {
        run_one(impl, rivals);
      } catch (const Error& error) {
        if (error.code() != StatusCode::unsupported) throw;
        refusal = error.status().to_string();
        talk("skipped " + impl + ": " + refusal);
      }
    }
    if (!args_.json) print_bench_table(job_, rows_);
    if (!args_.svg.empty()) write_file(args_.svg, bench_svg(job_, rows_));
    if (interrupted()) return Exit::interrupted;
    if (wrong_) return Exit::check_failed;
    return rows_.empty() ? Exit::unsupported : Exit::ok;
  }

 private:
  /// Twice the last-level cache, so that a sample finds nothing of the one before.
  static std::int64_t read_slice() {
    return std::max<std::int64_t>(std::int64_t{32} << 20, 2 * this_machine().last_level_cache);
  }

  /// The probes are quick; their readings are put into proportion to the careful measurement made once: the best of
  /// several read patterns, and the peak of the instructions that this scheme can use.
  Probes calibrated() {
    const Ceilings careful = cpu::ceilings(cpu::usable_isa(), job_.executor->concurrency(), cpu::Effort::accurate);
    double read = 0, fma = 0;
    for (int i = 0; i < 8; ++i) {
      read = std::max(read, read_->gbps());
      fma = std::max(fma, fma_gflops(*job_.executor));
    }
    double peak = careful.f32_gflops;
    if (job_.config.quant.a1.type == DType::i8) peak = std::max(peak, careful.int8_gops);
    if (job_.config.quant.w1.type == DType::bf16) peak = std::max(peak, careful.bf16_dot_gflops);
    return {&*read_, std::max(1.0, careful.read_gbps / read), std::max(1.0, peak / fma)};
  }

  std::int64_t copies(const std::string& impl) const {
    const Plan plan = plan_for(job_, impl);
    const WeightsSpec spec = plan.weights_spec();
    const double pack = static_cast<double>(plan.pack_format().bytes(spec)) * static_cast<double>(spec.num_local);
    double least = inputs_.front().work.bytes;
    for (const BenchInput& input : inputs_) least = std::min(least, input.work.bytes);
    return copies_needed(pack, least, most_calls(args_));
  }

  void run_one(const std::string& impl, const std::vector<std::string>& rivals) {
    judge_->second_opinion(impl.empty() ? chosen_experts(plan_for(job_, impl), job_.tokens.back()) : impl, inputs_);
    if (!right_at_once(impl)) return;
    const std::int64_t sets = copies(impl);
    Contender a(job_, impl, sets);
    if (rivals.empty()) measure_all(a, nullptr);
    for (const std::string& rival : rivals) {
      Contender b(job_, rival, std::max<std::int64_t>(1, sets / 2));
      measure_all(a, &b);
    }
  }

  /// One copy of the weights, all numbers of tokens: what is wrong is not even packed for timing.
  bool right_at_once(const std::string& impl) {
    Contender one(job_, impl, 1);
    Verification ignored;
    for (std::size_t i = 0; i < inputs_.size(); ++i)
      if (!verified(one, i, ignored)) return false;
    return true;
  }

  bool verified(Contender& contender, std::size_t i, Verification& out) {
    const Buffer y = result_of(job_, inputs_[i], contender);
    out = verify_result(y.tensor, judge_->expected(i), job_.config);
    if (out.ok) return true;
    wrong_ = true;
    talk(format("WRONG RESULT, row not printed: %s, %lld tokens of %s: %s", contender.name(inputs_[i].tokens).c_str(),
                static_cast<long long>(inputs_[i].tokens), shape_string(job_.config).c_str(), out.failure.c_str()));
    return false;
  }

  void measure_all(Contender& a, Contender* b) {
    for (std::size_t i = 0; i < inputs_.size() && !interrupted(); ++i) {
      Verification a_ok, b_ok;
      if (!verified(a, i, a_ok)) continue;
      if (b != nullptr && !verified(*b, i, b_ok)) continue;
      const Samples samples = measure(job_, inputs_[i], probes_, a, b);
      if (samples.us.size() < 3) continue;  // interrupted at once
      BenchRow row = make_row(job_, inputs_[i], samples);
      finish_row(row, a, i, a_ok);
      if (b != nullptr) row.vs = b->name(row.tokens);
      if (args_.gap_ms >= 0) row.gap = measure_gaps(job_, inputs_[i], probes_, a, row.time.median);
      add(row);
      if (b == nullptr) continue;
      BenchRow other = make_row(job_, inputs_[i], {samples.other_us, {}, samples.gbps, samples.gflops});
      finish_row(other, *b, i, b_ok);
      add(other);
    }
  }

  void finish_row(BenchRow& row, const Contender& contender, std::size_t i, const Verification& verification) const {
    row.impl = contender.name(row.tokens);
    row.verified = verification;
    row.rotated_bytes = contender.bytes();
    row.sets = contender.sets();
    row.pinned = pins_.pinned();
    row.evicted_bytes = static_cast<double>(read_slice());
    const Expected& expected = judge_->expected(i);
    row.checked_with = format("%zu rows float64", expected.rows.size());
    if (expected.other.tensor.present()) row.checked_with += ", all rows " + expected.other_name;
  }

  void add(const BenchRow& row) {
    if (args_.json) {
      print(bench_record(job_, row));
      if (row.ratio) print(bench_pair_record(job_, row));
      if (row.gap) print(bench_gap_record(job_, row));
    }
    rows_.push_back(row);
  }

  const BenchArgs& args_;
  BenchJob job_;
  PinnedThreads pins_;
  std::vector<BenchInput> inputs_;
  std::optional<ReadProbe> read_;
  Probes probes_;
  std::optional<Judge> judge_;
  std::vector<BenchRow> rows_;
  bool wrong_ = false;
};

}  // namespace

Exit run_bench(const BenchArgs& args) {
  const Subject subject = Subject::open(args.subject);
  BenchArgs all = args;
  subject.settle("bench", {{"tokens", &all.tokens},
                           {"impl", &all.impl},
                           {"vs", &all.vs},
                           {"peer", &all.peer},
                           {"device", &all.device},
                           {"routing", &all.routing},
                           {"determinism", &all.determinism},
                           {"threads", &all.threads},
                           {"seed", &all.seed}});
  if (device_from_name(all.device.value_or("cpu")).type != DeviceType::cpu)
    throw Error(StatusCode::unsupported, "[bench] no CUDA module is loaded", "time the CPU: --device cpu");
  if (all.peer)
    throw Error(StatusCode::unsupported, "[bench] no peer is built in, so not " + *all.peer, "leave --peer out");
  if (!all.svg.empty()) require_output(all.svg);
  install_interrupt_handler();
  if (all.batched) {
    if (all.vs || all.routing || all.gap_ms >= 0 || !all.svg.empty())
      throw UsageError("--batched compares equal rows: it goes without --vs, --routing, --gap-ms and --svg");
    const BenchJob job = make_job(all, subject);
    const PinnedThreads pins(*job.executor);
    return bench_batched(job);
  }
  return Bench(all, subject).run();
}

}  // namespace moekit::cli
