#include <moekit/version.hpp>

#define MOEKIT_STRING2(x) #x
#define MOEKIT_STRING(x) MOEKIT_STRING2(x)

namespace moekit::inline v0 {
const char* version() {
  return MOEKIT_STRING(MOEKIT_VERSION_MAJOR) "." MOEKIT_STRING(MOEKIT_VERSION_MINOR) "." MOEKIT_STRING(
      MOEKIT_VERSION_PATCH);
}
}  // namespace moekit::inline v0
