#include "console.hpp"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstring>

namespace moekit::cli {

void print(std::string_view line) {
  std::fwrite(line.data(), 1, line.size(), stdout);
  std::fputc('\n', stdout);
  std::fflush(stdout);
}

void talk(std::string_view line) {
  std::fflush(stdout);
  std::fwrite(line.data(), 1, line.size(), stderr);
  std::fputc('\n', stderr);
}

std::size_t width(std::string_view text) {
  return static_cast<std::size_t>(
      std::count_if(text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xc0) != 0x80; }));
}

// ---- Table -----------------------------------------------------------------------------------------------------

namespace {

bool looks_numeric(std::string_view cell) {
  if (cell.empty() || cell == "–" || cell == "-") return true;
  return (cell[0] >= '0' && cell[0] <= '9') ||
         ((cell[0] == '-' || cell[0] == '+' || cell[0] == '.') && cell.size() > 1 && cell[1] >= '0' && cell[1] <= '9');
}

}  // namespace

void Table::row(std::vector<std::string> cells) {
  cells.resize(header_.size());
  rows_.push_back(std::move(cells));
}

std::string Table::text(std::string_view indent) const {
  std::vector<std::size_t> widths(header_.size());
  std::vector<bool> numeric(header_.size(), true);
  for (std::size_t c = 0; c < header_.size(); ++c) {
    widths[c] = width(header_[c]);
    for (const auto& row : rows_) {
      widths[c] = std::max(widths[c], width(row[c]));
      numeric[c] = numeric[c] && looks_numeric(row[c]);
    }
  }
  std::string out;
  auto line = [&](const std::vector<std::string>& cells) {
    std::string text(indent);
    for (std::size_t c = 0; c < cells.size(); ++c) {
      const std::string padding(widths[c] - width(cells[c]), ' ');
      text += numeric[c] ? padding + cells[c] : cells[c] + padding;
      if (c + 1 < cells.size()) text += "  ";
    }
    while (!text.empty() && text.back() == ' ') text.pop_back();
    out += text + '\n';
  };
  line(header_);
  for (const auto& row : rows_) line(row);
  if (!out.empty()) out.pop_back();
  return out;
}

// ---- Progress --------------------------------------------------------------------------------------------------

Progress::Progress(std::string title, std::int64_t total)
    : title_(std::move(title)),
      total_(std::max<std::int64_t>(total, 1)),
      start_s_(now_s()),
      active_(isatty(STDERR_FILENO) == 1) {}

Progress::~Progress() {
  if (active_ && drawn_s_ > 0) std::fputs("\r\033[K", stderr);
}

void Progress::step(std::string_view what) {
  done_ = std::min(done_ + 1, total_);
  draw(what);
}

void Progress::note(std::string_view what) { draw(what); }

void Progress::draw(std::string_view what) {
  if (!active_) return;
  const double now = now_s();
  if (drawn_s_ > 0 && now - drawn_s_ < 0.1 && done_ < total_) return;
  drawn_s_ = now;
  constexpr int kCells = 24;
  const int full = static_cast<int>(done_ * kCells / total_);
  std::string bar;
  for (int i = 0; i < kCells; ++i) bar += i < full ? "█" : "░";
  const double elapsed = now - start_s_;
  const double left = done_ > 0 ? elapsed / static_cast<double>(done_) * static_cast<double>(total_ - done_) : 0;
  const std::string line = format("%s %s %lld/%lld  %.0f s left  ", title_.c_str(), bar.c_str(),
                                  static_cast<long long>(done_), static_cast<long long>(total_), left) +
                           std::string(what);
  std::fputs(("\r\033[K" + line).c_str(), stderr);
  std::fflush(stderr);
}

double now_s() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// ---- numbers ---------------------------------------------------------------------------------------------------

std::string format(const char* pattern, ...) {
  std::va_list args, again;
  va_start(args, pattern);
  va_copy(again, args);
  const int length = std::vsnprintf(nullptr, 0, pattern, args);
  va_end(args);
  std::string out(static_cast<std::size_t>(std::max(length, 0)), '\0');
  std::vsnprintf(out.data(), out.size() + 1, pattern, again);
  va_end(again);
  return out;
}

namespace {
/// Three significant digits.
std::string three(double value) {
  if (value >= 99.95) return format("%.0f", value);
  if (value >= 9.995) return format("%.1f", value);
  return format("%.2f", value);
}
}  // namespace

std::string format_bytes(double bytes) {
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  int unit = 0;
  while (bytes >= 1024 && unit < 4) {
    bytes /= 1024;
    ++unit;
  }
  return unit == 0 ? format("%.0f B", bytes) : three(bytes) + " " + kUnits[unit];
}

std::string format_us(double us) {
  if (us < 1) return three(us * 1e3) + " ns";
  if (us < 1e3) return three(us) + " µs";
  if (us < 1e6) return three(us * 1e-3) + " ms";
  return three(us * 1e-6) + " s";
}

std::string format_count(double count) {
  std::string digits = format("%.0f", count);
  for (std::ptrdiff_t at = static_cast<std::ptrdiff_t>(digits.size()) - 3; at > (digits[0] == '-' ? 1 : 0); at -= 3)
    digits.insert(static_cast<std::size_t>(at), ",");
  return digits;
}

// ---- Ctrl-C ----------------------------------------------------------------------------------------------------

namespace {
volatile std::sig_atomic_t g_interrupted = 0;
}

bool interrupted() { return g_interrupted != 0; }

void install_interrupt_handler() {
  struct sigaction action {};
  action.sa_handler = [](int) { g_interrupted = 1; };
  action.sa_flags = static_cast<int>(SA_RESETHAND);  // the second one kills
  sigaction(SIGINT, &action, nullptr);
}

}  // namespace moekit::cli
