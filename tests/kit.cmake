find_package(nlohmann_json REQUIRED)

add_library(moekit_replay STATIC replay/replay.cpp replay/stand_ins.cpp)
target_include_directories(moekit_replay PUBLIC ${CMAKE_CURRENT_SOURCE_DIR})
target_link_libraries(moekit_replay PUBLIC moekit_internal nlohmann_json::nlohmann_json)
add_executable(replay_trace replay/main.cpp)
target_link_libraries(replay_trace PRIVATE moekit_replay)
set(moekit_traces ${CMAKE_CURRENT_SOURCE_DIR}/data/golden_trace)
add_test(NAME replay_trace COMMAND replay_trace ${moekit_traces}/modular_kernel.jsonl
                                   ${moekit_traces}/normalize_output.jsonl)
set_tests_properties(replay_trace PROPERTIES PASS_REGULAR_EXPRESSION "(^|\n)123 passed, 0 failed, 0 skipped")

moekit_test(test_kit test_kit_records.cpp test_kit_reduce.cpp test_kit_kernel.cpp test_kit_flow.cpp test_kit_memory.cpp
                     test_kit_chunking.cpp)
moekit_test(test_kit_allocation test_kit_allocation.cpp)
moekit_test(test_kit_replay test_kit_replay.cpp)
target_link_libraries(test_kit_replay PRIVATE moekit_replay)

moekit_test(test_dispatch test_dispatch_single_rank.cpp)
moekit_test(test_tail test_tail.cpp)
moekit_test(test_docs_map test_docs_map.cpp)
