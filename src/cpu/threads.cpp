#include "cpu/threads.hpp"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <chrono>
#include <climits>
#include <cstdio>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <string_view>
#include <vector>

#include "text.hpp"

namespace moekit {
namespace cpu {
namespace {

using Word = std::atomic<std::uint32_t>;
static_assert(sizeof(Word) == 4 && Word::is_always_lock_free);

void futex_wait(Word& word, std::uint32_t expected) {
  syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), FUTEX_WAIT_PRIVATE, expected, nullptr, nullptr, 0);
}
void futex_wake(Word& word, int count) {
  syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), FUTEX_WAKE_PRIVATE, count, nullptr, nullptr, 0);
}

void pause_cpu() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

/// Spins until done() or `microseconds` have passed; the clock is read once in 32 looks.
template <class Done>
bool spin(int microseconds, const Done& done) {
  using Clock = std::chrono::steady_clock;
  if (done()) return true;
  if (microseconds <= 0) return false;
  const auto end = Clock::now() + std::chrono::microseconds(microseconds);
  do {
    for (int look = 0; look < 32; ++look) {
      if (done()) return true;
      pause_cpu();
    }
  } while (Clock::now() < end);
  return done();
}

/// A lock that a forked child can reset: its owner may not exist there.
class FutexLock {
 public:
  void lock() {
    std::uint32_t seen = 0;
    if (word_.compare_exchange_strong(seen, 1, std::memory_order_acquire)) return;
    while (word_.exchange(2, std::memory_order_acquire) != 0) futex_wait(word_, 2);
  }
  void unlock() {
    if (word_.exchange(0, std::memory_order_release) == 2) futex_wake(word_, 1);
  }
  void reset() { word_.store(0, std::memory_order_relaxed); }

 private:
  Word word_{0};  // 0 free, 1 held, 2 held and somebody sleeps
};

/// True while this thread runs a body: a nested call runs on the calling thread instead of waiting for itself.
thread_local bool inside_body = false;

constexpr int kSpinMicroseconds = 75;

class Pool final : public Executor {
 public:
  explicit Pool(int threads) : threads_(threads), slots_(new Slot[static_cast<std::size_t>(threads)]) {}

  int concurrency() const override { return threads_; }
  void run(std::int64_t count, void (*body)(void*, std::int64_t), void* arg) override;
  /// In a forked child: the workers are gone, locks may be held by nobody. They start again with the next call.
  void forget_workers();

 private:
  struct alignas(64) Slot {
    Word ticket{0};  // the job this worker was last given
    Word asleep{0};
    pthread_t thread{};
    int cpu = -1;  // pinned to, -1 = not pinned
    Pool* pool = nullptr;
  };
  void start();
  void pin(Slot& slot, int to);
  void stay_off_callers_cpu();
  void post(int workers);
  void work(int index);
  void wait_for_workers();
  static void* worker_main(void* slot);
  void worker_loop(Slot& slot, int index);

  const int threads_;
  std::unique_ptr<Slot[]> slots_;  // slot 0 is the caller's and unused
  FutexLock lock_;
  bool started_ = false;
  int live_ = 1;  // the caller and the workers that could be started
  int spin_us_ = kSpinMicroseconds;
  std::vector<int> cpus_;  // what workers may be pinned to; empty = no pinning
  std::uint32_t job_ = 0;

  // the job in flight: written by the caller before the tickets
  void (*body_)(void*, std::int64_t) = nullptr;
  void* arg_ = nullptr;
  std::int64_t count_ = 0;
  bool one_each_ = true;
  alignas(64) std::atomic<std::int64_t> next_{0};
  alignas(64) Word remaining_{0};  // workers that have not finished
  Word caller_asleep_{0};
};

void Pool::run(std::int64_t count, void (*body)(void*, std::int64_t), void* arg) {
  if (count <= 0) return;
  if (count == 1 || threads_ == 1 || inside_body) {
    for (std::int64_t i = 0; i < count; ++i) body(arg, i);
    return;
  }
  lock_.lock();
  if (!started_) start();
  stay_off_callers_cpu();
  body_ = body;
  arg_ = arg;
  count_ = count;
  one_each_ = count <= live_;
  next_.store(0, std::memory_order_relaxed);
  const int workers = static_cast<int>(std::min<std::int64_t>(count, live_)) - 1;
  remaining_.store(static_cast<std::uint32_t>(workers), std::memory_order_relaxed);
  post(workers);
  work(0);
  wait_for_workers();
  lock_.unlock();
}

