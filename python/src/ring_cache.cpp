#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cstddef>
#include <memory>
#include <new>
#include <utility>

#include "annulus/ring_attention.h"
#include "bindings.h"
#include "executor.h"
#include "ring_options.h"

namespace annulus::python {
namespace {

struct Cache {
  nb::object transport;
  std::unique_ptr<RingAttentionCache> core;
};

}  // namespace

void bind_ring_cache(nb::module_& module) {
  auto cache = nb::class_<Cache>(module, "RingAttentionCache", nb::type_slots(slots<Cache>()),
                                 R"(Executors for changing shapes over one transport.

Collective like the executors: every rank asks for the same options in the same order.

Args:
    transport: of all executors; kept alive by the cache.
    capacity: executors kept; beyond it the least recently used ones are dropped. They also are when
        all of them hold more than an eighth of the device's memory: a quarter while more than half of
        it is free, a thirty-second while less than a tenth is.)");
  cache.def(
      "__init__",
      [](Cache* self, nb::object transport, std::size_t capacity) {
        auto core = std::make_unique<RingAttentionCache>(nb::cast<Transport&>(transport), capacity);
        new (self) Cache{std::move(transport), std::move(core)};
      },
      nb::arg("transport"), nb::arg("capacity") = 20,
      nb::sig("def __init__(self, transport: Transport, capacity: int = 20) -> None"));
  cache.def(
      "get",
      [](Cache& self, nb::handle pattern, nb::handle placement, const nb::kwargs& given) {
        const RingOptions options = telling_others(nb::cast<Transport&>(self.transport), [&] {
          return options_from(pattern, placement, given);
        });
        std::shared_ptr<RingAttention> core;
        construct(nb::cast<Transport&>(self.transport), [&] { core = self.core->get(options); });
        return Ring(self.transport, std::move(core));
      },
      nb::arg("pattern").none(), nb::arg("placement").none(), nb::arg("options"),
      nb::sig(signature_with_options("get", ") -> RingAttention")),
      "The executor for these options, which are those of :class:`RingAttention`: a kept one or a "
      "new one.");
  cache
      .def(
          "clear_cache",
          [](Cache& self) {
            const nb::gil_scoped_release no_gil;
            self.core->clear_cache();
          },
          "Drops every executor that is not in use elsewhere.")
      .def_prop_ro(
          "size", [](const Cache& self) { return self.core->size(); }, "Executors held.")
      .def_prop_ro(
          "memory_info", [](const Cache& self) { return dict_of(self.core->memory_info()); },
          nb::sig("def memory_info(self) -> dict[str, typing.Any]"),
          "Sums over the cached executors; keys as in RingAttention.memory_info.");
}

}  // namespace annulus::python
