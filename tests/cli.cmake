# The tool: its parts by GoogleTest, the verbs by a driver over the binary.
if(TARGET moekit_cli)
  moekit_test(test_cli_parts test_cli_parts.cpp test_cli_bench.cpp)
  target_link_libraries(test_cli_parts PRIVATE moekit_cli_objects)

  find_package(Python3 COMPONENTS Interpreter REQUIRED)
  foreach(driver test_cli_verbs test_cli_refusals)
    add_test(NAME ${driver} COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/${driver}.py
                                    $<TARGET_FILE:moekit_cli> ${PROJECT_SOURCE_DIR})
    set_tests_properties(${driver} PROPERTIES TIMEOUT 600)
  endforeach()

  # batch_invariant on 1, 2, 3 and 8 threads: one published layer, and all of them (4 minutes on two cores).
  add_test(NAME test_cli_bits COMMAND moekit_cli verify e32k8h1024i512:bf16 --bits)
  add_test(NAME test_cli_bits_full CONFIGURATIONS Full
           COMMAND moekit_cli verify ${PROJECT_SOURCE_DIR}/shapes/models.txt --bits)
  set_tests_properties(test_cli_bits PROPERTIES TIMEOUT 300)
  set_tests_properties(test_cli_bits_full PROPERTIES TIMEOUT 3600)
endif()
