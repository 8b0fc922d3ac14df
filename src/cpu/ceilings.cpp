#include "cpu/ceilings.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <mutex>
#include <vector>

#include <moekit/stream.hpp>

#include "cpu/arena.hpp"

namespace moekit::cpu {
namespace {

double seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

/// Best rate of `repeats` runs in which every thread does body(thread) = `work` units.
template <class Body>
double best_rate(int threads, int repeats, double work, const Body& body) {
  Executor& executor = cpu_executor(threads);
  auto call = [](void* arg, std::int64_t i) { (*static_cast<const Body*>(arg))(i); };
  executor.run(threads, call, const_cast<Body*>(&body));  // threads awake, clocks up
  double best = 0;
  for (int repeat = 0; repeat < repeats; ++repeat) {
    const double start = seconds();
    executor.run(threads, call, const_cast<Body*>(&body));
    best = std::max(best, work * threads / (seconds() - start));
  }
  return best * 1e-9;
}

// ---- reading ---------------------------------------------------------------------------------------------------

typedef std::uint64_t Words __attribute__((vector_size(16)));
std::atomic<std::uint64_t> sink;  // what was read: without a use the compiler would read nothing

/// `Streams` pointers that advance together over their parts of the slab; Ahead bytes of prefetch, 0 = none.
template <int Streams, int Ahead>
void read_slab(const std::byte* data, std::size_t bytes) {
  Words sum[4] = {};
  const std::size_t part = bytes / Streams / 64 * 64;
  for (std::size_t at = 0; at < part; at += 64)
    for (int s = 0; s < Streams; ++s) {
      const std::byte* line = data + static_cast<std::size_t>(s) * part + at;
      if constexpr (Ahead > 0) __builtin_prefetch(line + Ahead, 0, 3);
      for (int i = 0; i < 4; ++i) sum[i] |= reinterpret_cast<const Words*>(line)[i];
    }
  sum[0] |= sum[1] | sum[2] | sum[3];
  sink.store(sum[0][0] | sum[0][1], std::memory_order_relaxed);
}

constexpr void (*kPatterns[kReadPatterns])(const std::byte*, std::size_t) = {read_slab<1, 0>, read_slab<4, 0>,
                                                                             read_slab<1, 1024>, read_slab<2, 2048>};

std::size_t slab_bytes(int threads, std::size_t bytes) {
  return bytes / static_cast<std::size_t>(threads) / 4096 * 4096;
}

}  // namespace

double probe_read_gbps(int threads, const std::byte* data, std::size_t bytes, int pattern) {
  const std::size_t slab = slab_bytes(threads, bytes);
  auto read = [&](std::int64_t i) { kPatterns[pattern](data + static_cast<std::size_t>(i) * slab, slab); };
  const double start = seconds();
  cpu_executor(threads).run(
      threads, [](void* arg, std::int64_t i) { (*static_cast<decltype(read)*>(arg))(i); }, &read);
  return static_cast<double>(slab) * threads / (seconds() - start) * 1e-9;
}

double measure_read_gbps(int threads, std::size_t bytes) {
  const std::size_t slab = std::max<std::size_t>(slab_bytes(threads, bytes), 1 << 20);
  Arena arena(slab * static_cast<std::size_t>(threads));
  auto touch = [&](std::int64_t i) {
    std::byte* begin = arena.data() + static_cast<std::size_t>(i) * slab;
    for (std::size_t at = 0; at < slab; at += 4096) begin[at] = std::byte{1};
  };
  best_rate(threads, 0, 0, touch);  // pages are zeroed here
  double best = 0;
  for (int repeat = 0; repeat < 2; ++repeat)
    for (int pattern = 0; pattern < kReadPatterns; ++pattern)
      best = std::max(best, probe_read_gbps(threads, arena.data(), arena.size(), pattern));
  return best;
}

// ---- multiplying: register-only loops in assembly (compilers spill arrays of accumulators) -------------------------

namespace {

constexpr std::int64_t kLoops = 100000;
constexpr int kRepeats = 12;

#if defined(__x86_64__)

// n times twelve independent chains over 4, 8 or 16 lanes; registers 12–15 hold the operands
#define MOEKIT_TWELVE(f) f(0) f(1) f(2) f(3) f(4) f(5) f(6) f(7) f(8) f(9) f(10) f(11)
#define MOEKIT_ALL(f) MOEKIT_TWELVE(f) f(12) f(13) f(14) f(15)
#define MOEKIT_LOOP(clear, step, after)                                                                              \
  {                                                                                                                  \
    long n = kLoops;                                                                                                 \
    asm volatile(MOEKIT_ALL(clear) "1:\n" MOEKIT_TWELVE(step) "dec %0\njnz 1b\n" after                               \
                 : "+r"(n)                                                                                           \
                 :                                                                                                   \
                 : "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", \
                   "xmm12", "xmm13", "xmm14", "xmm15", "cc");                                                        \
  }
#define MOEKIT_CLEAR_X(i) "xorps %%xmm" #i ",%%xmm" #i "\n"
#define MOEKIT_CLEAR_Y(i) "vxorps %%ymm" #i ",%%ymm" #i ",%%ymm" #i "\n"
#define MOEKIT_CLEAR_Z(i) "vpxorq %%zmm" #i ",%%zmm" #i ",%%zmm" #i "\n"
#define MOEKIT_MULADD_X(i) "movaps %%xmm12,%%xmm13\nmulps %%xmm14,%%xmm13\naddps %%xmm13,%%xmm" #i "\n"
#define MOEKIT_FMA_Y(i) "vfmadd231ps %%ymm14,%%ymm15,%%ymm" #i "\n"
#define MOEKIT_FMA_Z(i) "vfmadd231ps %%zmm14,%%zmm15,%%zmm" #i "\n"
#define MOEKIT_DOT_Z(i) "vdpbf16ps %%zmm14,%%zmm15,%%zmm" #i "\n"
#define MOEKIT_VNNI_Z(i) "vpdpbusd %%zmm14,%%zmm15,%%zmm" #i "\n"
#define MOEKIT_MADD_X(i) "movdqa %%xmm12,%%xmm13\npmaddwd %%xmm14,%%xmm13\npaddd %%xmm13,%%xmm" #i "\n"
#define MOEKIT_MADD_Y(i) "vpmaddwd %%ymm14,%%ymm15,%%ymm13\nvpaddd %%ymm13,%%ymm" #i ",%%ymm" #i "\n"

void f32_xmm(std::int64_t) MOEKIT_LOOP(MOEKIT_CLEAR_X, MOEKIT_MULADD_X, "") void f32_ymm(std::int64_t)
    MOEKIT_LOOP(MOEKIT_CLEAR_Y, MOEKIT_FMA_Y, "vzeroupper\n") void f32_zmm(std::int64_t)
        MOEKIT_LOOP(MOEKIT_CLEAR_Z, MOEKIT_FMA_Z, "vzeroupper\n") void dot_zmm(std::int64_t)
            MOEKIT_LOOP(MOEKIT_CLEAR_Z, MOEKIT_DOT_Z, "vzeroupper\n") void int8_xmm(std::int64_t)
                MOEKIT_LOOP(MOEKIT_CLEAR_X, MOEKIT_MADD_X, "") void int8_ymm(std::int64_t)
                    MOEKIT_LOOP(MOEKIT_CLEAR_Y, MOEKIT_MADD_Y, "vzeroupper\n") void int8_zmm(std::int64_t)
                        MOEKIT_LOOP(MOEKIT_CLEAR_Z, MOEKIT_VNNI_Z, "vzeroupper\n")

