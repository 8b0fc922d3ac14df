// How rows of a benchmark are written down.
#include <algorithm>

#include "bench.hpp"
#include "console.hpp"
#include "json.hpp"
#include "machine.hpp"
#include "svg.hpp"

namespace moekit::cli {

std::string bench_record(const BenchJob& job, const BenchRow& row) {
  Json env = job.env;
  env.set("module", job.layer.module)
      .set("pinned", row.pinned)
      .set("weight_copies", row.sets)
      .set("rotated_bytes", row.rotated_bytes)
      .set("evicted_bytes", row.evicted_bytes)
      .set("checked_rows", row.checked_with)
      .set("seed", static_cast<std::int64_t>(job.seed));
  return Json::object()
      .set("schema", "moekit.bench/1")
      .set("shape", shape_string(job.config))
      .set("weights", weights_scheme(job.config.quant))
      .set("activations", activations_scheme(job.config.quant))
      .set("tokens", row.tokens)
      .set("impl", row.impl)
      .set("device", "cpu")
      .set("threads", job.executor->concurrency())
      .set("routing", job.routing.text)
      .set("determinism", job.args.determinism.value_or("fast"))
      .set("experts_hit", row.experts_hit)
      .set("median_us", row.time.median)
      .set("min_us", row.time.min)
      .set("p90_us", row.time.p90)
      .set("p99_us", row.time.p99)
      .set("samples", row.time.samples)
      .set("bytes", row.work.bytes)
      .set("flops", row.work.flops)
      .set("ceiling_gbps", row.gbps)
      .set("ceiling_gflops", row.gflops)
      .set("floor_us", row.floor_us)
      .set("frac_floor", row.frac_floor)
      .set("verified", row.verified.ok)
      .set("max_rel_err", row.verified.max_rel)
      .set("env", env)
      .dump();
}

std::string bench_pair_record(const BenchJob& job, const BenchRow& row) {
  return Json::object()
      .set("schema", "moekit.bench.pair/1")
      .set("shape", shape_string(job.config))
      .set("tokens", row.tokens)
      .set("a", row.impl)
      .set("b", row.vs)
      .set("b_over_a_median", row.ratio->median)
      .set("b_over_a_p10", row.ratio_p10)
      .set("b_over_a_p90", row.ratio->p90)
      .set("samples", row.ratio->samples)
      .dump();
}

std::string bench_gap_record(const BenchJob& job, const BenchRow& row) {
  const GapResult& gap = *row.gap;
  return Json::object()
      .set("schema", "moekit.bench.gap/1")
      .set("shape", shape_string(job.config))
      .set("tokens", row.tokens)
      .set("impl", row.impl)
      .set("gap_ms", gap.gap_ms)
      .set("calls", gap.gapped.samples)
      .set("p50_us", gap.gapped.median)
      .set("p99_us", gap.gapped.p99)
      .set("max_us", gap.gapped.max)
      .set("back_to_back_us", gap.back_to_back_us)
      .set("wake_us", gap.wake_us())
      .set("p99_over_median", GapResult::tail(gap.gapped))
      .set("probe_p50_us", gap.probe.median)
      .set("probe_p99_us", gap.probe.p99)
      .set("probe_p99_over_median", GapResult::tail(gap.probe))
      .set("probe_alone_p99_over_median", GapResult::tail(gap.probe_alone))
      .set("tail_over_probe", gap.tail_over_probe())
      .dump();
}

namespace {
void print_gap(const BenchRow& row) {
  const GapResult& gap = *row.gap;
  print(format("%lld tokens, %lld calls, one every %g ms: p50 %s, p99 %s, max %s; %s to wake up",
               static_cast<long long>(row.tokens), static_cast<long long>(gap.gapped.samples), gap.gap_ms,
               format_us(gap.gapped.median).c_str(), format_us(gap.gapped.p99).c_str(),
               format_us(gap.gapped.max).c_str(), format_us(std::max(0.0, gap.wake_us())).c_str()));
  print(
      format("  p99/p50 %.2f; of a plain read by all threads in turn with the calls %.2f (p50 %s, p99 %s), by one "
             "%.2f; ratio %.2f",
             GapResult::tail(gap.gapped), GapResult::tail(gap.probe), format_us(gap.probe.median).c_str(),
             format_us(gap.probe.p99).c_str(), GapResult::tail(gap.probe_alone), gap.tail_over_probe()));
}
}  // namespace

void print_bench_table(const BenchJob& job, const std::vector<BenchRow>& rows) {
  if (rows.empty()) return;
  print(format("%s, %s activations, %s routing, %d threads%s, %s\n", shape_string(job.config).c_str(),
               activations_scheme(job.config.quant).c_str(), job.routing.text.c_str(), job.executor->concurrency(),
               rows.front().pinned ? " (pinned)" : "", job.args.determinism.value_or("fast").c_str()));
  Table table({"tokens", "impl", "median", "min", "p90", "p99", "floor", "of floor", "bound by", "experts hit", "GB/s",
               "GFLOP/s", "error"});
  for (const BenchRow& row : rows)
    table.row({std::to_string(row.tokens), row.impl, format_us(row.time.median), format_us(row.time.min),
               format_us(row.time.p90), format_us(row.time.p99), format_us(row.floor_us),
               format("%.0f %%", 100 * row.frac_floor), row.memory_bound ? "memory" : "compute",
               std::to_string(row.experts_hit), format("%.1f", row.work.bytes / row.time.median * 1e-3),
               format("%.1f", row.work.flops / row.time.median * 1e-3), format("%.1e", row.verified.max_rel)});
  print(table.text());
  const BenchRow& last = rows.back();
  print(format(
      "\nceilings in this run: %.1f GB/s read, %.0f GFLOP/s; weights rotated over %s (%lld copies), %s read between "
      "calls; every row verified",
      last.gbps, last.gflops, format_bytes(last.rotated_bytes).c_str(), static_cast<long long>(last.sets),
      format_bytes(last.evicted_bytes).c_str()));
  for (const BenchRow& row : rows)
    if (row.ratio)
      print(
          format("%lld tokens: %s takes %.3f times as long as %s (median of %lld pairs; 10th to 90th percentile %.3f "
                 "to %.3f)",
                 static_cast<long long>(row.tokens), row.vs.c_str(), row.ratio->median, row.impl.c_str(),
                 static_cast<long long>(row.ratio->samples), row.ratio_p10, row.ratio->p90));
  for (const BenchRow& row : rows)
    if (row.gap) print_gap(row);
}

std::string bench_svg(const BenchJob& job, const std::vector<BenchRow>& rows) {
  std::vector<LatencySeries> series;
  for (const BenchRow& row : rows) {
    auto found = std::find_if(series.begin(), series.end(), [&](const LatencySeries& s) { return s.name == row.impl; });
    if (found == series.end()) found = series.insert(series.end(), {row.impl, {}});
    found->points.push_back({row.tokens, row.time.median, row.time.min, row.time.p90, row.floor_us});
  }
  for (LatencySeries& s : series)
    std::sort(s.points.begin(), s.points.end(),
              [](const LatencyPoint& a, const LatencyPoint& b) { return a.tokens < b.tokens; });
  return latency_svg(
      "Time of one MoE layer",
      format("%s · %s routing · %d threads · %s · band: fastest to 90th percentile", shape_string(job.config).c_str(),
             job.routing.text.c_str(), job.executor->concurrency(), this_machine().cpu_model.c_str()),
      series);
}

}  // namespace moekit::cli
