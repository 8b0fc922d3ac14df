find_package(nlohmann_json REQUIRED)
moekit_test(test_io test_io_json.cpp test_io_safetensors.cpp test_io_npy.cpp)
moekit_test(test_io_checkpoint test_io_checkpoint.cpp test_io_forms.cpp test_io_refused.cpp test_io_quant.cpp
            test_io_golden.cpp test_io_types.cpp)
target_link_libraries(test_io_checkpoint PRIVATE nlohmann_json::nlohmann_json)
