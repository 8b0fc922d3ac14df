// replay_trace FILE…: 0 all lines agree · 1 a line does not · 2 usage · 3 a file cannot be read
#include <cstdio>
#include <exception>
#include <fstream>

#include "replay/replay.hpp"

using moekit::replay::Differences;
using moekit::replay::Json;

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: replay_trace FILE…\n");
    return 2;
  }
  int passed = 0, failed = 0, skipped = 0;
  for (int i = 1; i < argc; ++i) {
    std::ifstream file(argv[i]);
    if (!file) {
      std::fprintf(stderr, "replay_trace: cannot read %s\n", argv[i]);
      return 3;
    }
    int number = 0;
    for (std::string text; std::getline(file, text);) {
      ++number;
      if (text.empty()) continue;
      Differences differences;
      std::string id = "line " + std::to_string(number);
      bool known = true;
      try {
        const Json line = Json::parse(text);
        id = line.value("id", id);
        differences = moekit::replay::replay_line(line, known);
      } catch (const std::exception& error) {
        differences.push_back({"exception", "none", error.what()});
      }
      if (!known) {
        std::printf("%s:%d: %s: neither a kernel nor an output trace\n", argv[i], number, id.c_str());
        ++skipped;
        continue;
      }
      ++(differences.empty() ? passed : failed);
      for (const auto& d : differences)
        std::printf("%s:%d: %s: %s\n  expected %s\n  got      %s\n", argv[i], number, id.c_str(), d.where.c_str(),
                    d.expected.c_str(), d.got.c_str());
    }
  }
  std::printf("%d passed, %d failed, %d skipped\n", passed, failed, skipped);
  return failed == 0 ? 0 : 1;
}
