// Any bytes as a safetensors file: entries whose bytes lie inside it, or Error.
#include <cstddef>
#include <cstdint>
#include <cstdlib>

#include <moekit/status.hpp>

#include "io/safetensors.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  try {
    const auto* bytes = reinterpret_cast<const std::byte*>(data);
    for (const auto& tensor : moekit::io::parse_safetensors_header({bytes, size}, size, "fuzz"))
      if (tensor.begin > tensor.end || tensor.end > size) std::abort();
  } catch (const moekit::Error&) {
  }
  return 0;
}
