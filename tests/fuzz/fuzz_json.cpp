// Any bytes as JSON: a value or Error, nothing else.
#include <cstddef>
#include <cstdint>

#include <moekit/status.hpp>

#include "io/json.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  try {
    (void)moekit::io::parse_json({reinterpret_cast<const char*>(data), size}, "fuzz",
                                 {.bytes = 1 << 20, .values = 10'000});
  } catch (const moekit::Error&) {
  }
  return 0;
}
