#include "probe.hpp"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstring>

#include "console.hpp"
#include "cpu/isa.hpp"

namespace moekit::cli {
namespace {

typedef float Vec8 __attribute__((vector_size(32)));
typedef std::uint64_t Int4 __attribute__((vector_size(32)));

/// Two streams, so that both hardware prefetchers of a core have work.
inline __attribute__((always_inline)) std::uint64_t sum_body(const std::byte* data, std::int64_t bytes) {
  const std::int64_t half = bytes / 2 / 128 * 128;
  Int4 a{}, b{}, c{}, d{}, e{}, f{}, g{}, h{};
  const auto* p = reinterpret_cast<const Int4*>(data);
  const auto* q = reinterpret_cast<const Int4*>(data + half);
  for (std::int64_t i = 0; i < half / 32; i += 4) {
    a += p[i];
    b += p[i + 1];
    c += p[i + 2];
    d += p[i + 3];
    e += q[i];
    f += q[i + 1];
    g += q[i + 2];
    h += q[i + 3];
  }
  const Int4 all = ((a + b) + (c + d)) + ((e + f) + (g + h));
  return all[0] + all[1] + all[2] + all[3];
}

/// 12 independent chains of 8 lanes: enough for two units of latency 4 or 5.
constexpr std::int64_t kFmaSteps = 150000;
constexpr double kFmaFlops = 12.0 * 8 * 2 * kFmaSteps;
inline __attribute__((always_inline)) float fma_body(float seed) {
  Vec8 acc[12];
  for (int i = 0; i < 12; ++i) acc[i] = Vec8{} + (seed + static_cast<float>(i));
  const Vec8 m = Vec8{} + 0.999f, n = Vec8{} + 0.001f;
  for (std::int64_t s = 0; s < kFmaSteps; ++s)
    for (int i = 0; i < 12; ++i) acc[i] = acc[i] * m + n;
  Vec8 total{};
  for (int i = 0; i < 12; ++i) total += acc[i];
  return total[0] + total[7];
}

std::uint64_t sum_portable(const std::byte* data, std::int64_t bytes) { return sum_body(data, bytes); }
float fma_portable(float seed) { return fma_body(seed); }
#if defined(__x86_64__)
__attribute__((target("avx2,fma"))) std::uint64_t sum_avx2(const std::byte* data, std::int64_t bytes) {
  return sum_body(data, bytes);
}
__attribute__((target("avx2,fma"), optimize("fp-contract=fast"))) float fma_avx2(float seed) { return fma_body(seed); }
#endif

bool has_avx2() { return cpu::usable_isa() >= cpu::Isa::avx2; }

std::uint64_t sum(const std::byte* data, std::int64_t bytes) {
#if defined(__x86_64__)
  if (has_avx2()) return sum_avx2(data, bytes);
#endif
  return sum_portable(data, bytes);
}
float fma(float seed) {
#if defined(__x86_64__)
  if (has_avx2()) return fma_avx2(seed);
#endif
  return fma_portable(seed);
}

std::atomic<std::uint64_t> g_sink{0};

struct ReadJob {
  const std::byte* data;
  std::int64_t part;
};

}  // namespace

ReadProbe::ReadProbe(Executor& executor, std::int64_t span_bytes, std::int64_t slice_bytes)
    : executor_(executor), memory_(static_cast<std::size_t>(span_bytes)), slice_(slice_bytes) {
  std::memset(memory_.data(), 1, memory_.size());  // pages of zero would all be one page
}

const std::byte* ReadProbe::next(std::int64_t bytes) {
  if (at_ + bytes > static_cast<std::int64_t>(memory_.size())) at_ = 0;
  const std::byte* out = memory_.data() + at_;
  at_ += bytes;
  return out;
}

double ReadProbe::gbps() {
  const int threads = executor_.concurrency();
  const auto read = static_cast<double>(slice_ / threads / 4096 * 4096 * threads);
  return read / together_us(slice_) * 1e-3;
}

double ReadProbe::together_us(std::int64_t bytes) {
  const int threads = executor_.concurrency();
  bytes = std::min(bytes, static_cast<std::int64_t>(memory_.size()));
  ReadJob job{next(bytes), bytes / threads / 4096 * 4096};
  const double start = now_s();
  executor_.run(
      threads,
      [](void* arg, std::int64_t i) {
        const auto* mine = static_cast<const ReadJob*>(arg);
        g_sink.fetch_add(sum(mine->data + i * mine->part, mine->part), std::memory_order_relaxed);
      },
      &job);
  return (now_s() - start) * 1e6;
}

double ReadProbe::alone_us(std::int64_t bytes) {
  bytes = std::min(bytes, static_cast<std::int64_t>(memory_.size())) / 4096 * 4096;
  const std::byte* data = next(bytes);
  const double start = now_s();
  g_sink.fetch_add(sum(data, bytes), std::memory_order_relaxed);
  return (now_s() - start) * 1e6;
}

double fma_gflops(Executor& executor) {
  const int threads = executor.concurrency();
  const double start = now_s();
  executor.run(
      threads,
      [](void*, std::int64_t i) {
        g_sink.fetch_add(static_cast<std::uint64_t>(fma(static_cast<float>(i))), std::memory_order_relaxed);
      },
      nullptr);
  return kFmaFlops * threads / (now_s() - start) * 1e-9;
}

// ---- pinning -----------------------------------------------------------------------------------------------------

namespace {

struct PinJob {
  std::atomic<int> arrived{0};
  std::atomic<bool> give_up{false};
  int threads = 0;
  cpu_set_t allowed{};
};

int nth_cpu(const cpu_set_t& set, int n) {
  for (int c = 0; c < CPU_SETSIZE; ++c)
    if (CPU_ISSET(c, &set) && n-- == 0) return c;
  return -1;
}

/// Waits until every thread is in here, so that no thread is bound twice; gives up after 100 ms (an executor may
/// legally run everything on one thread).
void pin_this_thread(void* arg, std::int64_t) {
  auto& job = *static_cast<PinJob*>(arg);
  const int mine = job.arrived.fetch_add(1);
  const double until = now_s() + 0.1;
  while (job.arrived.load() < job.threads && !job.give_up.load()) {
    if (now_s() > until) job.give_up.store(true);
    sched_yield();
  }
  if (job.give_up.load()) return;
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(nth_cpu(job.allowed, mine), &one);
  if (sched_setaffinity(0, sizeof one, &one) != 0) job.give_up.store(true);
}

}  // namespace

PinnedThreads::PinnedThreads(Executor& executor) : before_(sizeof(cpu_set_t) / sizeof(std::uint64_t)) {
  PinJob job;
  job.threads = executor.concurrency();
  if (sched_getaffinity(0, sizeof job.allowed, &job.allowed) != 0) return;
  std::memcpy(before_.data(), &job.allowed, sizeof job.allowed);
  if (CPU_COUNT(&job.allowed) < job.threads) return;
  executor.run(job.threads, pin_this_thread, &job);
  pinned_ = !job.give_up.load();
}

PinnedThreads::~PinnedThreads() {
  cpu_set_t set;
  std::memcpy(&set, before_.data(), sizeof set);
  if (CPU_COUNT(&set) > 0) sched_setaffinity(0, sizeof set, &set);
}

}  // namespace moekit::cli
