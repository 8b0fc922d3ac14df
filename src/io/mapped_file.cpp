#include "io/mapped_file.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include <moekit/status.hpp>

#include "text.hpp"

namespace moekit::io {

namespace {

[[noreturn]] void fail(const std::string& path, std::string_view what) {
  const int reason = errno;
  throw Error(StatusCode::bad_file, text::concat("[checkpoint] ", path, ": ", what, ": ", std::strerror(reason)));
}

/// Closes on every way out.
struct Descriptor {
  int number;
  ~Descriptor() {
    if (number >= 0) ::close(number);
  }
};

}  // namespace

MappedFile::MappedFile(const std::string& path) : path_(path) {
  // O_NONBLOCK: a pipe of that name must be refused below, not waited for
  const Descriptor file{::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)};
  if (file.number < 0) fail(path, "cannot be opened");
  struct stat info {};
  if (::fstat(file.number, &info) != 0) fail(path, "cannot be inspected");
  if (!S_ISREG(info.st_mode))
    throw Error(StatusCode::bad_file, text::concat("[checkpoint] ", path, ": is not a regular file"));
  size_ = static_cast<std::size_t>(info.st_size);
  if (size_ == 0) return;
  void* memory = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, file.number, 0);
  if (memory == MAP_FAILED) fail(path, "cannot be mapped");
  data_ = static_cast<const std::byte*>(memory);
}

MappedFile::~MappedFile() {
  if (data_) ::munmap(const_cast<std::byte*>(data_), size_);
}

}  // namespace moekit::io
