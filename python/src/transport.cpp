#include "transport.h"

#include <fmt/format.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>

#include <cmath>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "annulus/cuda.h"
#include "annulus/error.h"
#include "annulus/in_process.h"
#include "bindings.h"
#include "errors.h"

namespace annulus::python {
namespace {

// ---- from C++ to Python: messages that a Python transport has under way

// What a Python method returned, for one message or for a whole batch.
class PyTicket final : public Ticket {
 public:
  PyTicket(PyTransport& transport, std::shared_ptr<Counters> counters, std::string where)
      : transport_(&transport), counters_(std::move(counters)), where_(std::move(where)) {}
  PyTicket(const PyTicket&) = delete;
  PyTicket& operator=(const PyTicket&) = delete;

  // May run while an error unwinds the executor: nothing leaves it.
  ~PyTicket() override {
    if (!Py_IsInitialized()) return;
    const nb::gil_scoped_acquire gil;
    // What Python is told here must not disturb an exception that is on its way.
    const nb::error_scope scope;
    for (std::size_t i = waited_; i < transfers_.size(); ++i) cancel(transfers_[i]);
    for (const View& view : views_) release(view);
    for (PyObject* transfer : transfers_) Py_DECREF(transfer);
    for (const View& view : views_) Py_DECREF(view.memory);
  }

  // These need the GIL.
  nb::object add_view(const Message& message) {
    static char nothing = 0;  // an empty span may be null, a memoryview may not
    const bool sends = message.way == Way::send;
    nb::object view = nb::steal(PyMemoryView_FromMemory(
        message.bytes == 0 ? &nothing : reinterpret_cast<char*>(message.data()),
        static_cast<Py_ssize_t>(message.bytes), sends ? PyBUF_READ : PyBUF_WRITE));
    if (!view.is_valid()) throw nb::python_error();
    views_.push_back({view.inc_ref().ptr(), message.way, message.bytes});
    return view;
  }
  void add_transfer(nb::object transfer) {  // None: moved already
    if (!transfer.is_none()) transfers_.push_back(transfer.release().ptr());
  }

  void wait() override {
    if (finished_) return;
    const nb::gil_scoped_acquire gil;
    try {
      for (; waited_ < transfers_.size(); ++waited_) nb::handle(transfers_[waited_]).attr("wait")();
    } catch (const nb::python_error& error) {
      const PythonFailure failure(where_, error);
      transport_->store_health({false, failure.rank(), failure.what()});
      throw failure;
    }
    finished_ = true;
    for (const View& view : views_) {
      const bool sends = view.way == Way::send;
      (sends ? counters_->bytes_sent : counters_->bytes_received) +=
          static_cast<std::uint64_t>(view.bytes);
      (sends ? counters_->messages_sent : counters_->messages_received) += 1;
      release(view);
    }
  }

 private:
  struct View {
    PyObject* memory;
    Way way;
    std::int64_t bytes;
  };

  static void cancel(PyObject* transfer) {
    try {
      const nb::object method = nb::getattr(nb::handle(transfer), "cancel", nb::none());
      if (!method.is_none()) method();
    } catch (nb::python_error& error) {
      error.discard_as_unraisable("annulus: cancelling a transfer");
    } catch (const std::exception&) {  // nothing can be done about it, and nothing may leave
    }
  }

  // The memory is the executor's again. Whoever kept the view gets an error from Python instead of
  // somebody else's bytes; an array over it that is still alive prevents that, and then it is
  // theirs to leave alone.
  static void release(const View& view) noexcept {
    const nb::object none = nb::steal(PyObject_CallMethod(view.memory, "release", nullptr));
    if (!none.is_valid()) PyErr_Clear();
  }

