// This machine, for doctor and for the env block of records.
#pragma once
#include <cstdint>
#include <string>

#include "json.hpp"

namespace moekit::cli {

struct Machine {
  std::string cpu_model, system, hugepages;
  int online_cpus = 0;
  std::int64_t memory_bytes = 0, available_bytes = 0;
  std::int64_t last_level_cache = 0;  ///< that one core can reach
};
Machine this_machine();
std::string compiler();  ///< "GCC 12.2.0"

/// moekit's version and build, CPU, ISA, threads: what a timing depends on.
Json environment_record();

}  // namespace moekit::cli
