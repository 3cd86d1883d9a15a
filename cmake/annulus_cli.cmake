# The annulus tool: everything but main() is a library, so that tests can call it.

file(GLOB cli_sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/cli/*.cpp")
set(cli_main "${PROJECT_SOURCE_DIR}/cli/main.cpp")
list(REMOVE_ITEM cli_sources "${cli_main}")

# The report's page is a file that people can open and edit; the tool has it inside.
set(report_html "${PROJECT_SOURCE_DIR}/cli/report.html")
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${report_html}")
file(READ "${report_html}" ANNULUS_REPORT_HTML)
configure_file("${PROJECT_SOURCE_DIR}/cli/report_page.cpp.in" "${PROJECT_BINARY_DIR}/report_page.cpp" @ONLY)

add_library(annulus_cli STATIC ${cli_sources} "${PROJECT_BINARY_DIR}/report_page.cpp")
target_include_directories(annulus_cli PUBLIC "${PROJECT_SOURCE_DIR}" "${PROJECT_SOURCE_DIR}/src")
target_compile_definitions(annulus_cli PUBLIC ANNULUS_VERSION="${PROJECT_VERSION}")
target_link_libraries(annulus_cli PUBLIC
  annulus::annulus CLI11::CLI11 nlohmann_json::nlohmann_json fmt::fmt Threads::Threads)
annulus_warnings(annulus_cli)
# The headers of CLI11 and nlohmann_json take seconds a file to optimise. What loops over tensors is optimised all the same.
annulus_quick_to_compile(annulus_cli)
set_source_files_properties(
  "${PROJECT_SOURCE_DIR}/cli/sample_check.cpp" "${PROJECT_SOURCE_DIR}/cli/oracle_check.cpp" "${PROJECT_SOURCE_DIR}/cli/tensor_files.cpp"
  PROPERTIES COMPILE_OPTIONS -O3)

if(NOT EXISTS "${cli_main}")
  message(STATUS "annulus: the program annulus will not be built: there is no cli/main.cpp")
  return()
endif()

# The library's target has the name already; the program still is <build>/annulus.
add_executable(annulus_tool "${cli_main}")
target_link_libraries(annulus_tool PRIVATE annulus_cli)
set_target_properties(annulus_tool PROPERTIES
  OUTPUT_NAME annulus
  RUNTIME_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}"
  INSTALL_RPATH "$ORIGIN/../${CMAKE_INSTALL_LIBDIR}")
annulus_warnings(annulus_tool)
