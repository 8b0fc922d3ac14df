// moekit: the command-line tool. Exit codes are decided here.
#include <cstdio>
#include <exception>
#include <new>
#include <stdexcept>

#include "console.hpp"
#include "verbs.hpp"

int main(int argc, char** argv) {
  using namespace moekit::cli;
  auto code = [](Exit exit) { return static_cast<int>(exit); };
  try {
    const Exit result = run_command_line(argc, argv);
    if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return code(result);
    talk("moekit: standard output could not be written");
    return code(Exit::bad_file);
  } catch (const UsageError& error) {
    talk(std::string("moekit: ") + error.what());
    return code(Exit::usage);
  } catch (const moekit::Error& error) {
    talk(std::string("moekit: ") + error.what());
    return code(exit_code(error.code()));
  } catch (const std::bad_alloc&) {
    talk("moekit: out of memory");
    return code(Exit::out_of_memory);
  } catch (const std::length_error&) {  // a container that no memory could hold
    talk("moekit: out of memory");
    return code(Exit::out_of_memory);
  } catch (const std::exception& error) {
    talk(std::string("moekit: this is a bug in moekit: ") + error.what());
    return code(Exit::bug);
  }
}
