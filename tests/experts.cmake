moekit_test(test_quant test_quant.cpp test_quant_config.cpp test_experts_pack.cpp test_shapes.cpp)
