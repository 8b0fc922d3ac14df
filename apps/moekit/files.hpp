// Files that a command line names: read whole, with a limit; outputs tried before the work begins.
#pragma once
#include <cstdint>
#include <initializer_list>
#include <string>

namespace moekit::cli {

inline constexpr std::int64_t kLargestText = std::int64_t{256} << 20;  ///< routing CSVs, lists of shapes
inline constexpr std::int64_t kLargestArray = std::int64_t{8} << 30;   ///< .npy

/// Throws Error(bad_file) unless `path` is a regular file of at most `limit` bytes: devices and pipes may never end.
void require_input(const std::string& path, const char* stage, std::int64_t limit);
/// Contents of such a file.
std::string read_input(const std::string& path, const char* stage, std::int64_t limit);

/// Throws Error(bad_file) unless the file can be opened for writing. Leaves an existing file as it is, and none behind.
void require_output(const std::string& path);

/// A flag and the file that it names; empty = not given.
struct NamedFile {
  const char* flag;
  const std::string& path;
};
/// Throws UsageError when two flags name the same file, whatever the spelling.
void require_distinct(std::initializer_list<NamedFile> files);

}  // namespace moekit::cli
