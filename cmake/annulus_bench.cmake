# One program per bench/<name>_bench.cpp, in <build>/bench; other sources of bench/ are linked into each of them.

file(GLOB bench_programs CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/bench/*_bench.cpp")
file(GLOB bench_sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/bench/*.cpp")
list(REMOVE_ITEM bench_sources ${bench_programs})

add_custom_target(annulus_benches)
foreach(program IN LISTS bench_programs)
  cmake_path(GET program STEM name)
  add_executable(${name} "${program}" ${bench_sources})
  target_include_directories(${name} PRIVATE "${PROJECT_SOURCE_DIR}" "${PROJECT_SOURCE_DIR}/src")
  # benchmark_main is an archive: its main() is only used by programs that have none.
  target_link_libraries(${name} PRIVATE
    annulus::annulus benchmark::benchmark benchmark::benchmark_main hwy::hwy fmt::fmt Threads::Threads)
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/bench")
  annulus_warnings(${name})
  add_dependencies(annulus_benches ${name})
endforeach()
if(NOT bench_programs)
  message(STATUS "annulus: there are no benchmarks in bench/ (*_bench.cpp)")
endif()

# What bench/peer/versus_pytorch.py loads.
add_library(annulus_bench_c SHARED "${PROJECT_SOURCE_DIR}/bench/peer/c_api.cpp")
target_include_directories(annulus_bench_c PRIVATE "${PROJECT_SOURCE_DIR}/src")
target_link_libraries(annulus_bench_c PRIVATE annulus::annulus hwy::hwy fmt::fmt Threads::Threads)
set_target_properties(annulus_bench_c PROPERTIES LIBRARY_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/bench")
annulus_warnings(annulus_bench_c)
add_dependencies(annulus_benches annulus_bench_c)

# What 'make perf' runs: bench/perf/<name>.cpp, in <build>/bench/perf. They print what they measure beside its bar, and fail
# where one is missed.
add_custom_target(annulus_perf)
function(annulus_perf_program name)
  add_executable(perf_${name} "${PROJECT_SOURCE_DIR}/bench/perf/${name}.cpp")
  target_include_directories(perf_${name} PRIVATE "${PROJECT_SOURCE_DIR}")
  target_link_libraries(perf_${name} PRIVATE annulus::annulus Threads::Threads ${ARGN})
  set_target_properties(perf_${name} PROPERTIES
    OUTPUT_NAME ${name} RUNTIME_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/bench/perf")
  annulus_warnings(perf_${name})
  add_dependencies(annulus_perf perf_${name})
endfunction()
annulus_perf_program(overlap)
annulus_perf_program(decode)
annulus_perf_program(replanning)
if(TARGET MPI::MPI_CXX)
  annulus_perf_program(mpi_overlap MPI::MPI_CXX)
endif()
