#include "json.hpp"

#include <cmath>
#include <cstdio>

namespace moekit::cli {
namespace {

std::string quoted(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (c == '\n') {
      out += "\\n";
    } else if (byte < 0x20) {
      char buffer[8];
      std::snprintf(buffer, sizeof buffer, "\\u%04x", byte);
      out += buffer;
    } else {
      out += c;
    }
  }
  return out + '"';
}

/// Seven significant digits; whole numbers exactly.
std::string number(double value) {
  if (!std::isfinite(value)) return "null";
  char buffer[32];
  if (value == std::nearbyint(value) && std::fabs(value) < 1e15) {
    std::snprintf(buffer, sizeof buffer, "%.0f", value);
  } else {
    std::snprintf(buffer, sizeof buffer, "%.7g", value);
  }
  return buffer;
}

}  // namespace

Json::Json(double value) : text_(number(value)) {}
Json::Json(std::string_view value) : text_(quoted(value)) {}

Json& Json::set(std::string_view key, Json value) {
  items_.emplace_back(std::string(key), std::move(value));
  return *this;
}

Json& Json::push(Json value) {
  items_.emplace_back(std::string(), std::move(value));
  return *this;
}

void Json::write(std::string& out) const {
  if (kind_ == Kind::value) {
    out += text_;
    return;
  }
  out += kind_ == Kind::object ? '{' : '[';
  bool first = true;
  for (const auto& [key, value] : items_) {
    if (!first) out += ',';
    first = false;
    if (kind_ == Kind::object) out += quoted(key) + ':';
    value.write(out);
  }
  out += kind_ == Kind::object ? '}' : ']';
}

std::string Json::dump() const {
  std::string out;
  write(out);
  return out;
}

}  // namespace moekit::cli
