#include "machine.hpp"

#include <sys/utsname.h>
#include <unistd.h>

#include <fstream>
#include <sstream>

#include <moekit/version.hpp>

#include "cpu/isa.hpp"
#include "cpu/threads.hpp"

namespace moekit::cli {
namespace {

/// Value of the first line "KEY...: VALUE" of a /proc file.
std::string proc_value(const char* file, const std::string& key) {
  std::ifstream in(file);
  for (std::string line; std::getline(in, line);) {
    if (line.rfind(key, 0) != 0) continue;
    const std::size_t colon = line.find(':');
    const std::size_t begin = colon == std::string::npos ? colon : line.find_first_not_of(" \t", colon + 1);
    return begin == std::string::npos ? "" : line.substr(begin);
  }
  return "";
}

std::int64_t kilobytes(const std::string& text) {
  std::int64_t value = 0;
  std::istringstream(text) >> value;
  return value * 1024;
}

std::string first_line(const char* file) {
  std::ifstream in(file);
  std::string line;
  std::getline(in, line);
  return line;
}

std::int64_t last_level_cache() {
  const cpu::Caches& caches = cpu::caches();
  return caches.l3 > 0 ? caches.l3 : caches.l2;
}

/// "always [madvise] never" → "madvise"
std::string bracketed(const std::string& text) {
  const std::size_t begin = text.find('['), end = text.find(']');
  return begin == std::string::npos || end == std::string::npos ? text : text.substr(begin + 1, end - begin - 1);
}

}  // namespace

Machine this_machine() {
  Machine out;
  out.cpu_model = proc_value("/proc/cpuinfo", "model name");
  if (out.cpu_model.empty()) out.cpu_model = "unknown CPU";
  utsname name{};
  if (uname(&name) == 0) out.system = std::string(name.sysname) + " " + name.release + " " + name.machine;
  out.hugepages = bracketed(first_line("/sys/kernel/mm/transparent_hugepage/enabled"));
  out.online_cpus = static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
  out.last_level_cache = last_level_cache();
  out.memory_bytes = kilobytes(proc_value("/proc/meminfo", "MemTotal"));
  out.available_bytes = kilobytes(proc_value("/proc/meminfo", "MemAvailable"));
  return out;
}

std::string compiler() {
#if defined(__clang__)
  return __VERSION__;
#else
  return std::string("GCC ") + __VERSION__;
#endif
}

Json environment_record() {
  const Machine machine = this_machine();
  return Json::object()
      .set("moekit", version())
      .set("compiler", compiler())
      .set("cpu", machine.cpu_model)
      .set("system", machine.system)
      .set("isa", cpu::name(cpu::usable_isa()))
      .set("cpus", cpu::affinity_cpus())
      .set("l3_bytes", machine.last_level_cache)
      .set("hugepages", machine.hugepages);
}

}  // namespace moekit::cli
