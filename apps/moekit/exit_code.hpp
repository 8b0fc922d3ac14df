// What the process returns: fixed numbers that scripts rely on.
#pragma once
#include <stdexcept>
#include <string>

#include <moekit/status.hpp>

namespace moekit::cli {

enum class Exit : int {
  ok = 0,
  check_failed = 1,  ///< verify or bench found a wrong result
  usage = 2,         ///< the command line
  bad_file = 3,      ///< an input file, or an output file that cannot be written
  unsupported = 4,
  out_of_memory = 5,
  device = 6,
  interrupted = 7,  ///< partial results were kept
  bug = 70,
};

inline Exit exit_code(StatusCode code) {
  switch (code) {
    case StatusCode::ok: return Exit::ok;
    case StatusCode::invalid_argument:
    case StatusCode::invalid_shape:
    case StatusCode::invalid_dtype: return Exit::usage;
    case StatusCode::unsupported: return Exit::unsupported;
    case StatusCode::bad_file: return Exit::bad_file;
    case StatusCode::out_of_memory: return Exit::out_of_memory;
    case StatusCode::device_error:
    case StatusCode::aborted: return Exit::device;
    case StatusCode::workspace_too_small:  // the tool sizes workspaces by itself
    case StatusCode::internal: return Exit::bug;
  }
  return Exit::bug;
}

/// A command line that says something impossible: exit 2.
class UsageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace moekit::cli
