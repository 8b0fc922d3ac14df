// Version of the library.
#pragma once
#include <moekit/export.hpp>

#define MOEKIT_VERSION_MAJOR 0
#define MOEKIT_VERSION_MINOR 1
#define MOEKIT_VERSION_PATCH 0

namespace moekit::inline v0 {
MOEKIT_API const char* version();  ///< "0.1.0"
}
