// What the process may use of this machine, and the pool behind cpu_executor().
#pragma once
#include <moekit/stream.hpp>

namespace moekit::cpu {

/// CPUs in this process' affinity mask.
int affinity_cpus();
/// CPUs that the cgroup quota grants, rounded up; 0 = no quota. `root` is where the cgroup file systems are mounted.
int cgroup_quota_cpus(const char* root = "/sys/fs/cgroup", const char* self = "/proc/self/cgroup");
/// What cpu_executor(0) uses: the smaller of the two, at least 1.
int default_threads();

inline constexpr int kMaxThreads = 1024;

}  // namespace moekit::cpu
