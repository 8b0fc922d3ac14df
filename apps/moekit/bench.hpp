// The parts of moekit bench: what is timed, whether it is right, how it is timed, how it is written down.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "json.hpp"
#include "oracle.hpp"
#include "probe.hpp"
#include "routing_spec.hpp"
#include "session.hpp"
#include "stats.hpp"
#include "subject.hpp"
#include "verbs.hpp"

namespace moekit::cli {

/// What every row of one run shares.
struct BenchJob {
  const BenchArgs& args;
  SubjectLayer layer;
  LayerConfig config;
  WeightsSource source;
  RoutingSpec routing;
  Executor* executor = nullptr;
  std::vector<std::int64_t> tokens;
  Json env;  ///< taken before threads are bound
  std::uint64_t seed = 1;
};
/// The plan of one implementation (empty: the plan's choice), without weights.
Plan plan_for(const BenchJob& job, const std::string& impl);
/// The experts alone: batched rows against standard ones, as many per expert, A, B, A, B.
Exit bench_batched(const BenchJob& job);

/// The same rows for every implementation.
struct BenchInput {
  std::int64_t tokens = 0;
  Buffer hidden, logits;
  RoutingRows routing;      ///< what the layer makes of the logits, or what it is given
  bool as_routing = false;  ///< the layer's router cannot be made to choose this: ids and weights are handed in
  Work work;
  LayerInput view() const;
};
BenchInput make_input(const BenchJob& job, std::int64_t tokens);

/// One implementation with its weights packed several times, so that calls find them out of cache.
class Contender {
 public:
  /// @param impl   forced name; empty = the plan's choice
  /// @param sets   packed copies
  Contender(const BenchJob& job, std::string impl, std::int64_t sets);
  std::string name(std::int64_t tokens) const;  ///< implementation that runs
  /// One call on the next copy; microseconds.
  double call_us(const LayerInput& in, const Tensor& y);
  void poison();
  std::int64_t sets() const { return static_cast<std::int64_t>(layers_.size()); }
  double bytes() const;  ///< of all copies
  const Plan& plan() const { return layers_.front().plan(); }

 private:
  std::string impl_;
  Executor* executor_;
  std::vector<Layer> layers_;
  std::unique_ptr<Workspace> workspace_;
  std::size_t next_ = 0;
};
/// How many copies of one pack of `pack_bytes`, of which a call reads `hit_bytes`: ≥ max(1 GiB, 4 × last-level cache)
/// altogether and 4 × last-level cache of those that are read, as far as half of the available memory goes.
/// More than `most_calls` would never be read twice.
std::int64_t copies_needed(double pack_bytes, double hit_bytes, std::int64_t most_calls);
/// Most calls of one row: those that are timed, of which none comes within a millisecond of the next (a probe reads the
/// cache twice over in between), those with gaps, and a few to warm up.
std::int64_t most_calls(const BenchArgs& args);

/// What a result is held against; made once per number of tokens.
struct Expected {
  std::vector<std::int64_t> rows;  ///< 32 seeded ones, the first, the last
  OracleResult values;
  Buffer other;  ///< all rows by another implementation; empty if there is none
  std::string other_name;
};
struct Verification {
  bool ok = false;
  double max_rel = 0;
  std::string failure;
};
/// Sampled rows against float64, every element finite, every row against another implementation.
Verification verify_result(const Tensor& y, const Expected& expected, const LayerConfig& config);

/// A row has enough samples, never more than the most; --gap-ms makes this many calls.
inline constexpr std::int64_t kEnoughSamples = 20, kMostSamples = 3000, kGapCalls = 400;

/// Samples of one row. All vectors have one entry per sample.
struct Samples {
  std::vector<double> us, other_us;  ///< other: the B of an A/B pair
  std::vector<double> gbps, gflops;
};
/// Ceilings that go with a sample: the probes' readings times what the careful measurement says they leave out.
struct Probes {
  ReadProbe* read = nullptr;
  double read_factor = 1, peak_factor = 1;
};
Samples measure(const BenchJob& job, const BenchInput& input, const Probes& probes, Contender& a, Contender* b);

/// Calls with sleep between them, in turn with plain reads of as many bytes: by all threads, and by one thread its
/// share.
struct GapResult {
  double gap_ms = 0;
  Summary gapped, probe, probe_alone;
  double back_to_back_us = 0;
  static double tail(const Summary& of) { return of.median > 0 ? of.p99 / of.median : 0; }  ///< p99 / p50
  double wake_us() const { return gapped.median - back_to_back_us; }
  /// How much longer the layer's tail is than the machine's: its p99 / p50 over that of the read by all threads.
  double tail_over_probe() const { return tail(probe) > 0 ? tail(gapped) / tail(probe) : 0; }
};
GapResult measure_gaps(const BenchJob& job, const BenchInput& input, const Probes& probes, Contender& a,
                       double back_to_back_us);

/// One finished row.
struct BenchRow {
  std::string impl, vs;
  std::int64_t tokens = 0, experts_hit = 0;
  Work work;
  Summary time;
  double gbps = 0, gflops = 0, floor_us = 0, frac_floor = 0;
  bool memory_bound = true;
  Verification verified;
  double rotated_bytes = 0, evicted_bytes = 0;  ///< packed copies; what the probe reads between two calls
  std::int64_t sets = 0;
  bool pinned = false;
  std::string checked_with;
  std::optional<Summary> ratio;  ///< time of `vs` over this one's, paired
  double ratio_p10 = 0;
  std::optional<GapResult> gap;
};
BenchRow make_row(const BenchJob& job, const BenchInput& input, const Samples& samples);
std::string bench_record(const BenchJob& job, const BenchRow& row);       ///< moekit.bench/1
std::string bench_pair_record(const BenchJob& job, const BenchRow& row);  ///< moekit.bench.pair/1
std::string bench_gap_record(const BenchJob& job, const BenchRow& row);   ///< moekit.bench.gap/1
void print_bench_table(const BenchJob& job, const std::vector<BenchRow>& rows);
std::string bench_svg(const BenchJob& job, const std::vector<BenchRow>& rows);

}  // namespace moekit::cli
