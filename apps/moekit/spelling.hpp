// The nearest spelling of a word that does not exist, and globs.
#pragma once
#include <algorithm>
#include <numeric>
#include <string>
#include <string_view>
#include <vector>

namespace moekit::cli {

/// Insertions, deletions, replacements and exchanges of neighbours (Damerau's optimal string alignment).
inline int edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::vector<int>> d(a.size() + 1, std::vector<int>(b.size() + 1));
  for (std::size_t i = 0; i <= a.size(); ++i) d[i][0] = static_cast<int>(i);
  for (std::size_t j = 0; j <= b.size(); ++j) d[0][j] = static_cast<int>(j);
  for (std::size_t i = 1; i <= a.size(); ++i) {
    for (std::size_t j = 1; j <= b.size(); ++j) {
      d[i][j] = std::min({d[i - 1][j] + 1, d[i][j - 1] + 1, d[i - 1][j - 1] + (a[i - 1] != b[j - 1])});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
        d[i][j] = std::min(d[i][j], d[i - 2][j - 2] + 1);
    }
  }
  return d[a.size()][b.size()];
}

/// The known word that `word` most likely meant; empty if none is near.
inline std::string nearest(std::string_view word, const std::vector<std::string>& known) {
  std::string best;
  int distance = static_cast<int>(std::max<std::size_t>(2, word.size() / 2)) + 1;
  for (const std::string& candidate : known) {
    const int d = edit_distance(word, candidate);
    if (d < distance) {
      distance = d;
      best = candidate;
    }
  }
  return best;
}

/// * and ? as shells have them.
inline bool glob_match(std::string_view pattern, std::string_view text) {
  if (pattern.empty()) return text.empty();
  if (pattern[0] == '*')
    return glob_match(pattern.substr(1), text) || (!text.empty() && glob_match(pattern, text.substr(1)));
  return !text.empty() && (pattern[0] == '?' || pattern[0] == text[0]) && glob_match(pattern.substr(1), text.substr(1));
}

}  // namespace moekit::cli
