moekit_test(test_route test_route_values.cpp test_route_groups.cpp)
