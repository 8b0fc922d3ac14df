moekit_test(test_io test_io_json.cpp test_io_safetensors.cpp test_io_npy.cpp)
moekit_test(test_io_checkpoint test_io_checkpoint.cpp test_io_forms.cpp test_io_refused.cpp test_io_quant.cpp
            test_io_golden.cpp)
