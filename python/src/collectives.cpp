#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cstddef>
#include <string>
#include <vector>

#include "annulus/ring_check.h"
#include "bindings.h"
#include "errors.h"
#include "executor.h"
#include "ring/records.h"

// Collective calls over a transport that need no executor.
namespace annulus::python {
namespace {

nb::list gather_records(Transport& transport, const nb::bytes& record) {
  std::vector<std::string> records;
  construct(transport, [&] {
    records = ring::gather_records(transport, {record.c_str(), record.size()});
  });
  nb::list list;
  for (const std::string& each : records) list.append(nb::bytes(each.data(), each.size()));
  return list;
}

nb::dict check_blocks(Transport& transport, std::size_t bytes) {
  RingCheck check;
  construct(transport, [&] { check = check_ring(transport, bytes); });
  nb::dict dict;
  dict["forward_ok"] = check.forward_ok;
  dict["backward_ok"] = check.backward_ok;
  dict["detail"] = python_text(check.detail);
  return dict;
}

}  // namespace

void bind_collectives(nb::module_& module) {
  module.def("gather_records", &gather_records, nb::arg("transport"), nb::arg("record"),
             nb::sig("def gather_records(transport: Transport, record: bytes) -> list[bytes]"),
             R"(Exchanges records: returns those of all ranks, in the order of ranks. Collective.

Args:
    transport: of the ring; no executor may be using it.
    record: of this rank; of any length on any rank, at most a few kilobytes.)");
  module.def(
      "check_ring", &check_blocks, nb::arg("transport"), nb::arg("bytes") = 4096,
      nb::sig("def check_ring(transport: Transport, bytes: int = 4096) -> "
              "dict[str, typing.Any]"),
      R"(Passes a stamped block to both neighbours and compares every byte of theirs. Collective.

Returns 'forward_ok' (the block of the previous rank is right), 'backward_ok' (that of the next rank) and
'detail', one line per direction. A TransportError is reported there and not raised; the transport is
dead afterwards.)");
}

}  // namespace annulus::python
