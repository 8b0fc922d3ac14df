// --routing: simulated distributions and recorded traces; the routing CSV; statistics of a routing.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <moekit/config.hpp>

#include "generate.hpp"

namespace moekit::cli {

/// uniform | balanced | zipf:a | hot:n,f | single | trace:FILE
struct RoutingSpec {
  std::string text;
  Simulated kind = Simulated::uniform;
  double a = 0;        ///< zipf exponent, share of the hot experts
  std::int64_t n = 0;  ///< hot experts
  std::string trace;   ///< file name; empty = simulated
};
RoutingSpec parse_routing(const std::string& text);  ///< throws UsageError

/// One line of the CSV: header "layer,token,slot,expert,weight", -1 kept.
struct TraceLine {
  std::int64_t layer, token, slot, expert;
  double weight;
};
std::vector<TraceLine> read_routing_csv(const std::string& path);  ///< throws Error(bad_file) with the line
std::string routing_csv_header();
/// Lines of one layer; ids i32 [M, k], weights f32 [M, k].
std::string routing_csv(std::int64_t layer, const Tensor& ids, const Tensor& weights);

/// Owned ids and weights.
struct RoutingRows {
  Buffer ids, weights;  ///< i32, f32 [M, k]
  Routing view() const { return {ids.tensor, weights.tensor}; }
};
/// `num_tokens` rows. A trace is read from `layer` (or its first layer, if it does not have that one) and repeated if
/// it is shorter; ids that the layer does not have are an Error(bad_file).
RoutingRows make_routing(const RoutingSpec& spec, const LayerConfig& config, std::int64_t layer,
                         std::int64_t num_tokens, std::uint64_t seed);

struct RoutingStats {
  std::vector<std::int64_t> tokens;  ///< per expert
  std::int64_t routes = 0, active = 0;
  double busiest_over_mean = 0;
  double entropy = 0;  ///< of the load, over log E: 1 = balanced
};
RoutingStats routing_stats(const Tensor& ids, std::int64_t num_experts);

}  // namespace moekit::cli
