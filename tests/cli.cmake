# The tool: its parts by GoogleTest, the verbs by a driver over the binary.
if(TARGET moekit_cli)
  moekit_test(test_cli_parts test_cli_parts.cpp test_cli_bench.cpp)
  target_link_libraries(test_cli_parts PRIVATE moekit_cli_objects)

  find_package(Python3 COMPONENTS Interpreter REQUIRED)
  add_test(NAME test_cli_verbs COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/test_cli_verbs.py
                                       $<TARGET_FILE:moekit_cli> ${PROJECT_SOURCE_DIR})
  set_tests_properties(test_cli_verbs PROPERTIES TIMEOUT 600)
endif()
