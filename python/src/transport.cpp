#include "transport.h"

#include <fmt/format.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>

#include <cmath>
#include <optional>
#include <utility>

#include "annulus/error.h"
#include "annulus/in_process.h"
#include "bindings.h"
#include "errors.h"

namespace annulus::python {
namespace {

// ---- from C++ to Python: a transfer that a Python transport has under way

class PyTransfer final : public Transfer {
 public:
  // `object` is what the Python method returned, `view` the memoryview that it got; needs the GIL.
  PyTransfer(nb::object object, nb::object view, std::shared_ptr<Counters> counters,
             std::size_t bytes, bool sending, std::string where)
      : object_(object.release().ptr()),
        view_(view.release().ptr()),
        counters_(std::move(counters)),
        bytes_(bytes),
        sending_(sending),
        where_(std::move(where)) {
    if (nb::handle(object_).is_none()) finish();  // moved already
  }
  PyTransfer(const PyTransfer&) = delete;
  PyTransfer& operator=(const PyTransfer&) = delete;

  // May run while an error unwinds the executor: nothing leaves it.
  ~PyTransfer() override {
    if (!Py_IsInitialized()) return;
    const nb::gil_scoped_acquire gil;
    // What Python is told here must not disturb an exception that is on its way.
    const nb::error_scope scope;
    if (!finished_) {
      try {
        const nb::object cancel = nb::getattr(nb::handle(object_), "cancel", nb::none());
        if (!cancel.is_none()) cancel();
      } catch (nb::python_error& error) {
        error.discard_as_unraisable("annulus: cancelling a transfer");
      } catch (const std::exception&) {  // nothing can be done about it, and nothing may leave
      }
      release_view();
    }
    Py_DECREF(object_);
    Py_DECREF(view_);
  }

  void wait() override {
    if (finished_) return;
    const nb::gil_scoped_acquire gil;
    try {
      nb::handle(object_).attr("wait")();
    } catch (const nb::python_error& error) {
      throw PythonFailure(where_, error);
    }
    finish();
  }

  [[nodiscard]] bool done() override {
    if (finished_) return true;
    const nb::gil_scoped_acquire gil;
    try {
      const int truth = PyObject_IsTrue(nb::handle(object_).attr("done")().ptr());
      if (truth < 0) throw nb::python_error();
      return truth != 0;
    } catch (const nb::python_error& error) {
      throw PythonFailure(where_, error);
    }
  }

 private:
  void finish() {
    finished_ = true;
    (sending_ ? counters_->bytes_sent : counters_->bytes_received) += bytes_;
    (sending_ ? counters_->messages_sent : counters_->messages_received) += 1;
    release_view();
  }

  // The memory is the executor's again. Whoever kept the view gets an error from Python instead of
  // somebody else's bytes; an array over it that is still alive prevents that, and then it is
  // theirs to leave alone.
  void release_view() noexcept {
    const nb::object none = nb::steal(PyObject_CallMethod(view_, "release", nullptr));
    if (!none.is_valid()) PyErr_Clear();
  }

