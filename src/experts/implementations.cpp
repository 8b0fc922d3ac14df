// The built-in lists. A new implementation or pack format = one file + one line here.
#include <moekit/kit/implementations.hpp>

#include "experts/canonical.hpp"

namespace moekit::inline v0 {

std::span<const PackFormat* const> pack_formats() {
  static const PackFormat* const kFormats[] = {
      &experts::canonical_format(),
  };
  return kFormats;
}

}  // namespace moekit::inline v0
