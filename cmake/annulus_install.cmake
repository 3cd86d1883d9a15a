# Headers, library, tool and the CMake package: find_package(annulus), annulus::annulus.

include(CMakePackageConfigHelpers)
set(annulus_package_dir "${CMAKE_INSTALL_LIBDIR}/cmake/annulus")

install(DIRECTORY "${PROJECT_SOURCE_DIR}/include/annulus" DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}"
  FILES_MATCHING PATTERN "*.h")
install(TARGETS annulus EXPORT annulus-targets)
install(EXPORT annulus-targets NAMESPACE annulus:: DESTINATION "${annulus_package_dir}")
if(TARGET annulus_tool)
  install(TARGETS annulus_tool)
endif()

configure_package_config_file(
  "${PROJECT_SOURCE_DIR}/cmake/annulus-config.cmake.in" "${PROJECT_BINARY_DIR}/package/annulus-config.cmake"
  INSTALL_DESTINATION "${annulus_package_dir}")
# Before 1.0 a minor version may change the interface.
write_basic_package_version_file("${PROJECT_BINARY_DIR}/package/annulus-config-version.cmake"
  COMPATIBILITY SameMinorVersion)
install(FILES
  "${PROJECT_BINARY_DIR}/package/annulus-config.cmake"
  "${PROJECT_BINARY_DIR}/package/annulus-config-version.cmake"
  "${PROJECT_SOURCE_DIR}/cmake/annulus_find_highway.cmake"
  DESTINATION "${annulus_package_dir}")
