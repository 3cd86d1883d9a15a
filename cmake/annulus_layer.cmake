# annulus_layer(<name> [USES <layer>...]) adds src/<name>/**/*.cpp to the library. A layer can only use layers declared
# before it, so the order of the calls is an order of the layers; the compiler cannot check includes against it, and
# scripts/check_layers.py does.
function(annulus_layer name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "USES")
  get_property(declared GLOBAL PROPERTY ANNULUS_LAYERS)
  foreach(used IN LISTS arg_USES)
    if(NOT used IN_LIST declared)
      message(FATAL_ERROR "layer '${name}' uses '${used}', which is not declared before it (declared: ${declared})")
    endif()
  endforeach()
  set_property(GLOBAL APPEND PROPERTY ANNULUS_LAYERS ${name})

  # Kernels are compiled like everything else: Highway's foreach_target switches instruction sets inside a file. An -march
  # flag for a whole file would leak into inline functions that the linker may then pick for baseline code.
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/src/${name}/*.cpp")
  list(FILTER sources EXCLUDE REGEX "/kernels/cuda/|/transport/mpi")  # annulus_cuda_sources, annulus_mpi_sources add what can be built
  target_sources(annulus PRIVATE ${sources})
endfunction()