                            double rate(int threads, void (*loop)(std::int64_t), double ops_per_step) {
  return best_rate(threads, kRepeats, 12.0 * kLoops * ops_per_step, [loop](std::int64_t i) { loop(i); });
}

#else

/// No assembly for this architecture: chains of vectors that the compiler keeps in registers.
void f32_generic(std::int64_t) {
  typedef float F __attribute__((vector_size(16)));
  F sum[8] = {}, x = {1, 1, 1, 1}, w = {0, 0, 0, 0};
  asm volatile("" : "+w"(x), "+w"(w));
  for (std::int64_t n = 0; n < kLoops; ++n)
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) sum[i] += x * w;
  for (int i = 1; i < 8; ++i) sum[0] += sum[i];
  sink.store(static_cast<std::uint64_t>(sum[0][0]), std::memory_order_relaxed);
}

#endif

struct Measured {
  Isa unit;
  int threads;
  Effort effort;
  Ceilings values;
};
std::mutex measured_lock;
std::vector<Measured>& measured() {
  static auto* const all = new std::vector<Measured>;
  return *all;
}
const Measured* find(Isa unit, int threads, Effort effort) {
  for (const Measured& m : measured())
    if (m.unit == unit && m.threads == threads && m.effort == effort) return &m;
  return nullptr;
}

}  // namespace

double measure_f32_gflops([[maybe_unused]] Isa unit, int threads) {
#if defined(__x86_64__)
  if (unit == Isa::portable) return rate(threads, f32_xmm, 8);
  return unit == Isa::avx2 ? rate(threads, f32_ymm, 16) : rate(threads, f32_zmm, 32);
#else
  return best_rate(threads, kRepeats, 8.0 * kLoops * 8, f32_generic);
#endif
}

double measure_bf16_dot_gflops([[maybe_unused]] int threads) {
#if defined(__x86_64__)
  if (can_run(Isa::avx512_bf16).ok()) return rate(threads, dot_zmm, 64);
#endif
  return 0;
}

double measure_int8_gops([[maybe_unused]] Isa unit, int threads) {
#if defined(__x86_64__)
  if (unit == Isa::portable) return rate(threads, int8_xmm, 16);
  return unit == Isa::avx2 ? rate(threads, int8_ymm, 32) : rate(threads, int8_zmm, 128);
#else
  return measure_f32_gflops(unit, threads);
#endif
}

Ceilings ceilings(Isa unit, int threads, Effort effort) {
  const std::lock_guard<std::mutex> guard(measured_lock);
  if (const Measured* known = find(unit, threads, effort)) return known->values;
  const std::int64_t l3 = caches().l3;
  const std::int64_t bytes = effort == Effort::quick ? 64 << 20 : std::max<std::int64_t>(256 << 20, 4 * l3);
  Ceilings out;
  out.threads = threads;
  out.read_gbps = measure_read_gbps(threads, static_cast<std::size_t>(bytes));
  if (effort == Effort::accurate && l3 > 0) out.l3_gbps = measure_read_gbps(threads, static_cast<std::size_t>(l3 / 4));
  out.f32_gflops = measure_f32_gflops(unit, threads);
  out.bf16_dot_gflops = measure_bf16_dot_gflops(threads);
  out.int8_gops = measure_int8_gops(unit, threads);
  measured().push_back({unit, threads, effort, out});
  return out;
}

Ceilings known_ceilings(Isa unit, int threads) {
  const std::lock_guard<std::mutex> guard(measured_lock);
  for (Effort effort : {Effort::accurate, Effort::quick})
    if (const Measured* known = find(unit, threads, effort)) return known->values;
  return {};
}

}  // namespace moekit::cpu
