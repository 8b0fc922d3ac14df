// docs/vllm_map.md names headers, symbols and tests: all of them exist.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <regex>
#include <sstream>

namespace {

const std::string kRoot = MOEKIT_SOURCE_DIR;

std::string read(const std::filesystem::path& path) {
  std::ifstream in(path);
  return {std::istreambuf_iterator<char>(in), {}};
}

std::string all_tests() {
  std::string out;
  for (const auto& file : std::filesystem::directory_iterator(kRoot + "/tests"))
    if (file.path().extension() == ".cpp") out += read(file.path());
  return out;
}

struct Row {
  std::string text, header, symbol, test;
};

std::vector<Row> rows(const std::string& document) {
  std::vector<Row> out;
  const std::regex pattern(R"(^\|(.*)\| `([^`]*\.hpp)` \| `([^`]*)` \| `([^`]*)` \|$)");
  std::istringstream lines(document);
  for (std::string line; std::getline(lines, line);) {
    std::smatch m;
    if (std::regex_match(line, m, pattern)) out.push_back({line, m[2], m[3], m[4]});
  }
  return out;
}

/// Empty if all of the row exists.
std::string missing(const Row& row, const std::string& tests) {
  const std::filesystem::path header = kRoot + "/include/moekit/" + row.header;
  if (!std::filesystem::exists(header)) return "header " + row.header;
  const std::string text = read(header);
  const std::size_t at = row.symbol.find("::");
  for (const std::string& word :
       {row.symbol.substr(0, at), at == std::string::npos ? row.symbol : row.symbol.substr(at + 2)})
    if (!std::regex_search(text, std::regex("\\b" + word + "\\b"))) return "symbol " + word + " in " + row.header;
  const std::size_t dot = row.test.find('.');
  if (dot == std::string::npos) return "test " + row.test + " without a suite";
  const std::string suite = row.test.substr(0, dot), name = row.test.substr(dot + 1);
  if (!std::regex_search(tests, std::regex("TEST\\(" + suite + ",\\s+" + name + "\\)"))) return "test " + row.test;
  return {};
}

TEST(docs_map, every_header_symbol_and_test_exists) {
  const std::string document = read(kRoot + "/docs/vllm_map.md"), tests = all_tests();
  const std::vector<Row> table = rows(document);
  EXPECT_GE(table.size(), 45u);
  for (const Row& row : table) EXPECT_EQ(missing(row, tests), "") << row.text;
  // every line of the table was understood
  std::istringstream lines(document);
  std::size_t count = 0;
  for (std::string line; std::getline(lines, line);) count += line.starts_with("|");
  EXPECT_EQ(table.size() + 2, count);
}

TEST(docs_map, a_name_that_does_not_exist_is_noticed) {
  const std::string tests = all_tests();
  const Row good{"", "kit/routing.hpp", "ExpertTokens::from_host", "docs_map.a_name_that_does_not_exist_is_noticed"};
  EXPECT_EQ(missing(good, tests), "");
  Row bad = good;
  bad.header = "kit/nothing.hpp";
  EXPECT_EQ(missing(bad, tests), "header kit/nothing.hpp");
  bad = good, bad.symbol = "ExpertTokens::from_hosts";
  EXPECT_EQ(missing(bad, tests), "symbol from_hosts in kit/routing.hpp");
  bad = good, bad.test = "docs_map.a_name";
  EXPECT_EQ(missing(bad, tests), "test docs_map.a_name");
}

}  // namespace
