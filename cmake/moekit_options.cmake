# Compile options that every target of the project shares.
add_library(moekit_options INTERFACE)
target_compile_options(moekit_options INTERFACE -Wall -Wextra -Wshadow -Wconversion -Wno-sign-conversion -Wno-psabi)
if(MOEKIT_WERROR)
  # GCC 12 sees overlapping copies in its own std::string (GCC bug 105651).
  target_compile_options(moekit_options INTERFACE -Werror $<$<CXX_COMPILER_ID:GNU>:-Wno-error=restrict>)
endif()
if(MOEKIT_SANITIZE)
  target_compile_options(moekit_options INTERFACE -fsanitize=${MOEKIT_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all)
  target_link_options(moekit_options INTERFACE -fsanitize=${MOEKIT_SANITIZE})
endif()
