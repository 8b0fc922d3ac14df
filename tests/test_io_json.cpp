#include <gtest/gtest.h>

#include <moekit/status.hpp>

#include "io/json.hpp"
#include "support/checkpoint_files.hpp"

namespace moekit::io {
namespace {
using testing::thrown_by;

Status parse_status(const std::string& text, const JsonLimits& limits = {}) {
  return thrown_by([&] { parse_json(text, "config.json", limits); });
}
bool says(const Status& status, const std::string& part) {
  return status.code() == StatusCode::bad_file && status.message().find(part) != std::string::npos;
}

TEST(Json, values_keep_kind_and_order) {
  const Json json = parse_json(R"({"b":-3,"a":[1.5,true,null,"x\u00e9"],"c":{"d":18446744073709551615}})", "f");
  ASSERT_TRUE(json.object());
  EXPECT_EQ((*json.object())[0].first, "b");
  EXPECT_EQ(*json.find("b")->integer(), -3);
  const Json::Array& a = *json.find("a")->array();
  EXPECT_EQ(*a[0].real(), 1.5);
  EXPECT_EQ(*a[1].boolean(), true);
  EXPECT_TRUE(a[2].is_null());
  EXPECT_EQ(*a[3].string(), "x\xc3\xa9");
  EXPECT_FALSE(json.find("c")->find("d")->integer()) << "does not fit 63 bits";
  EXPECT_EQ(*parse_json("9223372036854775807", "f").integer(), std::numeric_limits<std::int64_t>::max());
}

TEST(Json, duplicate_key_is_refused_with_key_and_file) {
  const Status s = parse_status(R"({"a":1,"num_experts":2,"num_experts":4})");
  EXPECT_TRUE(says(s, "config.json")) << s.message();
  EXPECT_TRUE(says(s, "\"num_experts\" stands twice")) << s.message();
  const Status inner = parse_status(R"({"q":{"w":{"x":1,"y":2,"x":1}}})");
  EXPECT_TRUE(says(inner, "\"x\" stands twice in q.w")) << inner.message();
  EXPECT_TRUE(parse_status(R"([{"a":1},{"a":1}])").ok());
}

TEST(Json, depth_bomb_is_refused_at_the_limit) {
  const auto nested = [](std::size_t n) { return std::string(n, '[') + std::string(n, ']'); };
  EXPECT_TRUE(parse_status(nested(64)).ok());
  EXPECT_TRUE(says(parse_status(nested(65)), "nested deeper than 64"));
  EXPECT_TRUE(says(parse_status(nested(1'000'000)), "nested deeper than 64"));
  std::string objects;
  for (int i = 0; i < 100'000; ++i) objects += "{\"a\":";
  EXPECT_TRUE(says(parse_status(objects), "nested deeper than 64"));
}

TEST(Json, size_and_number_of_values_are_limited) {
  EXPECT_TRUE(says(parse_status("[1,2,3]", {.values = 3}), "more than 3 values"));
  EXPECT_TRUE(parse_status("[1,2,3]", {.values = 4}).ok());
  EXPECT_TRUE(says(parse_status("[1,2,3]", {.bytes = 6}), "at most 6"));
}

TEST(Json, malformed_text_says_where) {
  for (const char* text :
       {"", "{", "{\"a\":}", "{\"a\":1}x", "[1,]", "nul", "\"\xff\"", "[1e999]", "{'a':1}", "[01]"}) {
    const Status s = parse_status(text);
    EXPECT_TRUE(says(s, "config.json: not valid JSON near byte")) << text << ": " << s.message();
    EXPECT_EQ(s.message().find("json.exception"), std::string::npos) << s.message();
  }
  EXPECT_TRUE(says(parse_status(R"({"quantization_config":{"bits":,}})"), "in quantization_config.bits"));
}

TEST(Json, fields_name_file_key_and_kind) {
  const Json json = parse_json(R"({"a":{"n":"8","l":[1,"x"],"z":null}})", "f");
  const Fields top(json, "dir/config.json");
  const Fields a = *top.fields("a");
  EXPECT_FALSE(a.integer("absent"));
  EXPECT_FALSE(a.has("z")) << "null counts as absent";
  Status s = thrown_by([&] { a.integer("n"); });
  EXPECT_TRUE(says(s, "dir/config.json: \"a.n\" must be an integer, got a string")) << s.message();
  EXPECT_EQ(s.field(), "a.n");
  s = thrown_by([&] { a.integers("l"); });
  EXPECT_TRUE(says(s, "\"a.l\" must be a list of integers")) << s.message();
  s = thrown_by([&] { top.integer("a"); });
  EXPECT_TRUE(says(s, "got an object")) << s.message();
}

TEST(Json, unreadable_files_are_errors) {
  const testing::TempFolder folder;
  EXPECT_TRUE(says(thrown_by([&] { read_json(folder / "none.json"); }), "none.json: cannot be opened"));
  EXPECT_TRUE(says(thrown_by([&] { read_json(folder.path()); }), "is not a regular file"));
  testing::write_text(folder / "empty.json", "");
  EXPECT_TRUE(says(thrown_by([&] { read_json(folder / "empty.json"); }), "not valid JSON"));
}

}  // namespace
}  // namespace moekit::io
