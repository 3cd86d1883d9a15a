# Build type, compiler cache, warnings and sanitizers.

if(PROJECT_IS_TOP_LEVEL)
  # An empty build type would mean no optimisation at all: the kernels would be a hundred times slower.
  get_property(multi_config GLOBAL PROPERTY GENERATOR_IS_MULTI_CONFIG)
  if(NOT multi_config AND NOT CMAKE_BUILD_TYPE)
    set(CMAKE_BUILD_TYPE Release CACHE STRING "Build type" FORCE)
  endif()
  set(CMAKE_EXPORT_COMPILE_COMMANDS ON)

  find_program(ANNULUS_CCACHE ccache)
  mark_as_advanced(ANNULUS_CCACHE)
  if(ANNULUS_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
    set(CMAKE_CXX_COMPILER_LAUNCHER "${ANNULUS_CCACHE}")
    set(CMAKE_CUDA_COMPILER_LAUNCHER "${ANNULUS_CCACHE}")
    message(STATUS "annulus: compiling through ccache")
  endif()
endif()

# annulus_warnings(<target>): the project's warnings, as errors in developer mode.
function(annulus_warnings target)
  if(NOT CMAKE_CXX_COMPILER_ID MATCHES "GNU|Clang")
    return()
  endif()
  target_compile_options(${target} PRIVATE
    -Wall -Wextra -Wconversion -Wshadow
    -Wno-missing-field-initializers  # options are filled by designated initializers: what is not named keeps its default
    $<$<BOOL:${ANNULUS_DEV}>:-Werror>)
  # GCC 12 sees overlapping copies in std::string's operator+ (GCC bug 105651).
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
    target_compile_options(${target} PRIVATE -Wno-restrict)
  endif()
endfunction()

# annulus_exact_arithmetic(<target>): no fusing of a * b + c that the source does not ask for. Compilers fuse in one place and not in another, and
# rows would get other bits when they are cut otherwise (seen with GCC for AArch64).
function(annulus_exact_arithmetic target)
  if(CMAKE_CXX_COMPILER_ID MATCHES "GNU|Clang")
    target_compile_options(${target} PRIVATE -ffp-contract=off)
  endif()
endfunction()

# annulus_quick_to_compile(<target>): little optimisation where speed does not matter, which takes a third less time to compile.
function(annulus_quick_to_compile target)
  if(CMAKE_CXX_COMPILER_ID MATCHES "GNU|Clang")
    target_compile_options(${target} PRIVATE $<$<CONFIG:Release>:-O1>)
  endif()
endfunction()

# Sanitizers apply to everything that is built here: mixing instrumented and plain objects gives false reports.
if(ANNULUS_SANITIZE)
  if(NOT ANNULUS_SANITIZE MATCHES "^(address|undefined|address,undefined|thread)$")
    message(FATAL_ERROR "ANNULUS_SANITIZE is '${ANNULUS_SANITIZE}', expected 'address', 'undefined', "
                        "'address,undefined' or 'thread'")
  endif()
  add_compile_options(-fsanitize=${ANNULUS_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer)
  add_link_options(-fsanitize=${ANNULUS_SANITIZE})
endif()
