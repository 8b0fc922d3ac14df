#include "cpu/caches.hpp"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <fstream>
#include <limits>

namespace moekit::cpu {
namespace {

std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

Caches of_sysconf() {
  Caches out{0, 0, 0};
  const auto ask = [](int what, std::int64_t& value) {
    if (const long bytes = sysconf(what); bytes > 0) value = bytes;
  };
  ask(_SC_LEVEL1_DCACHE_SIZE, out.l1);
  ask(_SC_LEVEL2_CACHE_SIZE, out.l2);
  ask(_SC_LEVEL3_CACHE_SIZE, out.l3);
  return out;
}

}  // namespace

std::int64_t parse_cache_size(std::string_view text) {
  while (!text.empty() && (text.back() == '\n' || text.back() == ' ')) text.remove_suffix(1);
  int shift = 0;
  if (!text.empty()) {
    switch (text.back()) {
      case 'K': shift = 10; break;
      case 'M': shift = 20; break;
      case 'G': shift = 30; break;
      default: break;
    }
    if (shift > 0) text.remove_suffix(1);
  }
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < 0) return 0;
  return value > std::numeric_limits<std::int64_t>::max() >> shift ? 0 : value << shift;
}

Caches caches_of_folder(const std::string& folder) {
  Caches out{0, 0, 0};
  std::int64_t* const levels[] = {&out.l1, &out.l2, &out.l3};
  for (int i = 0; i < 16; ++i) {
    const std::string index = folder + "/index" + std::to_string(i);
    const std::string level = first_line(index + "/level"), type = first_line(index + "/type");
    if (level.empty()) break;
    if (level.size() != 1 || level[0] < '1' || level[0] > '3' || (type != "Data" && type != "Unified")) continue;
    *levels[level[0] - '1'] = parse_cache_size(first_line(index + "/size"));
  }
  return out;
}

Caches smaller_of(const Caches& a, const Caches& b) {
  const auto pick = [](std::int64_t x, std::int64_t y, std::int64_t guess) {
    if (x > 0 && y > 0) return std::min(x, y);
    return x > 0 ? x : y > 0 ? y : guess;
  };
  const Caches guess;
  return {pick(a.l1, b.l1, guess.l1), pick(a.l2, b.l2, guess.l2), pick(a.l3, b.l3, guess.l3)};
}

const Caches& caches() {
  static const Caches found = smaller_of(caches_of_folder("/sys/devices/system/cpu/cpu0/cache"), of_sysconf());
  return found;
}

}  // namespace moekit::cpu
