#include <fmt/format.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>

#include <memory>
#include <optional>
#include <utility>

#include "annulus/in_process.h"
#include "bindings.h"
#include "errors.h"
#include "transport.h"
#include "transport_tickets.h"

// Transports as Python sees them: the built-in ones and those written in Python.
namespace annulus::python {
namespace {

// A transfer of a built-in transport, and the buffer that it keeps alive.
class Pending {
 public:
  Pending(Transport& transport, bool sending, int peer, std::uint32_t tag, nb::handle buffer)
      : owner_(nb::find(&transport)) {
    const int flags = sending ? PyBUF_SIMPLE : PyBUF_WRITABLE;
    if (PyObject_GetBuffer(buffer.ptr(), &buffer_, flags) != 0) throw nb::python_error();
    const auto size = static_cast<std::size_t>(buffer_.len);
    auto* data = static_cast<std::byte*>(buffer_.buf);
    try {
      const nb::gil_scoped_release no_gil;
      transfer_ = sending ? transport.send(peer, tag, {data, size})
                          : transport.receive(peer, tag, {data, size});
    } catch (...) {
      PyBuffer_Release(&buffer_);
      throw;
    }
  }
  Pending(const Pending&) = delete;
  Pending& operator=(const Pending&) = delete;
  ~Pending() { cancel(); }

  void wait() {
    if (transfer_ == nullptr) return;
    {
      const nb::gil_scoped_release no_gil;
      transfer_->wait();
    }
    cancel();
  }
  void cancel() {
    std::unique_ptr<Ticket> ended = std::move(transfer_);  // Python's collector may run now
    if (ended == nullptr) return;
    {
      const nb::gil_scoped_release no_gil;  // cancelling may have to wait for a copy
      ended.reset();
    }
    PyBuffer_Release(&buffer_);
  }

  // For the garbage collector: objects made by a Python transport may refer back to it.
  int traverse(visitproc visit, void* arg) const {
    Py_VISIT(owner_.ptr());
    const auto* ticket = dynamic_cast<const PyTicket*>(transfer_.get());
    return ticket == nullptr ? 0 : ticket->traverse(visit, arg);
  }

 private:
  nb::object owner_;  // the transport, which the ticket refers to
  Py_buffer buffer_{};
  std::unique_ptr<Ticket> transfer_;
};

int traverse_pending(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  return nb::inst_ready(self) ? nb::inst_ptr<Pending>(self)->traverse(visit, arg) : 0;
}

int clear_pending(PyObject* self) {
  if (nb::inst_ready(self)) nb::inst_ptr<Pending>(self)->cancel();
  return 0;
}

const PyType_Slot pending_slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(traverse_pending)},
                                     {Py_tp_clear, reinterpret_cast<void*>(clear_pending)},
                                     {0, nullptr}};

// Python methods of a subclass are found before these. So a Python transport only gets here if it
// does not define the method, or through super().
void refuse(const Transport& transport, const char* method) {
  if (dynamic_cast<const PyTransport*>(&transport) == nullptr) return;
  if (nb::hasattr(nb::find(const_cast<Transport*>(&transport)), "prepare")) return;
  PyErr_Format(PyExc_NotImplementedError, "Transport.%s must be defined by the subclass", method);
  throw nb::python_error();
}

std::unique_ptr<Pending> post(Transport& transport, bool sending, int peer, std::uint32_t tag,
                              nb::handle buffer) {
  refuse(transport, sending ? "send" : "receive");
  return std::make_unique<Pending>(transport, sending, peer, tag, buffer);
}

// Objects that a Python transport has returned may refer back to it.
PyTransport* python_transport(PyObject* self) {
  if (!nb::inst_ready(self)) return nullptr;
  return dynamic_cast<PyTransport*>(nb::inst_ptr<Transport>(self));
}

int traverse_transport(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  const PyTransport* transport = python_transport(self);
  return transport == nullptr ? 0 : transport->traverse(visit, arg);
}

int clear_transport(PyObject* self) {
  if (PyTransport* transport = python_transport(self)) transport->forget_prepared();
  return 0;
}

const PyType_Slot transport_slots[] = {
    {Py_tp_traverse, reinterpret_cast<void*>(traverse_transport)},
    {Py_tp_clear, reinterpret_cast<void*>(clear_transport)},
    {0, nullptr}};

}  // namespace

