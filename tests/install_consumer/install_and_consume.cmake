# Installs the build tree, moves the installation (a package must not remember where it was built), then configures,
# builds and runs the consumer against it.
cmake_minimum_required(VERSION 3.25)

file(REMOVE_RECURSE "${work}")
file(MAKE_DIRECTORY "${work}")

function(step)
  list(JOIN ARGV " " text)
  message(STATUS "${text}")
  execute_process(COMMAND ${ARGV} COMMAND_ERROR_IS_FATAL ANY)
endfunction()

step("${CMAKE_COMMAND}" --install "${annulus_build}" --prefix "${work}/installed" --config "${config}")
file(RENAME "${work}/installed" "${work}/prefix")

step("${CMAKE_COMMAND}" -S "${consumer_source}" -B "${work}/build" -G "${generator}"
  "-DCMAKE_CXX_COMPILER=${compiler}" "-DCMAKE_BUILD_TYPE=${config}" "-DCMAKE_PREFIX_PATH=${work}/prefix")
step("${CMAKE_COMMAND}" --build "${work}/build" --config "${config}")
step("${work}/build/consumer")
if(EXISTS "${work}/prefix/bin/annulus")
  step("${work}/prefix/bin/annulus" --help)
endif()
