# The Python module annulus._core and its stub. 'pip install .' comes here through pyproject.toml.

set(annulus_python_help "It comes with 'pip install nanobind'; 'pip install .' and 'make python' do that by themselves.")

find_package(Python 3.10 QUIET COMPONENTS Interpreter Development.Module)
if(NOT Python_FOUND)
  message(FATAL_ERROR "The Python module needs Python 3.10 or newer with its headers (Debian, Ubuntu: python3-dev; "
                      "Fedora: python3-devel), or configure with -DANNULUS_BUILD_PYTHON=OFF.")
endif()
execute_process(COMMAND "${Python_EXECUTABLE}" -m nanobind --cmake_dir
  OUTPUT_STRIP_TRAILING_WHITESPACE OUTPUT_VARIABLE nanobind_ROOT ERROR_QUIET)
find_package(nanobind CONFIG QUIET)
if(NOT nanobind_FOUND)
  message(FATAL_ERROR "nanobind was not found for ${Python_EXECUTABLE}. ${annulus_python_help}")
endif()

file(GLOB python_sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/python/src/*.cpp")
# NOMINSIZE: copies of rows between placements are worth -O3. The warnings of nanobind's headers are not ours.
nanobind_add_module(annulus_python NB_STATIC NOMINSIZE NB_SUPPRESS_WARNINGS ${python_sources})
target_include_directories(annulus_python PRIVATE "${PROJECT_SOURCE_DIR}/python/src" "${PROJECT_SOURCE_DIR}/src")
target_compile_definitions(annulus_python PRIVATE ANNULUS_VERSION="${PROJECT_VERSION}")
target_link_libraries(annulus_python PRIVATE annulus::annulus fmt::fmt Threads::Threads)
# The package in the build tree can be imported from <build>/python, too: stubs are made there, and editors find it.
set(python_package "${PROJECT_BINARY_DIR}/python/annulus")
set_target_properties(annulus_python PROPERTIES OUTPUT_NAME _core LIBRARY_OUTPUT_DIRECTORY "${python_package}")
annulus_warnings(annulus_python)
# What static libraries bring stays inside: CUDA's runtime, and libstdc++ where a compiler has no other, beside the copies that
# Python's process has already. Found on a machine of the second kind: std::ifstream crashed, half of it ours, half PyTorch's.
if(CMAKE_SYSTEM_NAME STREQUAL "Linux")
  target_link_options(annulus_python PRIVATE "LINKER:--exclude-libs,ALL")
  # The module makes no MPI transport: it must not load MPI, either.
  target_link_options(annulus_python PRIVATE "LINKER:--as-needed")
endif()

nanobind_add_stub(annulus_python_stub
  MODULE _core
  PYTHON_PATH "${python_package}"
  OUTPUT "${python_package}/_core.pyi"
  DEPENDS annulus_python)

install(TARGETS annulus_python LIBRARY DESTINATION annulus COMPONENT python)
install(FILES "${python_package}/_core.pyi" DESTINATION annulus COMPONENT python)

# pip puts the program beside its own: <environment>/bin/annulus. Without CLI11 or nlohmann_json there is none, as said above.
set(annulus_wheel "the package annulus with its compiled module annulus._core")
if(NOT SKBUILD)
  return()
elseif(TARGET annulus_tool)
  install(TARGETS annulus_tool RUNTIME DESTINATION "${SKBUILD_SCRIPTS_DIR}" COMPONENT python)
  message(STATUS "annulus: the wheel will have ${annulus_wheel}, and the command annulus")
else()
  message(STATUS "annulus: the wheel will have ${annulus_wheel}, but not the command annulus")
endif()
