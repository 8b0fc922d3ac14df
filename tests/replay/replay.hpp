// Replays recorded traces with stand-ins for every part around the kit.
#pragma once
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace moekit::replay {

using Json = nlohmann::json;

/// One comparison that failed: where, and both sides.
struct Difference {
  std::string where, expected, got;
};
using Differences = std::vector<Difference>;

inline void compare(Differences& out, const std::string& where, const Json& expected, const Json& got) {
  if (expected != got) out.push_back({where, expected.dump(), got.dump()});
}

/// A line of modular_kernel.jsonl.
Differences replay_kernel(const Json& line);
/// A line of normalize_output.jsonl.
Differences replay_output(const Json& line);
/// Picks the replayer; empty `known` result means that the line is of neither kind.
Differences replay_line(const Json& line, bool& known);

}  // namespace moekit::replay
