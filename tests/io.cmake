moekit_test(test_io test_io_json.cpp test_io_safetensors.cpp test_io_npy.cpp)
moekit_test(test_io_checkpoint test_io_checkpoint.cpp test_io_forms.cpp test_io_refused.cpp test_io_quant.cpp
            test_io_golden.cpp)

# libFuzzer targets: cmake -DCMAKE_CXX_COMPILER=clang++ -DMOEKIT_FUZZ=ON -DMOEKIT_SANITIZE=address,undefined
option(MOEKIT_FUZZ "Build the fuzzing targets (clang)" OFF)
if(MOEKIT_FUZZ)
  target_compile_options(moekit_objects PRIVATE -fsanitize=fuzzer-no-link)
  foreach(parser json safetensors)
    add_executable(fuzz_${parser} fuzz/fuzz_${parser}.cpp)
    target_link_libraries(fuzz_${parser} PRIVATE moekit_internal)
    target_compile_options(fuzz_${parser} PRIVATE -fsanitize=fuzzer)
    target_link_options(fuzz_${parser} PRIVATE -fsanitize=fuzzer)
  endforeach()
endif()
