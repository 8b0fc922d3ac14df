// What every router of ours checks before it writes anything.
#pragma once
#include <moekit/kit/router.hpp>

namespace moekit::route {

inline constexpr std::int64_t kMaxExperts = 2048;  ///< as validate(RouterConfig) says
inline constexpr std::int64_t kMaxTopK = 64;

/// Scores below the smallest normal f32 count as 0: one rule for f64 and f32, whatever the hardware does to subnormals.
inline constexpr float kSmallestScore = 0x1p-126f;

/// Sizes of a call that has passed check().
struct RouteSize {
  std::int64_t num_rows = 0;     ///< M
  std::int64_t num_valid = 0;    ///< rows that are routed; the others get id -1 and weight 0
  std::int64_t num_experts = 0;  ///< E
  std::int64_t top_k = 0;        ///< k
};

/// Shapes, types, strides and values of a call; in checked mode also its logits (NaN). Writes nothing but `size`.
Status check(const RouteArgs& args, RouteSize& size);

/// What routers of ours can do at all: a rule over logits in host memory.
Verdict supports(const RouteProblem& problem);

/// Rows [begin, end) get id -1 and weight 0.
void clear_rows(const RouteArgs& args, std::int64_t begin, std::int64_t end);

}  // namespace moekit::route
