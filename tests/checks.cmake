moekit_test(test_checks test_checks_values.cpp test_checks_tensors.cpp test_checks_overlap.cpp
            test_checks_routing.cpp)