void bind_transport(nb::module_& module) {
  nb::class_<Pending>(module, "Transfer", nb::type_slots(pending_slots),
                      "One send or receive under way, as :meth:`Transport.send` and "
                      ":meth:`Transport.receive` of built-in transports return it.")
      .def("wait", &Pending::wait,
           "Blocks until the bytes have moved. TransportError after the deadline or an abort.")
      .def("cancel", &Pending::cancel, "Cancels the transfer. The buffer is not used afterwards.");

  nb::class_<Transport, PyTransport>(module, "Transport", nb::type_slots(transport_slots),
                                     R"(Moves bytes between the ranks of a ring.

:func:`make_in_process_ring` makes built-in ones. To write your own, derive from this class, call
``super().__init__(rank, size, name)`` and define

- ``send(peer, tag, buffer)`` and ``receive(peer, tag, buffer)``: begin to move the bytes of a
  memoryview (read-only for send, writable for receive) that lies directly over the executor's memory,
  and return an object with ``wait()`` and, if a transfer can be called off, ``cancel()``;
  or None if the bytes have already moved. Messages between two ranks with the same tag arrive in the
  order in which they were posted; receives are posted before or after the matching send. The
  memory is valid until ``wait()`` returns; the view is released then, so a copy made later fails instead
  of reading other bytes. ``cancel()`` is called when a pass fails while the transfer is under way,
  also when its own ``wait()`` raised; the buffer must not be touched afterwards.
- or, instead of these two, ``post(messages)``: begin to move a whole batch, a list of tuples ("send" or
  "receive", peer, tag, memoryview), and return one object for all of it.
- or ``prepare(way, peer, tag, buffer)``: say how such a message is begun, and no more: a tuple of a callable and the tuple of
  its arguments. It is kept for messages of the same place and size, which then are begun and waited for without any code
  written in Python: by ``wait()`` of what the callable returns, with the attribute ``wait_limit`` as its argument, if there
  is one. The buffer's memory is valid while such a message is under way; short messages (``short_message``) are sent
  from a copy and not waited for. ``explain(peer, way, error)``, if defined, returns the exception that an error of these calls means.
  ``send`` and ``receive`` come with it.
- ``abort(reason)``: make every pending and future operation of every rank fail. Without it other ranks
  find out by their deadline.

They are called by one thread at a time: the one that calls the executor, or, so that Ctrl-C works, a helper
of it while the main thread runs a long pass; abort may come from the main thread then. An exception in them becomes a
:class:`TransportError` of the pass, with the exception as its ``__cause__`` (annulus's own exceptions and
KeyboardInterrupt come out as they are). Counters are kept here: a subclass has nothing to count.

Args:
    rank: of this end, 0 <= rank < size.
    size: ranks of the ring.
    name: for messages.)")
      .def(nb::init<int, int, std::string>(), nb::arg("rank"), nb::arg("size"),
           nb::arg("name") = "python")
      .def_prop_ro_static(
          "short_message", [](nb::handle) { return kShortMessage; },
          "Bytes up to which what ``prepare`` begins is sent from a copy and not waited for.")
      .def("rank", &Transport::rank, "The rank of this end.")
      .def("size", &Transport::size, "Number of ranks.")
      .def("name", &Transport::name, "Name of the transport, for messages.")
      .def(
          "send",
          [](Transport& transport, int peer, std::uint32_t tag, nb::handle buffer) {
            return post(transport, true, peer, tag, buffer);
          },
          nb::arg("peer"), nb::arg("tag"), nb::arg("buffer"),
          nb::sig("def send(self, peer: int, tag: int, buffer: typing.Any) -> typing.Any"),
          "Begins to send a contiguous buffer; it must not change until wait() of the returned "
          "transfer.")
      .def(
          "receive",
          [](Transport& transport, int peer, std::uint32_t tag, nb::handle buffer) {
            return post(transport, false, peer, tag, buffer);
          },
          nb::arg("peer"), nb::arg("tag"), nb::arg("buffer"),
          nb::sig("def receive(self, peer: int, tag: int, buffer: typing.Any) -> typing.Any"),
          "Begins to receive into a writable contiguous buffer of exactly the size that is sent.")
      .def(
          "reaches",
          [](const Transport& transport, const std::string& device) {
            const bool cpu = device == "cpu";
            return cpu || (dynamic_cast<const PyTransport*>(&transport) == nullptr &&
                           transport.reaches(Device{Device::Kind::cuda, 0}));
          },
          nb::arg("device"),
          "Whether messages may lie in the memory of a device ('cuda:0'). A Python transport that "
          "says so defines ``post_device(messages, device, stream)``: begin to move a batch, a "
          "list "
          "of tuples (\"send\" or \"receive\", peer, tag, address, bytes), behind what the stream "
          "has to do; return an object whose ``wait()`` makes the stream wait for it.")
      .def_prop_ro(
          "in_order",
          [](const Transport& transport) {
            return dynamic_cast<const PyTransport*>(&transport) == nullptr && transport.in_order();
          },
          "Whether batches are carried out one after the other, on every rank in the order in "
          "which "
          "they were posted. A Python transport of that kind says so by an attribute.")
      .def(
          "abort",
          [](Transport& transport, const std::string& reason) {
            if (dynamic_cast<PyTransport*>(&transport) != nullptr) return;
            const nb::gil_scoped_release no_gil;
            transport.abort(reason);
          },
          nb::arg("reason"),
          "Makes every pending and future operation of every rank fail with a TransportError that "
          "names this rank and the reason.")
      .def(
          "set_deadline",
          [](Transport& transport, double seconds) {
            if (auto* own = dynamic_cast<PyTransport*>(&transport)) {
              own->store_deadline(seconds);
            } else {
              transport.set_deadline(milliseconds_of(seconds));
            }
          },
          nb::arg("seconds"),
          "How long one operation may take; one that takes longer raises a TransportError.")
      .def(
          "health",
          [](const Transport& transport) {
            const auto* own = dynamic_cast<const PyTransport*>(&transport);
            const Health health = own == nullptr ? transport.health() : own->stored_health();
            nb::dict dict;
            dict["alive"] = health.alive;
            dict["lost_rank"] = health.lost_rank;
            dict["reason"] = python_text(health.reason);
            return dict;
          },
          nb::sig("def health(self) -> dict[str, typing.Any]"),
          "Whether the ring holds together: 'alive', 'lost_rank' (-1: none or not known) and "
          "'reason'. From any thread. Python transports know of what their own methods raised; a "
          "subclass that knows more may override it.")
      .def_prop_ro(
          "waiting",
          [](const Transport& transport) -> nb::object {
            const auto* own = dynamic_cast<const PyTransport*>(&transport);
            return own == nullptr ? nb::none() : own->waiting();
          },
          nb::sig("def waiting(self) -> tuple[int, float, int] | None"),
          "Of a Python transport, from any thread: what a batch is being waited for, as (number of "
          "the wait, seconds so far, rank or -1); None: nothing is.")
      .def(
          "finish_sends",
          [](Transport& transport) {
            if (auto* own = dynamic_cast<PyTransport*>(&transport)) own->finish_sends();
          },
          "Waits until the other ranks have taken the short messages that ``prepare`` began, or "
          "have ended. A transport does so before it closes its connections.")
      .def(
          "forget_prepared",
          [](Transport& transport) {
            if (auto* own = dynamic_cast<PyTransport*>(&transport)) own->forget_prepared();
          },
          "Drops what ``prepare`` has returned so far.")
      .def_prop_ro(
          "deadline",
          [](const Transport& transport) -> std::optional<double> {
            const auto* own = dynamic_cast<const PyTransport*>(&transport);
            return own == nullptr ? std::nullopt : std::optional(own->stored_deadline());
          },
          nb::sig("def deadline(self) -> float | None"),
          "Of a Python transport: seconds as last given to set_deadline, 60 before. None for "
          "built-in ones.")
      .def(
          "counters",
          [](const Transport& transport) {
            const TransportCounters counters = transport.counters();
            nb::dict dict;
            dict["bytes_sent"] = counters.bytes_sent;
            dict["messages_sent"] = counters.messages_sent;
            dict["bytes_received"] = counters.bytes_received;
            dict["messages_received"] = counters.messages_received;
            return dict;
          },
          nb::sig("def counters(self) -> dict[str, int]"),
          "What has moved so far: 'bytes_sent', 'messages_sent', 'bytes_received' and "
          "'messages_received'.")
      .def("__repr__", [](const Transport& transport) {
        return fmt::format("<Transport {}: rank {} of {}>", transport.name(), transport.rank(),
                           transport.size());
      });

  module.def(
      "make_in_process_ring",
      [](int ranks, double deadline) {
        InProcessOptions options;
        options.deadline = milliseconds_of(deadline);
        nb::list ring;
        for (std::unique_ptr<Transport>& transport : make_in_process_ring(ranks, options)) {
          ring.append(nb::cast(std::move(transport)));
        }
        return ring;
      },
      nb::arg("ranks"), nb::kw_only(), nb::arg("deadline") = 60.0,
      nb::sig("def make_in_process_ring(ranks: int, *, deadline: float = 60.0) -> "
              "list[Transport]"),
      R"(A ring whose ranks are threads of this process.

Args:
    ranks: of the ring.
    deadline: seconds that one operation may take.

Returns:
    One :class:`Transport` for each rank: element r is for the thread of rank r.)");
}

}  // namespace annulus::python
