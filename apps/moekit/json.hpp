// JSON for output: a value tree that keeps the order of its keys.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace moekit::cli {

class Json {
 public:
  Json() = default;  ///< null
  Json(bool value) : text_(value ? "true" : "false") {}
  Json(double value);  ///< not finite: null
  Json(std::string_view value);
  Json(const std::string& value) : Json(std::string_view(value)) {}
  Json(const char* value) : Json(std::string_view(value)) {}
  template <class T>
  requires(std::is_integral_v<T> && !std::is_same_v<T, bool>) Json(T value) : text_(std::to_string(value)) {}
  template <class T>
  Json(const std::vector<T>& values) : Json(array()) {
    for (const auto& value : values) push(Json(value));
  }

  static Json object() { return Json(Kind::object); }
  static Json array() { return Json(Kind::array); }

  Json& set(std::string_view key, Json value);  ///< appends; keys are not looked up
  Json& push(Json value);
  bool empty() const { return items_.empty(); }
  std::string dump() const;  ///< on one line

 private:
  enum class Kind { value, object, array };
  explicit Json(Kind kind) : kind_(kind), text_() {}
  void write(std::string& out) const;
  Kind kind_ = Kind::value;
  std::string text_ = "null";
  std::vector<std::pair<std::string, Json>> items_;
};

}  // namespace moekit::cli
