// Pieces of the tool that need no layer: text, numbers, pictures, routing files.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <fstream>

#include "console.hpp"
#include "exit_code.hpp"
#include "json.hpp"
#include "oracle.hpp"
#include "routing_spec.hpp"
#include "spelling.hpp"
#include "stats.hpp"
#include "svg.hpp"

namespace moekit::cli {
namespace {

TEST(ExitCode, every_status_has_the_documented_number) {
  EXPECT_EQ(static_cast<int>(exit_code(StatusCode::ok)), 0);
  EXPECT_EQ(static_cast<int>(exit_code(StatusCode::invalid_argument)), 2);
  EXPECT_EQ(static_cast<int>(exit_code(StatusCode::bad_file)), 3);
  EXPECT_EQ(static_cast<int>(exit_code(StatusCode::unsupported)), 4);
  EXPECT_EQ(static_cast<int>(exit_code(StatusCode::out_of_memory)), 5);
  EXPECT_EQ(static_cast<int>(exit_code(StatusCode::device_error)), 6);
  EXPECT_EQ(static_cast<int>(exit_code(StatusCode::internal)), 70);
}

TEST(JsonOutput, keeps_order_escapes_and_never_writes_nan) {
  Json json = Json::object().set("b", 1).set("a", "q\"\n\x01\\").set("n", std::nan("")).set("t", true);
  json.set("list", Json::array().push(1.5).push(Json()).push(std::int64_t{1} << 53));
  EXPECT_EQ(json.dump(), R"({"b":1,"a":"q\"\n\u0001\\","n":null,"t":true,"list":[1.5,null,9007199254740992]})");
}

TEST(Stats, quantiles_of_known_samples) {
  const Summary s = summarise({5, 1, 3, 2, 4});
  EXPECT_EQ(s.samples, 5);
  EXPECT_EQ(s.median, 3);
  EXPECT_EQ(s.min, 1);
  EXPECT_EQ(s.max, 5);
  EXPECT_DOUBLE_EQ(s.p90, 4.6);
  EXPECT_DOUBLE_EQ(median({1, 2}), 1.5);
  EXPECT_EQ(summarise({}).samples, 0);
  EXPECT_EQ(ratios({2, 9, 5}, {1, 3}), (std::vector<double>{2, 3}));
}

TEST(Spelling, nearest_word_and_globs) {
  EXPECT_EQ(nearest("benhc", {"bench", "run"}), "bench");
  EXPECT_EQ(nearest("--tokns", {"--threads", "--tokens"}), "--tokens");
  EXPECT_EQ(nearest("zzzzzzzz", {"bench", "run"}), "");
  EXPECT_TRUE(glob_match("cpu.*", "cpu.avx2"));
  EXPECT_TRUE(glob_match("*", ""));
  EXPECT_TRUE(glob_match("cpu.avx?", "cpu.avx2"));
  EXPECT_FALSE(glob_match("cpu.*", "reference"));
  EXPECT_FALSE(glob_match("", "x"));
}

TEST(TableText, aligns_numbers_right_and_counts_utf8_columns) {
  Table table({"name", "µs"});
  table.row({"a–b", "1.5"});
  table.row({"longer", "12"});
  EXPECT_EQ(table.text(), "name     µs\na–b     1.5\nlonger   12");
}

TEST(Format, bytes_times_and_counts) {
  EXPECT_EQ(format_bytes(1536), "1.50 KiB");
  EXPECT_EQ(format_bytes(12), "12 B");
  EXPECT_EQ(format_us(0.5), "500 ns");
  EXPECT_EQ(format_us(1234), "1.23 ms");
  EXPECT_EQ(format_count(1234567), "1,234,567");
  EXPECT_EQ(format_count(-12), "-12");
}

/// Every tag that opens is closed: enough to be XML, as no text here contains a raw < or &.
void expect_balanced(const std::string& svg) {
  std::vector<std::string> open;
  for (std::size_t at = svg.find('<'); at != std::string::npos; at = svg.find('<', at + 1)) {
    const std::size_t end = svg.find('>', at);
    ASSERT_NE(end, std::string::npos);
    const std::string tag = svg.substr(at + 1, end - at - 1);
    if (tag[0] == '/') {
      ASSERT_FALSE(open.empty());
      EXPECT_EQ(open.back(), tag.substr(1));
      open.pop_back();
    } else if (tag.back() != '/') {
      open.push_back(tag.substr(0, tag.find(' ')));
    }
  }
  EXPECT_TRUE(open.empty());
}

TEST(Pictures, are_whole_documents_with_data_tooltips_and_both_colour_schemes) {
  const std::string latency =
      latency_svg("Time <of> it", "e4k2h8i8:bf16 & more",
                  {{"cpu.avx2", {{1, 10, 9, 12, 5}, {16, 100, 90, 120, 50}}}, {"one", {{4, 7, 6, 8, 3}}}});
  const std::string load = expert_load_svg("Load", "x", {{0, {1, 2, 3, 0}}, {1, {0, 0, 0, 0}}});
  for (const std::string& svg : {latency, load}) {
    expect_balanced(svg);
    EXPECT_NE(svg.find("<metadata>{&quot;picture&quot;"), std::string::npos);
    EXPECT_NE(svg.find("prefers-color-scheme:dark"), std::string::npos);
    EXPECT_NE(svg.find("<title>"), std::string::npos);
    EXPECT_EQ(svg.find("nan"), std::string::npos);
    EXPECT_EQ(svg.find("inf\""), std::string::npos);
  }
  EXPECT_NE(latency.find("Time &lt;of&gt; it"), std::string::npos);
  expect_balanced(latency_svg("empty", "", {}));
  expect_balanced(expert_load_svg("empty", "", {}));
}

TEST(OutputFile, that_cannot_be_written_is_an_error_that_names_it) {
  try {
    write_file("/nowhere/at/all.svg", "x");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), StatusCode::bad_file);
    EXPECT_NE(std::string(error.what()).find("/nowhere/at/all.svg"), std::string::npos);
  }
}