  PyObject* object_;
  PyObject* view_;
  std::shared_ptr<Counters> counters_;
  std::size_t bytes_;
  bool sending_;
  bool finished_ = false;
  std::string where_;
};

// ---- from Python to C++: sends and receives of the built-in transports

// A transfer of a built-in transport and the buffer that it holds on to.
class Pending {
 public:
  Pending(Transport& transport, bool sending, int peer, std::uint32_t tag, nb::handle buffer) {
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
  [[nodiscard]] bool done() { return transfer_ == nullptr || transfer_->done(); }
  void cancel() {
    if (transfer_ == nullptr) return;
    {
      const nb::gil_scoped_release no_gil;  // it may have to let a copy finish
      transfer_.reset();
    }
    PyBuffer_Release(&buffer_);
  }

 private:
  Py_buffer buffer_{};
  std::unique_ptr<Transfer> transfer_;
};

// Python's own methods are found before these, so a Python transport only gets here without one, or
// through super().
void refuse(const Transport& transport, const char* method) {
  if (dynamic_cast<const PyTransport*>(&transport) == nullptr) return;
  PyErr_Format(PyExc_NotImplementedError, "Transport.%s must be defined by the subclass", method);
  throw nb::python_error();
}

std::unique_ptr<Pending> post(Transport& transport, bool sending, int peer, std::uint32_t tag,
                              nb::handle buffer) {
  refuse(transport, sending ? "send" : "receive");
  return std::make_unique<Pending>(transport, sending, peer, tag, buffer);
}

std::chrono::milliseconds milliseconds_of(double seconds) {
  constexpr double kLongest = 1e9;  // seconds: nobody waits for 30 years
  if (!(seconds > 0.0)) {
    throw ConfigError(
        fmt::format("Transport.set_deadline: the deadline is {} s, expected more than 0", seconds));
  }
  const double rounded = std::ceil(std::min(seconds, kLongest) * 1000.0);
  return std::chrono::milliseconds(static_cast<std::int64_t>(rounded));
}

}  // namespace

PyTransport::PyTransport(int rank, int size, std::string name)
    : rank_(rank), size_(size), name_(std::move(name)) {
  if (size < 1 || rank < 0 || rank >= size) {
    throw ConfigError(fmt::format(
        "Transport: rank is {} of size {}, expected a size of at least 1 and 0 <= rank < size",
        rank, size));
  }
}

std::string PyTransport::where(const char* method, int peer) const {
  return fmt::format("[rank {}/{}] {} transport: {} {} rank {}", rank_, size_, name_, method,
                     method[0] == 's' ? "to" : "from", peer);
}

std::unique_ptr<Transfer> PyTransport::post(const char* method, int peer, std::uint32_t tag,
                                            void* data, std::size_t bytes, bool sending) {
  const nb::gil_scoped_acquire gil;
  const std::string place = where(method, peer);
  try {
    static char nothing = 0;  // an empty span may be null, a memoryview may not
    nb::object view = nb::steal(PyMemoryView_FromMemory(
        bytes == 0 ? &nothing : static_cast<char*>(data), static_cast<Py_ssize_t>(bytes),
        sending ? PyBUF_READ : PyBUF_WRITE));
    if (!view.is_valid()) throw nb::python_error();
    nb::object object = nb::find(static_cast<Transport*>(this)).attr(method)(peer, tag, view);
    return std::make_unique<PyTransfer>(std::move(object), std::move(view), counters_, bytes,
                                        sending, place);
  } catch (const nb::python_error& error) {
    throw PythonFailure(place, error);
  }
}

std::unique_ptr<Transfer> PyTransport::send(int peer, std::uint32_t tag,
                                            std::span<const std::byte> bytes) {
  // Read-only in Python.
  return post("send", peer, tag, const_cast<std::byte*>(bytes.data()), bytes.size(), true);
}

std::unique_ptr<Transfer> PyTransport::receive(int peer, std::uint32_t tag,
                                               std::span<std::byte> bytes) {
  return post("receive", peer, tag, bytes.data(), bytes.size(), false);
}

void PyTransport::abort(const std::string& reason) noexcept {
  if (!Py_IsInitialized()) return;
  const nb::gil_scoped_acquire gil;
  const nb::error_scope scope;
  try {
    nb::find(static_cast<Transport*>(this)).attr("abort")(reason);
  } catch (nb::python_error& error) {
    error.discard_as_unraisable("annulus: aborting a transport");
  } catch (const std::exception&) {  // nothing can be done about it, and nothing may leave
  }
}

void PyTransport::set_deadline(std::chrono::milliseconds deadline) {
  const nb::gil_scoped_acquire gil;
  try {
    nb::find(static_cast<Transport*>(this))
        .attr("set_deadline")(static_cast<double>(deadline.count()) / 1000.0);
  } catch (const nb::python_error& error) {
    throw PythonFailure(fmt::format("[rank {}/{}] {} transport: set_deadline", rank_, size_, name_),
                        error);
  }
}

void PyTransport::store_deadline(double seconds) {
  (void)milliseconds_of(seconds);  // ConfigError
  deadline_ = seconds;
}

TransportCounters PyTransport::counters() const {
  return {.bytes_sent = counters_->bytes_sent,
          .messages_sent = counters_->messages_sent,
          .bytes_received = counters_->bytes_received,
          .messages_received = counters_->messages_received};
}

void bind_transport(nb::module_& module) {
  nb::class_<Pending>(module, "Transfer",
                      "One send or receive under way, as :meth:`Transport.send` and "
                      ":meth:`Transport.receive` of built-in transports return it.")
      .def("wait", &Pending::wait,
           "Blocks until the bytes have moved. TransportError after the deadline or an abort.")
      .def("done", &Pending::done, "Whether wait() would return or raise at once.")
      .def("cancel", &Pending::cancel, "Gives up; the buffer is not touched afterwards.");

  nb::class_<Transport, PyTransport>(module, "Transport",
                                     R"(Moves bytes between the ranks of a ring.

:func:`make_in_process_ring` makes built-in ones. To write your own, derive from this class, call
``super().__init__(rank, size, name)`` and define

- ``send(peer, tag, buffer)`` and ``receive(peer, tag, buffer)``: begin to move the bytes of a
  memoryview (read-only for send, writable for receive) that lies directly over the executor's memory,
  and return an object with ``wait()``, ``done()`` and, if a transfer can be called off, ``cancel()``;
  or None if the bytes have already moved. Messages between two ranks with the same tag arrive in the
  order in which they were posted; receives are posted before or after the matching send. The
  memory is valid until ``wait()`` returns; the view is released then, so a copy made later fails instead
  of reading other bytes. ``cancel()`` is called when a pass fails while the transfer is under way,
  also when its own ``wait()`` raised; the buffer must not be touched afterwards.
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
      .def("rank", &Transport::rank, "The rank of this end.")
      .def("size", &Transport::size, "Ranks of the ring.")
      .def("name", &Transport::name, "What carries the bytes, for messages.")
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
      .def_prop_ro(
          "deadline",
          [](const Transport& transport) -> std::optional<double> {
            const auto* own = dynamic_cast<const PyTransport*>(&transport);
            return own == nullptr ? std::nullopt : std::optional(own->deadline());
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
