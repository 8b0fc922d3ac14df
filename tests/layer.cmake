moekit_test(test_layer test_plan.cpp test_plan_entries.cpp test_plan_open.cpp test_layer.cpp test_layer_parts.cpp test_layer_batched_map.cpp
                       test_layer_bad_calls.cpp)
moekit_test(test_no_allocation test_no_allocation.cpp)
