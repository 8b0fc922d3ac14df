moekit_test(test_quant test_quant.cpp test_quant_config.cpp test_experts_pack.cpp test_shapes.cpp)
moekit_test(test_experts test_experts_suite.cpp test_experts_mutants.cpp)
moekit_test(test_experts_edge test_experts_edge.cpp)
