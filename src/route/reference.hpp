// The rule of RouterConfig, one row at a time, in f64.
#pragma once
#include <memory>

#include "route/check.hpp"

namespace moekit::route {

/// Ids and weights of row `row`. The fast path calls it for rows whose largest logit is not finite.
/// Uses about 80 KiB of stack.
void reference_row(const RouteArgs& args, const RouteSize& size, std::int64_t row);

std::unique_ptr<Router> make_reference();

}  // namespace moekit::route
