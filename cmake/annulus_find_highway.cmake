# Defines hwy::hwy if Highway is installed. Used by the build and, installed next to it, by annulus-config.cmake.
# Some distributions ship Highway with a CMake package, others with a pkg-config file only.

if(NOT TARGET hwy::hwy)
  find_package(HWY CONFIG QUIET)
endif()
if(NOT TARGET hwy::hwy)
  find_package(PkgConfig QUIET)
  if(PkgConfig_FOUND)
    pkg_check_modules(ANNULUS_HWY QUIET IMPORTED_TARGET libhwy)
    if(ANNULUS_HWY_FOUND)
      add_library(hwy::hwy INTERFACE IMPORTED)
      target_link_libraries(hwy::hwy INTERFACE PkgConfig::ANNULUS_HWY)
    endif()
  endif()
endif()
