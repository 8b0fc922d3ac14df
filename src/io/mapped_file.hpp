// A file seen as memory.
#pragma once
#include <cstddef>
#include <string>

namespace moekit::io {

/// Maps a regular file read-only for as long as the object lives. A file that somebody shortens meanwhile faults on
/// access: checkpoints are taken to be finished files.
class MappedFile {
 public:
  /// Throws Error bad_file: the path and the system's reason.
  explicit MappedFile(const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  const std::byte* data_ = nullptr;  // null for an empty file
  std::size_t size_ = 0;
};

}  // namespace moekit::io
