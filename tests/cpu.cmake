moekit_test(test_cpu_toolkit test_cpu_threads.cpp test_cpu_machine.cpp)
moekit_test(test_cpu_experts test_cpu_experts.cpp test_cpu_pack.cpp support/cpu_case.cpp)