void Pool::post(int workers) {
  ++job_;
  for (int w = 1; w <= workers; ++w) {
    Slot& slot = slots_[static_cast<std::size_t>(w)];
    slot.ticket.store(job_, std::memory_order_seq_cst);
    if (slot.asleep.load(std::memory_order_seq_cst)) futex_wake(slot.ticket, 1);
  }
}

void Pool::work(int index) {
  inside_body = true;
  if (one_each_) {
    body_(arg_, index);
  } else {
    for (std::int64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < count_;) body_(arg_, i);
  }
  inside_body = false;
}

void Pool::wait_for_workers() {
  auto done = [&] { return remaining_.load(std::memory_order_acquire) == 0; };
  if (spin(spin_us_, done)) return;
  caller_asleep_.store(1, std::memory_order_seq_cst);
  for (std::uint32_t left; (left = remaining_.load(std::memory_order_seq_cst)) != 0;) futex_wait(remaining_, left);
  caller_asleep_.store(0, std::memory_order_relaxed);
}

void Pool::worker_loop(Slot& slot, int index) {
  std::uint32_t seen = 0;
  for (;;) {
    auto posted = [&] { return slot.ticket.load(std::memory_order_acquire) != seen; };
    if (!spin(spin_us_, posted)) {
      slot.asleep.store(1, std::memory_order_seq_cst);
      while (slot.ticket.load(std::memory_order_seq_cst) == seen) futex_wait(slot.ticket, seen);
      slot.asleep.store(0, std::memory_order_relaxed);
    }
    seen = slot.ticket.load(std::memory_order_acquire);
    work(index);
    if (remaining_.fetch_sub(1, std::memory_order_seq_cst) == 1 && caller_asleep_.load(std::memory_order_seq_cst))
      futex_wake(remaining_, 1);
  }
}

void* Pool::worker_main(void* argument) {
  Slot& slot = *static_cast<Slot*>(argument);
  slot.pool->worker_loop(slot, static_cast<int>(&slot - slot.pool->slots_.get()));
  return nullptr;
}

void Pool::start() {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  cpus_.clear();
  if (sched_getaffinity(0, sizeof allowed, &allowed) == 0)
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu)
      if (CPU_ISSET(cpu, &allowed)) cpus_.push_back(cpu);
  if (threads_ > static_cast<int>(cpus_.size())) {
    cpus_.clear();  // more threads than CPUs: pinning and spinning would only hold each other up
    spin_us_ = 2;
  }
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
  for (live_ = 1; live_ < threads_; ++live_) {
    Slot& slot = slots_[static_cast<std::size_t>(live_)];
    slot.pool = this;
    slot.ticket.store(0, std::memory_order_relaxed);
    slot.asleep.store(0, std::memory_order_relaxed);
    slot.cpu = -1;
    if (pthread_create(&slot.thread, &attributes, &Pool::worker_main, &slot) != 0) break;  // work with what there is
    if (!cpus_.empty()) pin(slot, cpus_[static_cast<std::size_t>(live_)]);
  }
  pthread_attr_destroy(&attributes);
  job_ = 0;
  started_ = true;
}

void Pool::pin(Slot& slot, int to) {
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(to, &one);
  slot.cpu = pthread_setaffinity_np(slot.thread, sizeof one, &one) == 0 ? to : -1;
}

/// The caller is not pinned. If it sits on a worker's CPU, the worker moves to one that nobody has: otherwise the two
/// would take turns in scheduler ticks of milliseconds.
void Pool::stay_off_callers_cpu() {
  if (cpus_.empty()) return;
  const int here = sched_getcpu();
  for (int w = 1; w < live_; ++w) {
    if (slots_[static_cast<std::size_t>(w)].cpu != here) continue;
    for (int cpu : cpus_) {
      bool taken = cpu == here;
      for (int other = 1; other < live_; ++other) taken = taken || slots_[static_cast<std::size_t>(other)].cpu == cpu;
      if (taken) continue;
      pin(slots_[static_cast<std::size_t>(w)], cpu);
      return;
    }
  }
}

void Pool::forget_workers() {
  lock_.reset();
  started_ = false;
  live_ = 1;
  remaining_.store(0, std::memory_order_relaxed);
  caller_asleep_.store(0, std::memory_order_relaxed);
}

/// All pools of the process. Never destroyed: workers may outlive static destructors.
struct Registry {
  FutexLock lock;
  std::vector<Pool*> pools;
};
Registry& registry() {
  static Registry* const instance = [] {
    auto* made = new Registry;
    pthread_atfork([] { registry().lock.lock(); }, [] { registry().lock.unlock(); },
                   [] {
                     Registry& all = registry();
                     all.lock.reset();
                     inside_body = false;
                     for (Pool* pool : all.pools) pool->forget_workers();
                   });
    return made;
  }();
  return *instance;
}

