find_package(nlohmann_json REQUIRED)

add_library(moekit_replay STATIC replay/replay.cpp replay/stand_ins.cpp)
target_include_directories(moekit_replay PUBLIC ${CMAKE_CURRENT_SOURCE_DIR})
target_link_libraries(moekit_replay PUBLIC moekit_internal nlohmann_json::nlohmann_json)
add_executable(replay_trace replay/main.cpp)
target_link_libraries(replay_trace PRIVATE moekit_replay)
set(moekit_traces ${CMAKE_CURRENT_SOURCE_DIR}/data/golden_trace)
add_test(NAME replay_trace COMMAND replay_trace ${moekit_traces}/modular_kernel.jsonl
                                   ${moekit_traces}/normalize_output.jsonl)
set_tests_properties(replay_trace PROPERTIES PASS_REGULAR_EXPRESSION "\n123 passed, 0 failed, 0 skipped\n$")
