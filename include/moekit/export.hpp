// Which symbols the shared library shows. Everything else is hidden.
#pragma once

#if defined(__GNUC__)
#define MOEKIT_API __attribute__((visibility("default")))
#else
#define MOEKIT_API
#endif
