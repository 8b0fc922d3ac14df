# The project as others meet it: house limits, exported symbols, and consumers that build against an installed tree, the
# build tree, pkg-config and the sources. `ctest -C Full` adds what compiles the library again.
find_package(Python3 COMPONENTS Interpreter)
if(Python3_FOUND)
  add_test(NAME house_rules COMMAND Python3::Interpreter ${PROJECT_SOURCE_DIR}/scripts/check_house)
  add_test(NAME house_rules_find_faults
           COMMAND Python3::Interpreter ${CMAKE_CURRENT_SOURCE_DIR}/test_check_house.py)
endif()

# Sanitizers say nothing about packaging and would have to be repeated in every consumer.
if(MOEKIT_SANITIZE)
  return()
endif()

set(consumer_dir ${PROJECT_BINARY_DIR}/consumer)
set(consumer_prefix ${consumer_dir}/prefix)
set(consumer_static OFF)
if(NOT BUILD_SHARED_LIBS)
  set(consumer_static ON)
endif()

# consumer_test(NAME SOURCE option…): configures, builds and runs tests/consumer/SOURCE
function(consumer_test name source)
  add_test(NAME consumer_${name} ${consumer_when}
           COMMAND ${CMAKE_COMMAND} -E env ${consumer_env} ${CMAKE_CTEST_COMMAND} --build-and-test
                   ${CMAKE_CURRENT_SOURCE_DIR}/consumer/${source} ${consumer_dir}/${name} --build-noclean
                   --build-generator ${CMAKE_GENERATOR} --build-makeprogram ${CMAKE_MAKE_PROGRAM}
                   --build-target consumer --build-options -DEXPECTED_VERSION=${PROJECT_VERSION}
                   -DCMAKE_CXX_COMPILER=${CMAKE_CXX_COMPILER}
                   -DCMAKE_CXX_COMPILER_LAUNCHER=${CMAKE_CXX_COMPILER_LAUNCHER} ${ARGN}
                   --test-command consumer)
  set_tests_properties(consumer_${name} PROPERTIES TIMEOUT 900 FIXTURES_REQUIRED "${consumer_fixture}")
endfunction()

add_test(NAME consumer_build COMMAND ${CMAKE_COMMAND} --build ${PROJECT_BINARY_DIR} --target moekit)
add_test(NAME consumer_clean COMMAND ${CMAKE_COMMAND} -E rm -rf ${consumer_dir})
foreach(component library development)
  add_test(NAME consumer_install_${component}
           COMMAND ${CMAKE_COMMAND} --install ${PROJECT_BINARY_DIR} --prefix ${consumer_prefix} --component ${component})
  set_tests_properties(consumer_install_${component} PROPERTIES FIXTURES_SETUP moekit_installed
                                                                FIXTURES_REQUIRED moekit_built)
endforeach()
set_tests_properties(consumer_build PROPERTIES FIXTURES_SETUP moekit_built TIMEOUT 1800)
set_tests_properties(consumer_clean PROPERTIES FIXTURES_SETUP moekit_built)

set(consumer_fixture moekit_installed)
consumer_test(find_package find_package -DCMAKE_PREFIX_PATH=${consumer_prefix})
find_program(MOEKIT_PKG_CONFIG pkg-config)
if(MOEKIT_PKG_CONFIG)
  set(consumer_env PKG_CONFIG_PATH=${consumer_prefix}/${CMAKE_INSTALL_LIBDIR}/pkgconfig)
  consumer_test(pkg_config pkg_config -DMOEKIT_STATIC=${consumer_static})
  set(consumer_env "")
endif()
set(consumer_fixture moekit_built)
consumer_test(build_tree find_package -Dmoekit_DIR=${PROJECT_BINARY_DIR})
set(consumer_when CONFIGURATIONS Full)
consumer_test(fetch_content fetch_content -DMOEKIT_SOURCE=${PROJECT_SOURCE_DIR} -DCMAKE_BUILD_TYPE=Release)

if(BUILD_SHARED_LIBS AND CMAKE_NM)
  add_test(NAME exported_symbols
           COMMAND ${CMAKE_COMMAND} -DNM=${CMAKE_NM} -DLIBRARY=$<TARGET_FILE:moekit>
                   -P ${CMAKE_CURRENT_SOURCE_DIR}/consumer/check_exports.cmake)
  set_tests_properties(exported_symbols PROPERTIES FIXTURES_REQUIRED moekit_built)
endif()