  PyTransport* transport_;
  std::shared_ptr<Counters> counters_;
  std::string where_;
  std::vector<View> views_;
  std::vector<PyObject*> transfers_;
  std::size_t waited_ = 0;  // of the transfers
  bool finished_ = false;
};

// A batch in memory of a device, which Python has enqueued on the stream of `copies`.
class PyDeviceTicket final : public Ticket {
 public:
  PyDeviceTicket(PyTransport& transport, std::string where, std::shared_ptr<Queue> copies,
                 nb::object transfer, const TransportCounters& moved)
      : transport_(&transport),
        where_(std::move(where)),
        copies_(std::move(copies)),
        transfer_(transfer.release().ptr()),
        moved_(moved) {}
  ~PyDeviceTicket() override {
    if (!Py_IsInitialized()) return;
    const nb::gil_scoped_acquire gil;
    const nb::error_scope scope;
    if (!enqueued_ && PyObject_HasAttrString(transfer_, "cancel") == 1) {
      const nb::object none = nb::steal(PyObject_CallMethod(transfer_, "cancel", nullptr));
      if (!none.is_valid()) PyErr_Clear();
    }
    Py_DECREF(transfer_);
  }
  PyDeviceTicket(const PyDeviceTicket&) = delete;
  PyDeviceTicket& operator=(const PyDeviceTicket&) = delete;

  void wait() override {
    enqueue();
    moved_by_.wait();
  }
  void wait(Queue& queue) override {
    enqueue();
    queue.wait(moved_by_);
  }

 private:
  void enqueue() {
    if (enqueued_) return;
    {
      const nb::gil_scoped_acquire gil;
      try {
        nb::handle(transfer_).attr("wait")();
      } catch (const nb::python_error& error) {
        const PythonFailure failure(where_, error);
        transport_->store_health({false, failure.rank(), failure.what()});
        throw failure;
      }
    }
    moved_by_ = copies_->record();
    transport_->count(moved_);
    enqueued_ = true;
  }

