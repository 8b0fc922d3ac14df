// Sizes of the data caches. The kernel's folder of cpu0 speaks of one cache domain; sysconf may give the sum of
// several, or of the whole host, so where both say something the smaller one counts.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>

namespace moekit::cpu {

/// Data caches in bytes; guesses where the machine does not say.
struct Caches {
  std::int64_t l1 = 32 << 10;
  std::int64_t l2 = 512 << 10;  ///< of one core
  std::int64_t l3 = 0;          ///< of one domain; 0 = none
};
/// Of this machine, found once.
const Caches& caches();

/// "32768K", "1M\n", "512" in bytes; 0 = not a size.
std::int64_t parse_cache_size(std::string_view text);
/// index*/{level,type,size} of a folder like /sys/devices/system/cpu/cpu0/cache; 0 = not said. Instruction caches are
/// passed over.
Caches caches_of_folder(const std::string& folder);
/// Level by level the smaller of two sizes; one that is 0 does not count, and where neither says anything, the guess.
Caches smaller_of(const Caches& a, const Caches& b);

}  // namespace moekit::cpu
