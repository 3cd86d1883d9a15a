#include "executor.h"

#include <fmt/format.h>
#include <nanobind/stl/string.h>

#include "annulus/cuda.h"
#include "bindings.h"
#include "errors.h"
#include "interrupt.h"
#include "kernels/backend.h"
#include "transport.h"

namespace annulus::python {

Ring::Ring(nb::object link, std::shared_ptr<RingAttention> executor)
    : transport(std::move(link)), core(std::move(executor)) {
  measure();
}

void Ring::measure() {
  const auto& ends = nb::cast<const Transport&>(transport);
  const RingOptions& options = core->options();
  bytes = core->memory_info().workspace_bytes;
  flops =
      4.0 * allowed_pairs(options.pattern, options.placement.tokens(), options.keys().tokens()) *
      static_cast<double>(options.pattern.times_in(options.batch)) * options.head_dim / ends.size();
}

void Ring::set_documents(std::vector<Document> documents) {
  {
    const nb::gil_scoped_release no_gil;
    core->set_documents(std::move(documents));
  }
  try {
    measure();
  } catch (const ConfigError&) {
    flops = 0;  // wrong documents are an error of the next pass
  }
}

std::shared_ptr<Queue> CallerStream::queue_of(const Device& device, std::uintptr_t number) {
  return cuda_queue(device, reinterpret_cast<void*>(number));
}

std::shared_ptr<Queue> CallerStream::own_queue(const Device& device, int threads) {
  return backend_of(device, threads)->make_queue();
}

bool waits_in_cpp(const Transport& transport) {
  return transport.size() > 1 && dynamic_cast<const PyTransport*>(&transport) == nullptr;
}

void construct(Transport& transport, const std::function<void()>& make) {
  run_interruptibly(waits_in_cpp(transport) && on_main_thread(), make,
                    [&] { transport.abort("interrupted"); });
}

std::string reason_of(const std::exception& error) {
  const auto* raised = dynamic_cast<const nb::python_error*>(&error);
  if (raised == nullptr) return error.what();
  return fmt::format("{}: {}", printed(raised->type().attr("__name__")), printed(raised->value()));
}

nb::dict dict_of(const MemoryInfo& info) {
  nb::dict dict;
  dict["device"] = name_of(info.device);
  dict["complexity"] = info.complexity;
  dict["workspace_bytes"] = info.workspace_bytes;
  dict["communication_bytes"] = info.communication_bytes;
  dict["state_bytes"] = info.state_bytes;
  dict["scratch_bytes"] = info.scratch_bytes;
  dict["cached_workspaces"] = info.cached_workspaces;
  return dict;
}

Footprint footprint_of(nb::handle executor) {
  const auto& ring = nb::cast<const Ring&>(executor);
  return {ring.bytes, ring.core->options().device};
}

}  // namespace annulus::python
