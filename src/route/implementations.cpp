// The built-in list. Among those that say yes the lowest estimate wins, order breaks ties; any can be forced by name.
#include <moekit/kit/implementations.hpp>

#include "route/cpu.hpp"
#include "route/reference.hpp"

namespace moekit::inline v0 {
namespace {

Verdict everywhere() { return Verdict::yes(); }

constexpr RouterEntry kRouters[] = {
    {"cpu", [] { return route::make_cpu(); }, &everywhere},  // f32, eight lanes, rows in parallel
    {"reference", &route::make_reference, &everywhere},      // f64, scalar: the oracle
};

}  // namespace

std::span<const RouterEntry> router_implementations() { return kRouters; }

}  // namespace moekit::inline v0
