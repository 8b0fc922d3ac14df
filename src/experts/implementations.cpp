// The built-in lists. A new implementation or pack format = one file + one line here.
#include <moekit/kit/implementations.hpp>

#include "experts/canonical.hpp"
#include "experts/reference.hpp"

namespace moekit::inline v0 {
namespace {

Verdict anywhere() { return Verdict::yes(); }

// In order of priority: among those that say yes the lowest estimate wins, order breaks ties, any can be forced.
constexpr ExpertsEntry kExperts[] = {
    {"naive_batched", &experts::make_naive_batched, &anywhere},
    {"reference", &experts::make_reference, &anywhere},  // f64, scalar
};

}  // namespace

std::span<const ExpertsEntry> experts_implementations() { return kExperts; }

std::span<const PackFormat* const> pack_formats() {
  static const PackFormat* const kFormats[] = {
      &experts::canonical_format(),
  };
  return kFormats;
}

}  // namespace moekit::inline v0
