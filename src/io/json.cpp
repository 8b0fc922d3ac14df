#include "io/json.hpp"

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>

#include <moekit/status.hpp>

#include "io/mapped_file.hpp"
#include "text.hpp"

namespace moekit::io {
using text::concat;

namespace {

[[noreturn]] void bad(const std::string& file, std::string_view what) {
  throw Error(StatusCode::bad_file, concat("[checkpoint] ", file, ": ", what));
}

/// Receives the parser's events. It returns false to stop; `error` then says why.
class Builder {
 public:
  using number_integer_t = nlohmann::json::number_integer_t;
  using number_unsigned_t = nlohmann::json::number_unsigned_t;
  using number_float_t = nlohmann::json::number_float_t;
  using string_t = std::string;
  using binary_t = nlohmann::json::binary_t;

  explicit Builder(const JsonLimits& limits) : limits_(limits) {}

  bool null() { return add(Json()); }
  bool boolean(bool value) { return add(Json(value)); }
  bool number_integer(number_integer_t value) { return add(Json(std::int64_t{value})); }
  bool number_unsigned(number_unsigned_t value) {
    constexpr auto kLargest = static_cast<number_unsigned_t>(std::numeric_limits<std::int64_t>::max());
    if (value > kLargest) return add(Json(static_cast<double>(value)));
    return add(Json(static_cast<std::int64_t>(value)));
  }
  bool number_float(number_float_t value, const string_t&) { return add(Json(value)); }
  bool string(string_t& value) { return add(Json(std::move(value))); }
  bool binary(binary_t&) { return stop("binary value"); }
  bool start_object(std::size_t) { return open(Json(Json::Object())); }
  bool start_array(std::size_t) { return open(Json(Json::Array())); }
  bool key(string_t& name) {
    open_.back()->object()->emplace_back().first = std::move(name);
    return true;
  }
  bool end_array() {
    open_.pop_back();
    return true;
  }
  bool end_object() {
    const Json::Object& members = *open_.back()->object();
    std::vector<const std::string*> keys;
    keys.reserve(members.size());
    for (const Json::Member& member : members) keys.push_back(&member.first);
    std::sort(keys.begin(), keys.end(), [](const auto* a, const auto* b) { return *a < *b; });
    const auto twice =
        std::adjacent_find(keys.begin(), keys.end(), [](const auto* a, const auto* b) { return *a == *b; });
    if (twice != keys.end()) return stop(concat("key \"", **twice, "\" stands twice", where(open_.size() - 1)));
    open_.pop_back();
    return true;
  }
  bool parse_error(std::size_t position, const std::string&, const nlohmann::json::exception& problem) {
    std::string reason = problem.what();  // "[json.exception.parse_error.101] parse error at line 1, column 2: …"
    if (const auto bracket = reason.find("] "); bracket != std::string::npos) reason.erase(0, bracket + 2);
    return stop(concat("not valid JSON near byte ", position, where(open_.size()), ": ", reason.substr(0, 200)));
  }

  Json root;
  std::string error;

 private:
  bool stop(std::string why) {
    error = std::move(why);
    return false;
  }
  /// " in a.b": the keys being read in the outermost `levels` open containers.
  std::string where(std::size_t levels) const {
    std::string path;
    for (std::size_t i = 0; i < levels && path.size() < 200; ++i)
      if (const Json::Object* object = open_[i]->object(); object && !object->empty())
        path += (path.empty() ? "" : ".") + object->back().first;
    return path.empty() ? path : concat(" in ", path);
  }
  /// Where the next value goes. Open containers do not move: only the innermost one grows.
  Json* place(Json value) {
    if (open_.empty()) {
      root = std::move(value);
      return &root;
    }
    if (Json::Array* array = open_.back()->array()) {
      array->push_back(std::move(value));
      return &array->back();
    }
    Json& slot = open_.back()->object()->back().second;
    slot = std::move(value);
    return &slot;
  }
  bool count() {
    if (++values_ <= limits_.values) return true;
    return stop(concat("more than ", limits_.values, " values"));
  }
  bool add(Json value) {
    if (!count()) return false;
    place(std::move(value));
    return true;
  }
  bool open(Json value) {
    if (!count()) return false;
    if (open_.size() >= static_cast<std::size_t>(limits_.depth))
      return stop(concat("nested deeper than ", limits_.depth, " levels"));
    open_.push_back(place(std::move(value)));
    return true;
  }

