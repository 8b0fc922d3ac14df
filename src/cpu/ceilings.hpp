// Limits of this machine, measured: what estimates, explain and bench stand beside.
#pragma once
#include <moekit/kit/problem.hpp>

#include "cpu/isa.hpp"

namespace moekit::cpu {

/// quick: ≤ 30 ms, for plans. accurate: reads ≥ 4 times the last-level cache, for benchmarks.
enum class Effort : std::uint8_t { quick, accurate };

/// Measured once per process for each (unit, threads, effort), on the pool of that many threads; later calls return the
/// same record. `unit` must be one that can_run().
Ceilings ceilings(Isa unit, int threads, Effort effort = Effort::quick);
/// What has been measured so far; zeros if nothing has.
Ceilings known_ceilings(Isa unit, int threads);

/// One fresh measurement each. Bandwidth is the best of several read patterns over `bytes` bytes in huge pages.
double measure_read_gbps(int threads, std::size_t bytes);
/// One pass over memory of yours, cut into a slab per thread: what a sample of a benchmark is paired with.
inline constexpr int kReadPatterns = 4;
double probe_read_gbps(int threads, const std::byte* data, std::size_t bytes, int pattern);
double measure_f32_gflops(Isa unit, int threads);
double measure_bf16_dot_gflops(int threads);  ///< 0 where there is no such instruction
double measure_int8_gops(Isa unit, int threads);

}  // namespace moekit::cpu
