// JSON of checkpoints: untrusted text → a small value tree, with limits on depth, size and number of values.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace moekit::io {

/// One JSON value. Whole numbers that fit 63 bits and a sign are integers, all others reals. Members keep their order.
class Json {
 public:
  using Array = std::vector<Json>;
  using Member = std::pair<std::string, Json>;
  using Object = std::vector<Member>;

  Json() = default;
  template <class T>
  explicit Json(T value) : value_(std::move(value)) {}

  bool is_null() const { return std::holds_alternative<std::monostate>(value_); }
  const bool* boolean() const { return std::get_if<bool>(&value_); }
  const std::int64_t* integer() const { return std::get_if<std::int64_t>(&value_); }
  const double* real() const { return std::get_if<double>(&value_); }
  const std::string* string() const { return std::get_if<std::string>(&value_); }
  const Array* array() const { return std::get_if<Array>(&value_); }
  const Object* object() const { return std::get_if<Object>(&value_); }
  Array* array() { return std::get_if<Array>(&value_); }
  Object* object() { return std::get_if<Object>(&value_); }

  /// Member of an object; null if there is none or this is no object.
  const Json* find(std::string_view key) const;
  const char* kind() const;  ///< "a string", "an object", …: for messages

 private:
  std::variant<std::monostate, bool, std::int64_t, double, std::string, Array, Object> value_;
};

struct JsonLimits {
  std::size_t bytes = std::size_t{16} << 20;
  int depth = 64;
  std::size_t values = 1'000'000;
};

/// Throws Error bad_file; the message begins with `file` and names the key where there is one. Duplicate keys of one
/// object, nesting beyond the limit and anything after the value are errors.
Json parse_json(std::string_view text, const std::string& file, const JsonLimits& limits = {});
/// The whole of a text file.
Json read_json(const std::string& path, const JsonLimits& limits = {});

/// Typed access to the members of an object. Every complaint names the file, the key and what stands there.
/// Null counts as absent: that is how configurations write "not set".
class Fields {
 public:
  /// @param path  where `object` lies in the file ("" = top, "ffn_config"); throws Error if it is no object
  Fields(const Json& object, std::string file, std::string path = {});

  const Json* find(std::string_view key) const;
  bool has(std::string_view key) const { return find(key) != nullptr; }
  std::optional<std::int64_t> integer(std::string_view key) const;
  std::optional<double> number(std::string_view key) const;
  std::optional<bool> boolean(std::string_view key) const;
  std::optional<std::string> string(std::string_view key) const;
  std::optional<std::vector<std::int64_t>> integers(std::string_view key) const;
  std::optional<std::vector<std::string>> strings(std::string_view key) const;
  std::optional<Fields> fields(std::string_view key) const;

  /// [checkpoint] FILE: KEY WHAT
  [[noreturn]] void fail(std::string_view key, std::string_view what) const;
  std::string key_path(std::string_view key) const;  ///< "ffn_config.moe_top_k"
  const std::string& file() const { return file_; }
  const Json& json() const { return *object_; }

 private:
  [[noreturn]] void wrong_kind(std::string_view key, std::string_view wanted, const Json& got) const;
  const Json* object_;
  std::string file_, path_;
};

}  // namespace moekit::io
