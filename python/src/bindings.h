#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

#include "annulus/device.h"

namespace annulus::python {

namespace nb = nanobind;

// The bytes that an executor holds, and their device. Needs the GIL.
struct Footprint {
  std::int64_t bytes = 0;
  Device device;
};
[[nodiscard]] Footprint footprint_of(nb::handle executor);

// One function per file of this folder, in the order in which the module calls them.
void bind_errors(nb::module_& module);
void bind_events(nb::module_& module);
void bind_memory(nb::module_& module);
void bind_pattern(nb::module_& module);
void bind_placement(nb::module_& module);
void bind_plan(nb::module_& module);
void bind_transport(nb::module_& module);
void bind_ring(nb::module_& module);
void bind_ring_cache(nb::module_& module);
void bind_kv_cache(nb::module_& module);
void bind_collectives(nb::module_& module);
void bind_executor_pool(nb::module_& module);
void bind_attention(nb::module_& module);
void bind_reference(nb::module_& module);
void bind_cuda(nb::module_& module);

}  // namespace annulus::python
