// The pool behind cpu_executor().
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <thread>
#include <vector>

#include "cpu/threads.hpp"

namespace moekit {
namespace {

/// Runs `count` indices and returns how often each was called.
std::vector<int> hits(Executor& executor, std::int64_t count) {
  struct Calls {
    std::vector<std::atomic<int>> of;
  } calls{std::vector<std::atomic<int>>(static_cast<std::size_t>(count))};
  executor.run(
      count, [](void* arg, std::int64_t i) { static_cast<Calls*>(arg)->of[static_cast<std::size_t>(i)].fetch_add(1); },
      &calls);
  std::vector<int> out;
  for (auto& n : calls.of) out.push_back(n.load());
  return out;
}

TEST(CpuExecutor, every_index_runs_once) {
  for (int threads : {1, 2, 3, 8})
    for (std::int64_t count : {0, 1, 2, 3, 7, 8, 9, 100, 1000})
      EXPECT_EQ(hits(cpu_executor(threads), count), std::vector<int>(static_cast<std::size_t>(count), 1))
          << threads << " threads, " << count << " indices";
}

TEST(CpuExecutor, the_same_number_is_the_same_pool) {
  EXPECT_EQ(&cpu_executor(3), &cpu_executor(3));
  EXPECT_NE(&cpu_executor(3), &cpu_executor(2));
  EXPECT_EQ(cpu_executor(3).concurrency(), 3);
  EXPECT_EQ(cpu_executor().concurrency(), cpu::default_threads());
}

TEST(CpuExecutor, a_number_out_of_range_is_an_error_that_names_it) {
  for (int threads : {-1, cpu::kMaxThreads + 1}) {
    try {
      (void)cpu_executor(threads);
      FAIL() << threads;
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(std::to_string(threads)), std::string::npos) << error.what();
    }
  }
}

TEST(CpuExecutor, writes_of_bodies_are_seen_by_the_caller_and_by_the_next_call) {
  std::vector<std::int64_t> values(64, 0);
  auto add = [](void* arg, std::int64_t i) {
    (*static_cast<std::vector<std::int64_t>*>(arg))[static_cast<std::size_t>(i)] += i;
  };
  auto shift = [](void* arg, std::int64_t i) {  // reads what another thread may have written in the call before
    auto& v = *static_cast<std::vector<std::int64_t>*>(arg);
    if (i < 32) v[static_cast<std::size_t>(i)] += v[static_cast<std::size_t>(63 - i)];
  };
  for (int round = 0; round < 2000; ++round) {
    std::fill(values.begin(), values.end(), 0);
    cpu_executor(2).run(64, add, &values);
    cpu_executor(2).run(64, shift, &values);
    for (std::int64_t i = 0; i < 32; ++i) ASSERT_EQ(values[static_cast<std::size_t>(i)], 63);
  }
}

TEST(CpuExecutor, a_call_from_inside_a_body_runs_at_once) {
  std::atomic<int> inner{0};
  cpu_executor(2).run(
      2,
      [](void* arg, std::int64_t) {
        cpu_executor(2).run(
            5, [](void* n, std::int64_t) { static_cast<std::atomic<int>*>(n)->fetch_add(1); }, arg);
      },
      &inner);
  EXPECT_EQ(inner.load(), 10);
}

TEST(CpuExecutor, calls_from_several_threads_queue) {
  std::vector<std::thread> callers;
  std::atomic<int> wrong{0};
  for (int c = 0; c < 4; ++c)
    callers.emplace_back([&wrong] {
      for (int round = 0; round < 200; ++round)
        for (int n : hits(cpu_executor(2), 3))
          if (n != 1) wrong.fetch_add(1);
    });
  for (auto& caller : callers) caller.join();
  EXPECT_EQ(wrong.load(), 0);
}

TEST(CpuExecutor, usable_after_fork_in_parent_and_child) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "the thread sanitizer ends a forked process that starts threads";
#endif
  (void)hits(cpu_executor(2), 4);
  for (int round = 0; round < 3; ++round) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(20);  // a child that hangs must fail, not stay
      bool ok = true;
      for (int again = 0; again < 10; ++again) ok = ok && hits(cpu_executor(2), 5) == std::vector<int>(5, 1);
      _exit(ok ? 0 : 1);
    }
    int status = -1;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
    EXPECT_EQ(hits(cpu_executor(2), 5), std::vector<int>(5, 1));
  }
}

TEST(CpuExecutor, more_threads_than_cpus) {
  Executor& executor = cpu_executor(3 * cpu::affinity_cpus() + 1);
  for (int round = 0; round < 50; ++round) {
    const auto count = static_cast<std::size_t>(executor.concurrency());
    ASSERT_EQ(hits(executor, executor.concurrency()), std::vector<int>(count, 1));
  }
}

TEST(CpuExecutor, wakes_up_after_it_slept) {
  for (int round = 0; round < 5; ++round) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    EXPECT_EQ(hits(cpu_executor(2), 2), std::vector<int>(2, 1));
  }
}

TEST(CpuLimits, quota_is_rounded_up_and_the_smallest_of_the_hierarchy_counts) {
  const auto root = std::filesystem::temp_directory_path() / ("moekit_cgroup_" + std::to_string(getpid()));
  auto write = [&](const std::string& path, const std::string& text) {
    std::filesystem::create_directories((root / path).parent_path());
    std::ofstream(root / path) << text;
  };
  auto quota = [&] { return cpu::cgroup_quota_cpus(root.c_str(), (root / "self").c_str()); };
  write("self", "0::/pod/app\n");
  write("cpu.max", "max 100000\n");
  EXPECT_EQ(quota(), 0);
  write("pod/cpu.max", "350000 100000\n");
  EXPECT_EQ(quota(), 4);
  write("pod/app/cpu.max", "150000 100000\n");
  EXPECT_EQ(quota(), 2);
  write("self", "3:cpuset:/\n1:cpu,cpuacct:/job\n");  // version 1
  write("cpu/job/cpu.cfs_quota_us", "-1\n");
  write("cpu/job/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(quota(), 0);
  write("cpu/job/cpu.cfs_quota_us", "50000\n");
  EXPECT_EQ(quota(), 1);
  std::filesystem::remove_all(root);
  EXPECT_EQ(quota(), 0);
}

}  // namespace
}  // namespace moekit
