#include "files.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>

#include "console.hpp"
#include "exit_code.hpp"

namespace moekit::cli {
namespace {
namespace fs = std::filesystem;

/// An open file that closes itself.
class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }

 private:
  int fd_;
};

[[noreturn]] void bad(const char* stage, const std::string& what, const char* hint) {
  throw Error(StatusCode::bad_file, format("[%s] %s", stage, what.c_str()), hint);
}

/// Opens without waiting (a pipe without a writer would) and looks at what is open, not at what the name meant before.
int open_regular(const std::string& path, const char* stage, std::int64_t limit, std::int64_t& size) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) bad(stage, format("cannot open %s: %s", path.c_str(), std::strerror(errno)), "give a file to read");
  struct stat info {};
  const bool known = ::fstat(fd, &info) == 0;
  size = known ? static_cast<std::int64_t>(info.st_size) : 0;
  if (known && S_ISREG(info.st_mode) && size <= limit) return fd;
  ::close(fd);
  if (known && S_ISREG(info.st_mode))
    bad(stage,
        format("%s has %s, at most %s are read", path.c_str(), format_bytes(static_cast<double>(size)).c_str(),
               format_bytes(static_cast<double>(limit)).c_str()),
        "give a smaller file");
  bad(stage, path + " is no regular file", "give a file, no folder, device or pipe");
}

}  // namespace

void require_input(const std::string& path, const char* stage, std::int64_t limit) {
  std::int64_t size = 0;
  const Descriptor file(open_regular(path, stage, limit, size));
}

std::string read_input(const std::string& path, const char* stage, std::int64_t limit) {
  std::int64_t size = 0;
  const Descriptor file(open_regular(path, stage, limit, size));
  std::string out(static_cast<std::size_t>(size), '\0');
  std::size_t have = 0;
  while (have < out.size()) {
    const ssize_t n = ::read(file.get(), out.data() + have, out.size() - have);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) bad(stage, format("cannot read %s: %s", path.c_str(), std::strerror(errno)), "");
    if (n == 0) break;  // it became shorter meanwhile
    have += static_cast<std::size_t>(n);
  }
  out.resize(have);
  return out;
}

void require_output(const std::string& path) {
  const int made = ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (made >= 0) {
    ::close(made);
    ::unlink(path.c_str());
    return;
  }
  int problem = errno;
  if (problem == EEXIST) {
    const Descriptor file(::open(path.c_str(), O_WRONLY | O_CLOEXEC | O_NONBLOCK));
    if (file.get() >= 0) return;
    problem = errno;
  }
  throw Error(StatusCode::bad_file, format("[output] cannot open %s: %s", path.c_str(), std::strerror(problem)),
              "give a path in a folder that exists and can be written");
}

void require_distinct(std::initializer_list<NamedFile> files) {
  auto same = [](const std::string& a, const std::string& b) {
    std::error_code ignored;
    if (fs::equivalent(a, b, ignored)) return true;
    std::error_code failed;
    const fs::path x = fs::weakly_canonical(a, failed), y = fs::weakly_canonical(b, failed);
    return !failed && x == y;
  };
  for (const NamedFile& a : files)
    for (const NamedFile& b : files)
      if (&a < &b && !a.path.empty() && !b.path.empty() && same(a.path, b.path))
        throw UsageError(format("%s and %s name the same file, %s", a.flag, b.flag, b.path.c_str()));
}

}  // namespace moekit::cli
