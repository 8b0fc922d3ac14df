// Numbers and names as the command line and the settings of shape strings spell them.
#pragma once
#include <charconv>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace moekit::cli {

inline constexpr std::int64_t kMostThreads = 1024, kMostTokens = INT32_MAX;

/// Digits, with a minus in front if need be, and nothing else; absent for other text and for what 63 bits cannot hold.
inline std::optional<std::int64_t> whole_number(std::string_view text) {
  std::int64_t value = 0;
  const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || stop != text.data() + text.size()) return std::nullopt;
  return value;
}

/// Complaints about what a flag was given; empty = fine.
std::string whole_complaint(const std::string& text, std::int64_t least, std::int64_t most = INT64_MAX);

/// Throws UsageError for a scheme that is misspelt, Error(unsupported) for one that comes in a later version.
void check_weights_scheme(const std::string& name);
void check_activations_scheme(const std::string& name);

}  // namespace moekit::cli
