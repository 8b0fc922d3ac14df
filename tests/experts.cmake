moekit_test(test_quant test_quant.cpp test_quant_config.cpp test_experts_pack.cpp test_shapes.cpp)
moekit_test(test_experts test_experts_suite.cpp test_experts_mutants.cpp test_experts_oracle.cpp)
moekit_test(test_experts_edge test_experts_edge.cpp)
# Every row of the edge shapes, and the layers of published models: about 30 minutes.
add_test(NAME test_experts_full CONFIGURATIONS Full COMMAND ${CMAKE_COMMAND} -E env MOEKIT_FULL=1 $<TARGET_FILE:test_experts_edge>)
set_tests_properties(test_experts test_experts_edge PROPERTIES TIMEOUT 1800)
set_tests_properties(test_experts_full PROPERTIES TIMEOUT 5400)
