# The library needs Highway, fmt and threads. Everything else is optional: what is missing switches its part off and says so.

include(annulus_find_highway)
if(NOT TARGET hwy::hwy)
  message(FATAL_ERROR "Highway (SIMD) was not found. Install it (Debian, Ubuntu: libhwy-dev; Fedora: highway-devel; "
                      "Homebrew: highway) or set HWY_DIR to the directory of its hwy-config.cmake.")
endif()

find_package(fmt QUIET)
if(NOT fmt_FOUND)
  message(FATAL_ERROR "fmt was not found. Install it (Debian, Ubuntu: libfmt-dev; Fedora: fmt-devel; Homebrew: fmt) "
                      "or set fmt_DIR to the directory of its fmt-config.cmake.")
endif()

set(THREADS_PREFER_PTHREAD_FLAG ON)
find_package(Threads REQUIRED)

# annulus_optional(<option> <what is lost> PACKAGES <package>... DEBIAN <apt package>...): turns <option> off, in the
# caller's scope and for this run only, when one of the packages is missing.
macro(annulus_optional option what)
  if(${option})
    cmake_parse_arguments(_annulus "" "" "PACKAGES;DEBIAN" ${ARGN})
    foreach(_annulus_package IN LISTS _annulus_PACKAGES)
      find_package(${_annulus_package} QUIET)
      if(NOT ${_annulus_package}_FOUND)
        list(JOIN _annulus_DEBIAN " " _annulus_debian)
        message(STATUS "annulus: ${what} will not be built: ${_annulus_package} was not found "
                       "(Debian, Ubuntu: apt-get install ${_annulus_debian})")
        set(${option} OFF)
        break()
      endif()
    endforeach()
  endif()
endmacro()

annulus_optional(ANNULUS_BUILD_CLI "the command-line tool"
  PACKAGES CLI11 nlohmann_json DEBIAN libcli11-dev nlohmann-json3-dev)
annulus_optional(ANNULUS_BUILD_TESTS "the tests" PACKAGES GTest DEBIAN libgtest-dev)
annulus_optional(ANNULUS_BUILD_BENCH "the benchmarks" PACKAGES benchmark DEBIAN libbenchmark-dev)
