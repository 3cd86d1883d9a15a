#include "annulus/events.h"

#include <fmt/format.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "bindings.h"

namespace annulus::python {
namespace {

// Names may come from C++ callers. One that is not UTF-8 must not make an exporter fail.
nb::str text_of(const EventRecord& record) {
  const std::string_view name = record.name();
  return nb::steal<nb::str>(
      PyUnicode_DecodeUTF8(name.data(), static_cast<Py_ssize_t>(name.size()), "replace"));
}

// The state of an event for pickle and copy. The name is stored as bytes, because it may not be
// UTF-8.
using EventTuple = std::tuple<std::string, nb::bytes, std::uint64_t, std::int64_t, std::int64_t,
                              std::int64_t, std::int32_t, std::int32_t, std::int32_t, bool>;

EventTuple state_of(const EventRecord& record) {
  const std::string_view name = record.name();
  return {name_of(record.kind), nb::bytes(name.data(), name.size()),
          record.sequence,      record.begin_ns,
          record.end_ns,        record.bytes,
          record.rank,          record.step,
          record.peer,          record.failed};
}

EventRecord from_state(const EventTuple& state) {
  EventRecord record;
  const auto& [kind, name, sequence, begin_ns, end_ns, bytes, rank, step, peer, failed] = state;
  record.kind = event_kind_from_name(kind);
  record.set_name({name.c_str(), name.size()});
  record.sequence = sequence;
  record.begin_ns = begin_ns;
  record.end_ns = end_ns;
  record.bytes = bytes;
  record.rank = rank;
  record.step = step;
  record.peer = peer;
  record.failed = failed;
  return record;
}

using TotalTuple = std::tuple<EventTuple, std::uint64_t, std::uint64_t, std::int64_t, std::int64_t>;

TotalTuple state_of(const EventTotal& total) {
  return {state_of(total.like), total.count, total.failures, total.nanoseconds, total.bytes};
}

EventTotal from_state(const TotalTuple& state) {
  const auto& [like, count, failures, nanoseconds, bytes] = state;
  return {from_state(like), count, failures, nanoseconds, bytes};
}

// Events go through queues to other processes, and into sets.
template <typename T, typename State>
void bind_value(nb::class_<T>& type) {
  const auto tuple_of = [](const T& value) { return nb::cast(state_of(value)); };
  type.def(
          "__eq__",
          [tuple_of](const T& self, nb::handle other) -> nb::object {
            if (!nb::isinstance<T>(other)) return nb::borrow(Py_NotImplemented);
            return nb::bool_(tuple_of(self).equal(tuple_of(nb::cast<const T&>(other))));
          },
          nb::sig("def __eq__(self, other: object, /) -> bool"))
      .def("__hash__",
           [tuple_of](const T& self) {
             return static_cast<std::int64_t>(PyObject_Hash(tuple_of(self).ptr()));
           })
      .def("__getstate__", [](const T& self) { return state_of(self); })
      .def("__setstate__", [](T& self, const State& state) { new (&self) T(from_state(state)); });
}

}  // namespace

void bind_events(nb::module_& module) {
  nb::class_<EventRecord> event(module, "Event", R"(What happened on one rank, as its host saw it.

`kind` is pass, step, compute, send, receive, wait, cache or recovery. `begin_ns` and `end_ns` are of
`time.monotonic_ns()`. `rank`, `step` and `peer` are -1 where there is none. `bytes` is what a message moved, a pass
sent, or a cache or recovery was about. On a CUDA device `compute` is the time that it took to enqueue the work.

A value: comparable, hashable and picklable.)");
  event
      .def_prop_ro(
          "kind", [](const EventRecord& self) { return name_of(self.kind); }, "One of KINDS.")
      .def_prop_ro(
          "name", text_of, nb::sig("def name(self) -> str"),
          "The name within its kind: 'forward', 'rows', 'agreement', ...; at most 25 bytes.")
      .def_ro("sequence", &EventRecord::sequence, "Events are numbered in the order of their ends.")
      .def_ro("begin_ns", &EventRecord::begin_ns, "Of time.monotonic_ns().")
      .def_ro("end_ns", &EventRecord::end_ns, "Of time.monotonic_ns().")
      .def_prop_ro("seconds", &EventRecord::seconds, "Duration.")
      .def_ro("rank", &EventRecord::rank, "The rank that it belongs to; -1: none.")
      .def_ro("step", &EventRecord::step, "Step of the pass; -1: none.")
      .def_ro("peer", &EventRecord::peer, "The other rank of a message; -1: none.")
      .def_ro("bytes", &EventRecord::bytes, "Bytes that were moved, sent by a pass, or held.")
      .def_ro("failed", &EventRecord::failed, "Whether it ended with an exception.")
      .def("__repr__", [](const EventRecord& self) {
        return fmt::format("<Event {} '{}' rank {} step {} peer {}: {} bytes, {:.6f} s{}>",
                           name_of(self.kind), nb::cast<std::string>(text_of(self)), self.rank,
                           self.step, self.peer, self.bytes, self.seconds(),
                           self.failed ? ", failed" : "");
      });
  bind_value<EventRecord, EventTuple>(event);
  nb::class_<EventTotal> total(
      module, "EventTotal",
      "Sums over all events of one kind, name, rank and (of messages) peer since the last clear(). "
      "A value, as Event is.");
  total
      .def_prop_ro(
          "kind", [](const EventTotal& self) { return name_of(self.like.kind); }, "One of KINDS.")
      .def_prop_ro(
          "name", [](const EventTotal& self) { return text_of(self.like); },
          nb::sig("def name(self) -> str"), "As that of the events.")
      .def_prop_ro(
          "rank", [](const EventTotal& self) { return self.like.rank; }, "As that of the events.")
      .def_prop_ro(
          "peer", [](const EventTotal& self) { return self.like.peer; }, "Of messages, else -1.")
      .def_ro("count", &EventTotal::count, "Number of events.")
      .def_ro("failures", &EventTotal::failures, "Number of failed events.")
      .def_prop_ro(
          "seconds",
          [](const EventTotal& self) { return 1e-9 * static_cast<double>(self.nanoseconds); },
          "Sum of their durations.")
      .def_ro("bytes", &EventTotal::bytes, "Sum of their bytes.");
  bind_value<EventTotal, TotalTuple>(total);

  module.def(
      "events_start", [](std::size_t capacity) { event_stream().start(capacity); },
      nb::arg("capacity") = EventStream::kCapacity);
  module.def("events_stop", [] { event_stream().stop(); });
  module.def("events_on", [] { return event_stream().on(); });
  module.def("events_clear", [] { event_stream().clear(); });
  module.def("events_next", [] { return event_stream().next(); });
  module.def("events_capacity", [] { return event_stream().capacity(); });
  module.def(
      "events_read",
      [](std::uint64_t from) {
        EventStream::Batch batch;
        {
          const nb::gil_scoped_release release;
          batch = event_stream().read(from);
        }
        return nb::make_tuple(batch.events, batch.next, batch.dropped);
      },
      nb::arg("from_"), nb::sig("def events_read(from_: int) -> tuple[list[Event], int, int]"));
  module.def("events_totals", [] { return event_stream().totals(); });
  module.def(
      "events_record",
      [](const std::string& kind, const std::string& name, int rank, int step, int peer,
         std::int64_t bytes, std::int64_t begin_ns, std::int64_t end_ns, bool failed) {
        EventRecord record;
        record.kind = event_kind_from_name(kind);
        record.set_name(name);
        record.rank = rank;
        record.step = step;
        record.peer = peer;
        record.bytes = bytes;
        record.begin_ns = begin_ns;
        record.end_ns = end_ns;
        record.failed = failed;
        event_stream().add(record);
      },
      nb::arg("kind"), nb::arg("name"), nb::arg("rank"), nb::arg("step"), nb::arg("peer"),
      nb::arg("bytes"), nb::arg("begin_ns"), nb::arg("end_ns"), nb::arg("failed"));
  module.def(
      "event_lanes", [](const std::vector<EventRecord>& events) { return event_lanes(events); },
      nb::arg("events"));
}

}  // namespace annulus::python
