# The CUDA backend. Its kernels take minutes to compile, so AUTO builds them only where they can run. Only the CUDA runtime
# is needed, and it is linked statically: the library then loads on machines without CUDA, where it says that there is none.
set(ANNULUS_CUDA "AUTO" CACHE STRING "CUDA kernels: ON, OFF, or AUTO (where there is nvcc and a GPU)")
set_property(CACHE ANNULUS_CUDA PROPERTY STRINGS AUTO ON OFF)

set(annulus_cuda_wanted ${ANNULUS_CUDA})
if(ANNULUS_CUDA STREQUAL "AUTO" AND NOT EXISTS /dev/nvidiactl AND NOT EXISTS /dev/dxg)
  set(annulus_cuda_wanted OFF)
endif()
set(ANNULUS_HAS_CUDA OFF)
if(annulus_cuda_wanted)
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
      set(CMAKE_CUDA_ARCHITECTURES 80)  # targets below have their own
    endif()
    enable_language(CUDA)
    # Older CMakes do not know which standards a newer nvcc knows.
    if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
      set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
      set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
    endif()
    # The runtime is named below, once; what nvcc would link besides is not needed, and not found by other linkers.
    set(CMAKE_CUDA_RUNTIME_LIBRARY None)
    set(CMAKE_CUDA_IMPLICIT_LINK_LIBRARIES "")
    find_package(CUDAToolkit 12.5 REQUIRED)
    set(ANNULUS_HAS_CUDA ON)
  elseif(ANNULUS_CUDA STREQUAL "ON")
    message(FATAL_ERROR "ANNULUS_CUDA is ON, but there is no CUDA compiler: install the CUDA toolkit and put nvcc into PATH")
  endif()
endif()

# annulus_cuda_objects(<name> ARCHITECTURES <list> SOURCES <file>...) adds kernels for some architectures to the library.
function(annulus_cuda_objects name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "ARCHITECTURES;SOURCES")
  add_library(${name} OBJECT ${arg_SOURCES})
  target_include_directories(${name} PRIVATE "${PROJECT_SOURCE_DIR}/include" "${PROJECT_SOURCE_DIR}/src")
  set_target_properties(${name} PROPERTIES CUDA_STANDARD 20 CUDA_ARCHITECTURES "${arg_ARCHITECTURES}" POSITION_INDEPENDENT_CODE ON)
  # 554: a conversion of a view to itself, which is never used.
  target_compile_options(${name} PRIVATE --expt-relaxed-constexpr -diag-suppress=554)
  target_sources(annulus PRIVATE $<TARGET_OBJECTS:${name}>)
endfunction()

# What the folder src/kernels/cuda adds to the library.
function(annulus_cuda_sources)
  set(folder "${PROJECT_SOURCE_DIR}/src/kernels/cuda")
  # Needs no CUDA, and is tested without it.
  file(GLOB plain CONFIGURE_DEPENDS "${folder}/work/*.cpp" "${folder}/portable/*.cpp")
  target_sources(annulus PRIVATE ${plain})
  if(NOT ANNULUS_HAS_CUDA)
    target_sources(annulus PRIVATE "${folder}/absent.cpp")
    message(STATUS "CUDA kernels: not built (AUTO builds them where there are nvcc and a GPU; -DANNULUS_CUDA=ON, always)")
    return()
  endif()
  file(GLOB_RECURSE host CONFIGURE_DEPENDS "${folder}/*.cpp")
  list(REMOVE_ITEM host ${plain} "${folder}/absent.cpp")
  target_sources(annulus PRIVATE ${host})
  target_link_libraries(annulus PRIVATE CUDA::cudart_static)
  file(GLOB_RECURSE hopper CONFIGURE_DEPENDS "${folder}/sm90/*.cu")
  file(GLOB_RECURSE portable CONFIGURE_DEPENDS "${folder}/*.cu")
  list(REMOVE_ITEM portable ${hopper})
  # Machine code for 8.0 and 9.0, and PTX of 8.0 for whatever else is newer.
  annulus_cuda_objects(annulus_cuda_portable ARCHITECTURES 80 90-real SOURCES ${portable})
  # A line of ptxas with C75xx says that it serialised products of warp groups: the kernel is then several times slower.
  annulus_cuda_objects(annulus_cuda_sm90 ARCHITECTURES 90a-real SOURCES ${hopper})
  message(STATUS "CUDA kernels: built with ${CMAKE_CUDA_COMPILER} ${CMAKE_CUDA_COMPILER_VERSION}")
endfunction()
