moekit_test(test_base test_numeric.cpp test_config.cpp)
