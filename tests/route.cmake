moekit_test(test_route test_route_values.cpp test_route_groups.cpp test_route_matrix.cpp test_route_gemm.cpp
            test_route_simulated.cpp test_route_golden.cpp)
moekit_test(test_route_calls test_route_calls.cpp)  # replaces operator new, to count