TEST(RoutingFlag, forms_and_what_is_wrong_with_others) {
  EXPECT_EQ(parse_routing("zipf:1.5").a, 1.5);
  EXPECT_EQ(parse_routing("hot:4,0.75").n, 4);
  EXPECT_EQ(parse_routing("hot:4,0.75").a, 0.75);
  EXPECT_EQ(parse_routing("trace:r.csv").trace, "r.csv");
  for (const char* wrong :
       {"zipf", "zipf:x", "zipf:-1", "hot:2", "hot:0,0.5", "hot:2,1.5", "trace:", "uniform:3", "zpif:1", ""})
    EXPECT_THROW(static_cast<void>(parse_routing(wrong)), UsageError) << wrong;
}

std::string temporary(const char* name, const std::string& content) {
  const std::string path = testing::TempDir() + name;
  write_file(path, content);
  return path;
}

TEST(RoutingCsv, round_trip_keeps_ids_weights_and_minus_one) {
  Buffer ids(DType::i32, {2, 2}), weights(DType::f32, {2, 2});
  const std::int32_t values[] = {3, -1, 0, 2};
  const float shares[] = {0.1f, 0.0f, 0.7f, 0.3f};
  for (int i = 0; i < 4; ++i) {
    ids.tensor.as<std::int32_t>()[i] = values[i];
    weights.tensor.as<float>()[i] = shares[i];
  }
  const std::string path = temporary("routing.csv", routing_csv_header() + routing_csv(5, ids.tensor, weights.tensor));
  LayerConfig config;
  config.num_experts = 4;
  config.top_k = 2;
  const RoutingRows back = make_routing(parse_routing("trace:" + path), config, 5, 3, 0);
  for (int i = 0; i < 6; ++i) {  // the third row repeats the first
    EXPECT_EQ(back.ids.tensor.as<std::int32_t>()[i], values[i % 4]);
    EXPECT_EQ(back.weights.tensor.as<float>()[i], shares[i % 4]);
  }
  config.num_experts = 3;
  EXPECT_THROW(static_cast<void>(make_routing(parse_routing("trace:" + path), config, 5, 3, 0)), Error);
}

TEST(RoutingCsv, malformed_lines_are_named) {
  for (const char* content :
       {"", "layer,token,slot,expert\n", "layer,token,slot,expert,weight\n0,0,0\n",
        "layer,token,slot,expert,weight\n0,0,0,-2,1\n", "layer,token,slot,expert,weight\n0,0,0,1,1,9\n"}) {
    const std::string path = temporary("bad.csv", content);
    EXPECT_THROW(static_cast<void>(read_routing_csv(path)), Error) << content;
  }
  EXPECT_THROW(static_cast<void>(read_routing_csv("/nowhere.csv")), Error);
}

TEST(RoutingStats, load_and_evenness) {
  Buffer ids(DType::i32, {3, 2});
  const std::int32_t values[] = {0, 1, 0, -1, 0, 1};
  for (int i = 0; i < 6; ++i) ids.tensor.as<std::int32_t>()[i] = values[i];
  const RoutingStats stats = routing_stats(ids.tensor, 4);
  EXPECT_EQ(stats.tokens, (std::vector<std::int64_t>{3, 2, 0, 0}));
  EXPECT_EQ(stats.routes, 5);
  EXPECT_EQ(stats.active, 2);
  EXPECT_DOUBLE_EQ(stats.busiest_over_mean, 2.4);
}

TEST(SampledRows, first_last_and_no_duplicates) {
  EXPECT_EQ(sampled_rows(3, 1), (std::vector<std::int64_t>{0, 1, 2}));
  const std::vector<std::int64_t> rows = sampled_rows(1000, 1);
  EXPECT_EQ(rows.size(), 34u);
  EXPECT_EQ(rows.front(), 0);
  EXPECT_EQ(rows.back(), 999);
  for (std::size_t i = 1; i < rows.size(); ++i) EXPECT_LT(rows[i - 1], rows[i]);
}

}  // namespace
}  // namespace moekit::cli
