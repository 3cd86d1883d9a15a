#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/typing.h>

#include <string>

#include "bindings.h"
#include "core/thread_pool.h"
#include "interrupt.h"
#include "kernels/cpu/kernel.h"

namespace annulus::python {

NB_MODULE(_core, module) {
  module.doc() = "The compiled part of annulus. Import annulus instead.";
  module.attr("version") = ANNULUS_VERSION;
  // Results have the type of the input arrays.
  module.attr("ArrayT") = nb::type_var("ArrayT");

  module.def(
      "isa", [] { return std::string(cpu::chosen_kernels().name); },
      "The instruction set of the kernels: what this CPU is known to be best at, or what "
      "ANNULUS_ISA names.");
  module.def(
      "threads", [] { return ThreadPool::shared()->threads(); },
      "How many threads compute: one per CPU that this process may use, or ANNULUS_THREADS.");

  find_main_thread();
  bind_errors(module);
  bind_events(module);
  bind_memory(module);
  bind_pattern(module);
  bind_placement(module);
  bind_plan(module);
  bind_transport(module);
  bind_ring(module);
  bind_ring_cache(module);
  bind_kv_cache(module);
  bind_collectives(module);
  bind_executor_pool(module);
  bind_attention(module);
  bind_reference(module);
  bind_cuda(module);
}

}  // namespace annulus::python
