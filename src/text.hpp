// concat("got ", n, " of ", m): how the library builds its messages.
#pragma once
#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>
#include <type_traits>

namespace moekit::text {

inline void append(std::string& out, std::string_view part) { out += part; }
inline void append(std::string& out, const std::string& part) { out += part; }
inline void append(std::string& out, const char* part) { out += part; }
inline void append(std::string& out, char part) { out += part; }
inline void append(std::string& out, bool part) { out += part ? "true" : "false"; }
template <class T>
requires std::is_integral_v<T>
void append(std::string& out, T part) { out += std::to_string(part); }
template <class T>
requires std::is_floating_point_v<T>
void append(std::string& out, T part) {
  char buffer[32];
  std::snprintf(buffer, sizeof buffer, "%.6g", static_cast<double>(part));
  out += buffer;
}

template <class... Parts>
std::string concat(const Parts&... parts) {
  std::string out;
  (append(out, parts), ...);
  return out;
}

}  // namespace moekit::text