  PyTransport* transport_;
  std::string where_;
  std::shared_ptr<Queue> copies_;
  PyObject* transfer_;
  TransportCounters moved_;
  Event moved_by_;
  bool enqueued_ = false;
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
  std::unique_ptr<Ticket> transfer_;
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

bool PyTransport::reaches(const Device& device) const {
  if (device.kind == Device::Kind::cpu) return true;
  const nb::gil_scoped_acquire gil;
  const nb::object self = nb::find(static_cast<Transport*>(const_cast<PyTransport*>(this)));
  return nb::cast<bool>(self.attr("reaches")(name_of(device)));
}

bool PyTransport::in_order() const {
  const nb::gil_scoped_acquire gil;
  const nb::object self = nb::find(static_cast<Transport*>(const_cast<PyTransport*>(this)));
  return nb::cast<bool>(self.attr("in_order"));
}

std::unique_ptr<Ticket> PyTransport::post_device(std::span<const Message> messages,
                                                 const Event& after) {
  const std::shared_ptr<Queue> copies = messages[0].region->copies;
  copies->wait(after);
  const nb::gil_scoped_acquire gil;
  const std::string where =
      fmt::format("[rank {}/{}] {} transport: post_device", rank_, size_, name_);
  nb::list batch;
  TransportCounters moved;
  for (const Message& message : messages) {
    const bool sends = message.way == Way::send;
    batch.append(nb::make_tuple(sends ? "send" : "receive", message.peer, message.tag,
                                reinterpret_cast<std::uintptr_t>(message.data()), message.bytes));
    (sends ? moved.bytes_sent : moved.bytes_received) += static_cast<std::uint64_t>(message.bytes);
    (sends ? moved.messages_sent : moved.messages_received) += 1;
  }
  try {
    const nb::object self = nb::find(static_cast<Transport*>(this));
    nb::object transfer = self.attr("post_device")(
        batch, name_of(copies->device()), reinterpret_cast<std::uintptr_t>(cuda_stream(*copies)));
    return std::make_unique<PyDeviceTicket>(*this, where, copies, std::move(transfer), moved);
  } catch (const nb::python_error& error) {
    const PythonFailure failure(where, error);
    store_health({false, failure.rank(), failure.what()});
    throw failure;
  }
}

std::unique_ptr<Ticket> PyTransport::post(std::span<const Message> messages, const Event& after) {
  if (!messages.empty() && messages[0].region->copies != nullptr)
    return post_device(messages, after);
  after.wait();
  const nb::gil_scoped_acquire gil;
  std::string where = fmt::format("[rank {}/{}] {} transport", rank_, size_, name_);
  if (messages.size() == 1) {
    const bool sends = messages[0].way == Way::send;
    where += fmt::format(": {} rank {}", sends ? "send to" : "receive from", messages[0].peer);
  }
  auto ticket = std::make_unique<PyTicket>(*this, counters_, where);
  const nb::object self = nb::find(static_cast<Transport*>(this));
  try {
    const nb::object post_all = nb::getattr(self, "post", nb::none());
    if (!post_all.is_none()) {
      nb::list batch;
      for (const Message& message : messages) {
        batch.append(nb::make_tuple(message.way == Way::send ? "send" : "receive", message.peer,
                                    message.tag, ticket->add_view(message)));
      }
      where += ": post";
      ticket->add_transfer(post_all(batch));
      return ticket;
    }
    for (const Message& message : messages) {
      const bool sends = message.way == Way::send;
      where = fmt::format("[rank {}/{}] {} transport: {} rank {}", rank_, size_, name_,
                          sends ? "send to" : "receive from", message.peer);
      const nb::object view = ticket->add_view(message);
      ticket->add_transfer(self.attr(sends ? "send" : "receive")(message.peer, message.tag, view));
    }
    return ticket;
  } catch (const nb::python_error& error) {
    const PythonFailure failure(where, error);
    store_health({false, failure.rank(), failure.what()});
    throw failure;
  }
}

void PyTransport::store_health(Health health) {
  const std::lock_guard lock(health_mutex_);
  if (health_.alive) health_ = std::move(health);  // the first reason is the one worth knowing
}

Health PyTransport::stored_health() const {
  const std::lock_guard lock(health_mutex_);
  return health_;
}

Health PyTransport::health() const {
  const nb::gil_scoped_acquire gil;
  const nb::error_scope scope;
  try {
    const nb::dict told = nb::cast<nb::dict>(
        nb::find(static_cast<Transport*>(const_cast<PyTransport*>(this))).attr("health")());
    return {nb::cast<bool>(told["alive"]), nb::cast<int>(told["lost_rank"]),
            nb::cast<std::string>(told["reason"])};
  } catch (const nb::python_error& error) {
    // Ctrl-C, heard here because everything else waits in C++: it is raised when that has ended.
    if (error.matches(PyExc_KeyboardInterrupt)) PyErr_SetInterrupt();
    return {false, rank_, std::string("health() failed: ") + error.what()};
  } catch (const std::exception& error) {
    return {false, -1, std::string("health() failed: ") + error.what()};
  }
}

void PyTransport::abort(const std::string& reason) noexcept {
  if (!Py_IsInitialized()) return;
  const nb::gil_scoped_acquire gil;
  const nb::error_scope scope;
  try {
    store_health({false, rank_, reason});
    nb::find(static_cast<Transport*>(this)).attr("abort")(python_text(reason));
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

std::chrono::milliseconds PyTransport::deadline() const { return milliseconds_of(deadline_); }

void PyTransport::count(const TransportCounters& moved) {
  counters_->bytes_sent += moved.bytes_sent;
  counters_->messages_sent += moved.messages_sent;
  counters_->bytes_received += moved.bytes_received;
  counters_->messages_received += moved.messages_received;
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
      .def("cancel", &Pending::cancel, "Gives up; the buffer is not touched afterwards.");

  nb::class_<Transport, PyTransport>(module, "Transport",
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
