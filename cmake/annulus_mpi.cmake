# Rings of MPI's processes: built where MPI is found, unless ANNULUS_MPI says otherwise.
set(ANNULUS_MPI "AUTO" CACHE STRING "MPI transport: ON, OFF, or AUTO (where MPI is found)")
set_property(CACHE ANNULUS_MPI PROPERTY STRINGS AUTO ON OFF)

set(ANNULUS_HAS_MPI OFF)
if(NOT ANNULUS_MPI STREQUAL "OFF")
  set(MPI_CXX_SKIP_MPICXX ON)  # the C interface is all that is used
  find_package(MPI QUIET COMPONENTS CXX)
  if(MPI_CXX_FOUND)
    set(ANNULUS_HAS_MPI ON)
  elseif(ANNULUS_MPI STREQUAL "ON")
    message(FATAL_ERROR "ANNULUS_MPI is ON, but MPI was not found (Debian, Ubuntu: libopenmpi-dev, openmpi-bin)")
  endif()
endif()

# What src/transport/mpi*.cpp add to the library.
function(annulus_mpi_sources)
  set(folder "${PROJECT_SOURCE_DIR}/src/transport")
  if(NOT ANNULUS_HAS_MPI)
    target_sources(annulus PRIVATE "${folder}/mpi_absent.cpp")
    message(STATUS "MPI transport: not built")
    return()
  endif()
  file(GLOB sources CONFIGURE_DEPENDS "${folder}/mpi*.cpp")
  list(REMOVE_ITEM sources "${folder}/mpi_absent.cpp")
  target_sources(annulus PRIVATE ${sources})
  target_link_libraries(annulus PRIVATE MPI::MPI_CXX)
  message(STATUS "MPI transport: built with MPI ${MPI_CXX_VERSION}")
endfunction()