/// First line of a small file, "" if there is none.
std::string first_line(const std::string& path) {
  std::string line;
  if (std::FILE* file = std::fopen(path.c_str(), "re")) {
    char buffer[256];
    if (std::fgets(buffer, sizeof buffer, file)) line = buffer;
    std::fclose(file);
  }
  return line;
}

/// Fewest CPUs over `path` and its parents below `root`.
template <class Quota>
int smallest_quota(const std::string& root, std::string path, const Quota& quota_at) {
  int smallest = 0;
  for (;;) {
    if (const int cpus = quota_at(root + path); cpus > 0) smallest = smallest ? std::min(smallest, cpus) : cpus;
    const std::size_t slash = path.rfind('/');
    if (path.empty() || slash == std::string::npos) return smallest;
    path.resize(slash);
  }
}

int rounded_up(long long quota, long long period) {
  return quota > 0 && period > 0 ? static_cast<int>(std::min<long long>((quota + period - 1) / period, kMaxThreads))
                                 : 0;
}
/// The number at `at`, moved behind it and a blank; 0 when there is none.
long long number(std::string_view& at) {
  long long value = 0;
  const auto [end, error] = std::from_chars(at.data(), at.data() + at.size(), value);
  if (error != std::errc{}) return 0;
  at.remove_prefix(std::min(at.size(), static_cast<std::size_t>(end - at.data()) + 1));
  return value;
}
int quota_v2(const std::string& folder) {
  const std::string line = first_line(folder + "/cpu.max");
  std::string_view at = line;
  const long long quota = number(at);  // "max 100000" does not parse: no quota
  return rounded_up(quota, number(at));
}
int quota_v1(const std::string& folder) {
  const std::string quota = first_line(folder + "/cpu.cfs_quota_us"),
                    period = first_line(folder + "/cpu.cfs_period_us");
  std::string_view quota_at = quota, period_at = period;
  return rounded_up(number(quota_at), number(period_at));
}

}  // namespace

int affinity_cpus() {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return 1;
  return std::max(1, CPU_COUNT(&allowed));
}

int cgroup_quota_cpus(const char* root, const char* self) {
  int smallest = 0;
  auto note = [&](int cpus) {
    if (cpus > 0) smallest = smallest ? std::min(smallest, cpus) : cpus;
  };
  std::FILE* file = std::fopen(self, "re");
  if (!file) return 0;
  char buffer[4096];
  while (std::fgets(buffer, sizeof buffer, file)) {  // "id:controllers:/path"
    std::string line(buffer);
    while (!line.empty() && (line.back() == '\n' || line.back() == '/')) line.pop_back();
    const std::size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    std::string controllers(1, ',');
    controllers.append(line, first + 1, second - first - 1).append(1, ',');
    const std::string path = line.substr(second + 1);
    if (controllers == ",,") note(smallest_quota(root, path, quota_v2));
    if (controllers.find(",cpu,") != std::string::npos) {
      note(smallest_quota(std::string(root) + "/cpu", path, quota_v1));
      note(smallest_quota(std::string(root) + "/cpu,cpuacct", path, quota_v1));
    }
  }
  std::fclose(file);
  return smallest;
}

int default_threads() {
  const int quota = cgroup_quota_cpus();
  const int cpus = std::min(affinity_cpus(), kMaxThreads);
  return std::max(1, quota > 0 ? std::min(cpus, quota) : cpus);
}

}  // namespace cpu

inline namespace v0 {

Executor& cpu_executor(int num_threads) {
  if (num_threads < 0 || num_threads > cpu::kMaxThreads)
    throw Error(StatusCode::invalid_argument,
                text::concat("[executor] num_threads must be in [0, ", cpu::kMaxThreads, "], got ", num_threads),
                "0 takes as many as the CPU set and the cgroup quota allow", "num_threads");
  static const int by_default = cpu::default_threads();
  const int threads = num_threads == 0 ? by_default : num_threads;
  cpu::Registry& all = cpu::registry();
  all.lock.lock();
  cpu::Pool* found = nullptr;
  for (cpu::Pool* pool : all.pools)
    if (pool->concurrency() == threads) found = pool;
  if (!found) {
    found = new cpu::Pool(threads);
    all.pools.push_back(found);
  }
  all.lock.unlock();
  return *found;
}

}  // namespace v0
}  // namespace moekit