  JsonLimits limits_;
  std::size_t values_ = 0;
  std::vector<Json*> open_;
};

}  // namespace

const Json* Json::find(std::string_view key) const {
  if (const Object* members = object())
    for (const Member& member : *members)
      if (member.first == key) return &member.second;
  return nullptr;
}

const char* Json::kind() const {
  constexpr const char* kNames[] = {"null", "a boolean", "an integer", "a number", "a string", "a list", "an object"};
  return kNames[value_.index()];
}

Json parse_json(std::string_view text, const std::string& file, const JsonLimits& limits) {
  if (text.size() > limits.bytes) bad(file, concat(text.size(), " bytes of JSON, at most ", limits.bytes, " are read"));
  Builder builder(limits);
  if (!nlohmann::json::sax_parse(text.begin(), text.end(), &builder)) bad(file, builder.error);
  return std::move(builder.root);
}

Json read_json(const std::string& path, const JsonLimits& limits) {
  const MappedFile file(path);
  return parse_json({reinterpret_cast<const char*>(file.data()), file.size()}, path, limits);
}

Fields::Fields(const Json& object, std::string file, std::string path)
    : object_(&object), file_(std::move(file)), path_(std::move(path)) {
  if (!object.object())
    bad(file_, path_.empty() ? concat("must be an object, got ", object.kind())
                             : concat("\"", path_, "\" must be an object, got ", object.kind()));
}

std::string Fields::key_path(std::string_view key) const {
  return path_.empty() ? std::string(key) : concat(path_, ".", key);
}
void Fields::fail(std::string_view key, std::string_view what) const {
  throw Error(StatusCode::bad_file, concat("[checkpoint] ", file_, ": \"", key_path(key), "\" ", what), {},
              key_path(key));
}
void Fields::wrong_kind(std::string_view key, std::string_view wanted, const Json& got) const {
  fail(key, concat("must be ", wanted, ", got ", got.kind()));
}

const Json* Fields::find(std::string_view key) const {
  const Json* value = object_->find(key);
  return value && !value->is_null() ? value : nullptr;
}
std::optional<std::int64_t> Fields::integer(std::string_view key) const {
  const Json* value = find(key);
  if (!value) return std::nullopt;
  if (!value->integer()) wrong_kind(key, "an integer", *value);
  return *value->integer();
}
std::optional<double> Fields::number(std::string_view key) const {
  const Json* value = find(key);
  if (!value) return std::nullopt;
  if (value->integer()) return static_cast<double>(*value->integer());
  if (!value->real()) wrong_kind(key, "a number", *value);
  return *value->real();
}
std::optional<bool> Fields::boolean(std::string_view key) const {
  const Json* value = find(key);
  if (!value) return std::nullopt;
  if (!value->boolean()) wrong_kind(key, "true or false", *value);
  return *value->boolean();
}
std::optional<std::string> Fields::string(std::string_view key) const {
  const Json* value = find(key);
  if (!value) return std::nullopt;
  if (!value->string()) wrong_kind(key, "a string", *value);
  return *value->string();
}
std::optional<std::vector<std::int64_t>> Fields::integers(std::string_view key) const {
  const Json* value = find(key);
  if (!value) return std::nullopt;
  if (!value->array()) wrong_kind(key, "a list of integers", *value);
  std::vector<std::int64_t> out;
  for (const Json& item : *value->array()) {
    if (!item.integer()) wrong_kind(key, "a list of integers, has", item);
    out.push_back(*item.integer());
  }
  return out;
}
std::optional<std::vector<std::string>> Fields::strings(std::string_view key) const {
  const Json* value = find(key);
  if (!value) return std::nullopt;
  if (!value->array()) wrong_kind(key, "a list of strings", *value);
  std::vector<std::string> out;
  for (const Json& item : *value->array()) {
    if (!item.string()) wrong_kind(key, "a list of strings, has", item);
    out.push_back(*item.string());
  }
  return out;
}
std::optional<Fields> Fields::fields(std::string_view key) const {
  const Json* value = find(key);
  if (!value) return std::nullopt;
  return Fields(*value, file_, key_path(key));
}

}  // namespace moekit::io
