moekit_test(test_cpu_toolkit test_cpu_threads.cpp test_cpu_machine.cpp test_cpu_caches.cpp)
moekit_test(test_cpu_experts test_cpu_experts.cpp test_cpu_pack.cpp support/cpu_case.cpp)

add_executable(test_cpu_math test_cpu_math.cpp support/cpu_math_portable.cpp)
target_link_libraries(test_cpu_math PRIVATE moekit_test_support)
set_source_files_properties(support/cpu_math_portable.cpp PROPERTIES COMPILE_OPTIONS "-ffp-contract=off")
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  target_sources(test_cpu_math PRIVATE support/cpu_math_avx2.cpp)
  set_source_files_properties(support/cpu_math_avx2.cpp PROPERTIES COMPILE_OPTIONS "-mavx2;-mfma;-mf16c;-ffp-contract=off")
endif()
add_test(NAME test_cpu_math COMMAND test_cpu_math)

if(NOT MOEKIT_SANITIZE)  # sanitizers add symbols of their own
  add_test(NAME test_cpu_unit_symbols
           COMMAND ${CMAKE_COMMAND} -DNM=${CMAKE_NM} "-DOBJECTS=$<FILTER:$<TARGET_OBJECTS:moekit_objects>,INCLUDE,cpu/unit_.*>"
                   -P ${CMAKE_CURRENT_SOURCE_DIR}/check_unit_symbols.cmake)
endif()
