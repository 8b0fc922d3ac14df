# Install rules: headers, library, find_package(moekit) and pkg-config; and the same package in the build tree.
include(CMakePackageConfigHelpers)

# Before 1.0 every minor version may change the C++ ABI, so it is part of the SONAME.
set_target_properties(moekit PROPERTIES VERSION ${PROJECT_VERSION}
                                        SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR})

# Instantiations of std templates have default visibility whatever -fvisibility says; the script keeps them in.
get_target_property(moekit_library_type moekit TYPE)
if(moekit_library_type STREQUAL "SHARED_LIBRARY" AND CMAKE_SYSTEM_NAME STREQUAL "Linux")
  set(moekit_exports ${CMAKE_CURRENT_LIST_DIR}/moekit_exports.map)
  target_link_options(moekit PRIVATE LINKER:--version-script=${moekit_exports})
  set_target_properties(moekit PROPERTIES LINK_DEPENDS ${moekit_exports})
endif()

set(moekit_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/moekit)
install(TARGETS moekit EXPORT moekitTargets
        RUNTIME COMPONENT library
        LIBRARY COMPONENT library NAMELINK_COMPONENT development
        ARCHIVE COMPONENT development
        INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/moekit DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT development)
install(EXPORT moekitTargets NAMESPACE moekit:: DESTINATION ${moekit_package_dir} COMPONENT development)
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR} COMPONENT library)

configure_package_config_file(${PROJECT_SOURCE_DIR}/packaging/moekitConfig.cmake.in
                              ${PROJECT_BINARY_DIR}/moekitConfig.cmake INSTALL_DESTINATION ${moekit_package_dir}
                              NO_SET_AND_CHECK_MACRO)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/moekitConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/moekitConfig.cmake ${PROJECT_BINARY_DIR}/moekitConfigVersion.cmake
        DESTINATION ${moekit_package_dir} COMPONENT development)
# The build tree is a package too: -Dmoekit_DIR=<build directory>.
export(EXPORT moekitTargets NAMESPACE moekit:: FILE ${PROJECT_BINARY_DIR}/moekitTargets.cmake)

# pkg-config finds the prefix from its own place, so that an installed tree can be moved.
file(RELATIVE_PATH moekit_pc_prefix /prefix/${CMAKE_INSTALL_LIBDIR}/pkgconfig /prefix)
string(REGEX REPLACE "/$" "" moekit_pc_prefix "${moekit_pc_prefix}")
configure_file(${PROJECT_SOURCE_DIR}/packaging/moekit.pc.in ${PROJECT_BINARY_DIR}/moekit.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/moekit.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig COMPONENT development)

if(TARGET moekit_cli)
  install(TARGETS moekit_cli RUNTIME COMPONENT tools)
endif()
