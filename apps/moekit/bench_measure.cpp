// Timing: every sample stands beside what the machine could do at that moment.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <thread>

#include "bench.hpp"
#include "console.hpp"

namespace moekit::cli {
namespace {

constexpr std::size_t kEnough = kEnoughSamples, kFew = 5, kMost = kMostSamples;

bool finished(std::size_t samples, double elapsed, double seconds) {
  if (interrupted()) return true;
  if (samples >= kMost) return true;
  return (samples >= kEnough && elapsed >= seconds) || (samples >= kFew && elapsed >= 4 * seconds);
}

}  // namespace

Samples measure(const BenchJob& job, const BenchInput& input, const Probes& probes, Contender& a, Contender* b) {
  Samples out;
  Buffer y(job.config.dtype, {input.tokens, job.config.hidden});
  const LayerInput in = input.view();
  for (int i = 0; i < 2; ++i) {  // code and thread pool warm; the weights of the samples stay cold
    a.call_us(in, y.tensor);
    if (b != nullptr) b->call_us(in, y.tensor);
  }
  Progress progress(format("%s, %lld tokens", a.name(input.tokens).c_str(), static_cast<long long>(input.tokens)), 100);
  const double start = now_s();
  std::int64_t shown = 0;
  while (!finished(out.us.size(), now_s() - start, job.args.seconds)) {
    out.gbps.push_back(probes.read->gbps() * probes.read_factor);
    out.gflops.push_back(fma_gflops(*job.executor) * probes.peak_factor);
    out.us.push_back(a.call_us(in, y.tensor));
    if (b != nullptr) out.other_us.push_back(b->call_us(in, y.tensor));
    const double share = std::min((now_s() - start) / job.args.seconds,
                                  static_cast<double>(out.us.size()) / static_cast<double>(kEnough));
    for (; shown < static_cast<std::int64_t>(100 * std::min(share, 1.0)); ++shown)
      progress.step(format_us(out.us.back()));
  }
  return out;
}

GapResult measure_gaps(const BenchJob& job, const BenchInput& input, const Probes& probes, Contender& a,
                       double back_to_back_us) {
  GapResult out;
  out.gap_ms = job.args.gap_ms;
  out.back_to_back_us = back_to_back_us;
  Buffer y(job.config.dtype, {input.tokens, job.config.hidden});
  const auto gap = std::chrono::duration<double, std::milli>(job.args.gap_ms);
  const int threads = job.executor->concurrency();
  const std::int64_t probe_bytes =
      std::max<std::int64_t>(threads * std::int64_t{1 << 16}, static_cast<std::int64_t>(input.work.bytes));
  std::vector<double> calls, together, alone;
  Progress progress(format("every %g ms, %lld tokens", job.args.gap_ms, static_cast<long long>(input.tokens)),
                    kGapCalls);
  for (int i = 0; i < kGapCalls && !interrupted(); ++i) {
    std::this_thread::sleep_for(gap);
    calls.push_back(a.call_us(input.view(), y.tensor));
    std::this_thread::sleep_for(gap);
    together.push_back(probes.read->together_us(probe_bytes));
    std::this_thread::sleep_for(gap);
    alone.push_back(probes.read->alone_us(probe_bytes / threads));
    progress.step();
  }
  out.gapped = summarise(calls);
  out.probe = summarise(together);
  out.probe_alone = summarise(alone);
  return out;
}

BenchRow make_row(const BenchJob& job, const BenchInput& input, const Samples& samples) {
  (void)job;
  BenchRow row;
  row.tokens = input.tokens;
  row.work = input.work;
  row.experts_hit = input.work.experts_hit;
  row.time = summarise(samples.us);
  if (samples.us.empty()) return row;
  std::vector<double> floors, fractions;
  for (std::size_t i = 0; i < samples.us.size(); ++i) {
    const double memory = input.work.bytes / samples.gbps[i] * 1e-3;
    const double compute = input.work.flops / samples.gflops[i] * 1e-3;
    floors.push_back(std::max(memory, compute));
    fractions.push_back(floors.back() / samples.us[i]);
  }
  row.gbps = median(samples.gbps);
  row.gflops = median(samples.gflops);
  row.floor_us = median(floors);
  row.frac_floor = median(fractions);
  row.memory_bound = input.work.bytes / row.gbps >= input.work.flops / row.gflops;
  if (!samples.other_us.empty()) {
    const std::vector<double> paired = ratios(samples.other_us, samples.us);
    row.ratio = summarise(paired);
    row.ratio_p10 = quantile(paired, 0.1);
  }
  return row;
}

}  // namespace moekit::cli
