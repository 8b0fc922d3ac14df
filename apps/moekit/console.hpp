// What people see: tables on stdout, talk and progress bars (on a terminal only) on stderr.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace moekit::cli {

/// A line on stdout / on stderr.
void print(std::string_view line);
void talk(std::string_view line);

/// Number of columns that a terminal needs for UTF-8 text without combining marks.
std::size_t width(std::string_view text);

/// Columns as wide as their widest cell; a column whose cells are all numbers is aligned to the right.
class Table {
 public:
  explicit Table(std::vector<std::string> header) : header_(std::move(header)) {}
  void row(std::vector<std::string> cells);
  bool empty() const { return rows_.empty(); }
  std::string text(std::string_view indent = "") const;

 private:
  std::vector<std::string> header_;
  std::vector<std::vector<std::string>> rows_;
};

/// Bar with count, rate and remaining time on stderr; silent unless stderr is a terminal. The line is wiped at the end.
class Progress {
 public:
  Progress(std::string title, std::int64_t total);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  void step(std::string_view what = {});  ///< one more is done
  void note(std::string_view what);       ///< redraw with another remark

 private:
  void draw(std::string_view what);
  std::string title_;
  std::int64_t total_, done_ = 0;
  double start_s_, drawn_s_ = 0;
  bool active_;
};

double now_s();  ///< monotonic

std::string format_bytes(double bytes);  ///< "56.9 GiB"
std::string format_us(double us);        ///< "843 ns", "12.3 µs", "4.56 ms", "1.20 s"
std::string format_count(double count);  ///< "1,234,567"
/// printf into a string.
std::string format(const char* pattern, ...) __attribute__((format(printf, 1, 2)));

/// Set by Ctrl-C (install_interrupt_handler); loops look at it between samples. A second Ctrl-C kills.
bool interrupted();
void install_interrupt_handler();

}  // namespace moekit::cli
