// What every consumer project builds and runs: the headers, the library and its version agree.
#include <moekit/moekit.hpp>

#include <cstdio>
#include <string>

int main() {
  const std::string expected = MOEKIT_CONSUMER_EXPECTS;
  std::printf("moekit %s\n", moekit::version());
  return moekit::version() == expected ? 0 : 1;
}
