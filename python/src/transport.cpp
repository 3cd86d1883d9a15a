#include "transport.h"

#include <fmt/format.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "annulus/cuda.h"
#include "annulus/error.h"
#include "annulus/in_process.h"
#include "bindings.h"
#include "errors.h"
#include "prepared_messages.h"

namespace annulus::python {
namespace {

// ---- from C++ to Python: messages that a Python transport has under way

// What Python's methods returned for the messages of a batch, or for all of it.
class PyTicket final : public Ticket {
 public:
  // `limit`: the argument of wait() of what Python returns, or None for none.
  PyTicket(PyTransport& transport, std::string where, nb::object limit = nb::none())
      : transport_(&transport), where_(std::move(where)), limit_(limit.release().ptr()) {}
  PyTicket(const PyTicket&) = delete;
  PyTicket& operator=(const PyTicket&) = delete;

  // May run while an error unwinds the executor: nothing leaves it.
  ~PyTicket() override {
    if (!Py_IsInitialized()) return;
    const nb::gil_scoped_acquire gil;
    // What Python is told here must not disturb an exception that is on its way.
    const nb::error_scope scope;
    for (std::size_t i = waited_; i < transfers_.size(); ++i) cancel(transfers_[i].object);
    for (PyObject* view : views_) release(view);
    for (const Transfer& transfer : transfers_) Py_DECREF(transfer.object);
    for (PyObject* view : views_) Py_DECREF(view);
    Py_DECREF(limit_);
  }

  // These need the GIL.
  nb::object add_view(const Message& message) {
    nb::object view = view_of(message);
    views_.push_back(view.inc_ref().ptr());
    return view;
  }
  // What moves a message, or with -1 all of them. None: moved already.
  void add_transfer(nb::object transfer, int peer, Way way) {
    if (!transfer.is_none()) transfers_.push_back({transfer.release().ptr(), peer, way});
  }
  void add_bytes(const Message& message) {
    const bool sends = message.way == Way::send;
    (sends ? moved_.bytes_sent : moved_.bytes_received) +=
        static_cast<std::uint64_t>(message.bytes);
    (sends ? moved_.messages_sent : moved_.messages_received) += 1;
  }

  int traverse(visitproc visit, void* arg) const {
    for (const Transfer& transfer : transfers_) Py_VISIT(transfer.object);
    for (PyObject* view : views_) Py_VISIT(view);
    return 0;
  }

  void wait() override {
    if (finished_) return;
    const nb::gil_scoped_acquire gil;
    const PyTransport::Waiting waiting(*transport_);
    for (; waited_ < transfers_.size(); ++waited_) {
      const Transfer& transfer = transfers_[waited_];
      waiting.is_for(transfer.peer);
      try {
        wait_for(transfer.object, limit_);
      } catch (const nb::python_error& error) {
        transport_->fail(where_, transfer.peer, transfer.way, error);
      }
    }
    finished_ = true;
    transport_->count(moved_);
    for (PyObject* view : views_) release(view);
  }

 private:
  struct Transfer {
    PyObject* object;
    int peer;
    Way way;
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
  static void release(PyObject* view) noexcept {
    const nb::object none = nb::steal(PyObject_CallMethod(view, "release", nullptr));
    if (!none.is_valid()) PyErr_Clear();
  }

  PyTransport* transport_;
  std::string where_;
  PyObject* limit_;
  std::vector<PyObject*> views_;
  std::vector<Transfer> transfers_;
  TransportCounters moved_;
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
        transport_->fail(where_, error);
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

// A batch in memory of several devices, or of one and the host: Python gets one for each.
class PartedTicket final : public Ticket {
 public:
  void add(std::unique_ptr<Ticket> part) { parts_.push_back(std::move(part)); }
  void wait() override {
    for (const auto& part : parts_) part->wait();
  }
  void wait(Queue& queue) override {
    for (const auto& part : parts_) part->wait(queue);
  }

 private:
  std::vector<std::unique_ptr<Ticket>> parts_;
};

bool is_mixed(std::span<const Message> messages) {
  return std::ranges::any_of(messages, [&](const Message& message) {
    return message.region->copies != messages[0].region->copies;
  });
}

std::unique_ptr<Ticket> post_parts(PyTransport& transport, std::span<const Message> messages,
                                   const Event& after) {
  std::map<std::shared_ptr<Queue>, std::vector<Message>> parts;
  for (const Message& message : messages) parts[message.region->copies].push_back(message);
  auto ticket = std::make_unique<PartedTicket>();
  for (const auto& [copies, part] : parts) ticket->add(transport.post(part, after));
  return ticket;
}

// ---- from Python to C++: sends and receives of the built-in transports

// A transfer of a built-in transport and the buffer that it holds on to.
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
    if (transfer_ == nullptr) return;
    {
      const nb::gil_scoped_release no_gil;  // it may have to let a copy finish
      transfer_.reset();
    }
    PyBuffer_Release(&buffer_);
  }

  // As Python's collector asks: what a Python transport has made for it may lead back to it.
  int traverse(visitproc visit, void* arg) const {
    Py_VISIT(owner_.ptr());
    const auto* ticket = dynamic_cast<const PyTicket*>(transfer_.get());
    return ticket == nullptr ? 0 : ticket->traverse(visit, arg);
  }

 private:
  nb::object owner_;  // the transport, which the ticket knows
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

// Python's own methods are found before these, so a Python transport only gets here without one, or
// through super().
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

std::string doing(Way way, int peer) {
  return fmt::format("{} rank {}", way == Way::send ? "send to" : "receive from", peer);
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

// What a Python transport has said of its messages may lead back to it.
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
    fail(where, error);
  }
}

std::unique_ptr<Ticket> PyTransport::post(std::span<const Message> messages, const Event& after) {
  if (is_mixed(messages)) return post_parts(*this, messages, after);
  if (!messages.empty() && messages[0].region->copies != nullptr)
    return post_device(messages, after);
  after.wait();
  const nb::gil_scoped_acquire gil;
  const nb::object self = nb::find(static_cast<Transport*>(this));
  const nb::object prepare = nb::getattr(self, "prepare", nb::none());
  if (!prepare.is_none()) return post_prepared(messages, prepare);

  std::string where = fmt::format("[rank {}/{}] {} transport", rank_, size_, name_);
  if (messages.size() == 1) where += ": " + doing(messages[0].way, messages[0].peer);
  auto ticket = std::make_unique<PyTicket>(*this, where);
  try {
    const nb::object post_all = nb::getattr(self, "post", nb::none());
    if (!post_all.is_none()) {
      nb::list batch;
      for (const Message& message : messages) {
        batch.append(nb::make_tuple(message.way == Way::send ? "send" : "receive", message.peer,
                                    message.tag, ticket->add_view(message)));
        ticket->add_bytes(message);
      }
      where += ": post";
      ticket->add_transfer(post_all(batch), -1, Way::send);
      return ticket;
    }
    for (const Message& message : messages) {
      const bool sends = message.way == Way::send;
      where = fmt::format("[rank {}/{}] {} transport: {}", rank_, size_, name_,
                          doing(message.way, message.peer));
      const nb::object view = ticket->add_view(message);
      ticket->add_transfer(self.attr(sends ? "send" : "receive")(message.peer, message.tag, view),
                           message.peer, message.way);
      ticket->add_bytes(message);
    }
    return ticket;
  } catch (const nb::python_error& error) {
    fail(where, error);
  }
}

std::unique_ptr<Ticket> PyTransport::post_prepared(std::span<const Message> messages,
                                                   const nb::object& prepare) {
  const nb::object self = nb::find(static_cast<Transport*>(this));
  const nb::object limit = nb::getattr(self, "wait_limit", nb::none());
  auto ticket = std::make_unique<PyTicket>(
      *this, fmt::format("[rank {}/{}] {} transport", rank_, size_, name_), limit);
  for (const Message& message : messages) {
    ticket->add_bytes(message);
    if (message.bytes == 0) continue;
    try {
      nb::object transfer = prepared_.begin(message, prepare, limit);
      if (!transfer.is_valid()) continue;
      ticket->add_transfer(std::move(transfer), message.peer, message.way);
    } catch (const nb::python_error& error) {
      fail(fmt::format("[rank {}/{}] {} transport: {}", rank_, size_, name_,
                       doing(message.way, message.peer)),
           message.peer, message.way, error);
    }
  }
  return ticket;
}

void PyTransport::fail(const std::string& where, const nb::python_error& error) {
  const PythonFailure failure(where, error);
  store_health({false, failure.rank(), failure.what()});
  throw failure;
}

void PyTransport::fail(const std::string& where, int peer, Way way, const nb::python_error& error) {
  const nb::object self = nb::find(static_cast<Transport*>(this));
  const nb::object explain = nb::getattr(self, "explain", nb::none());
  if (explain.is_none() || peer < 0) fail(where, error);
  try {
    const nb::object meaning = explain(peer, way == Way::send ? "send" : "receive", error.value());
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(meaning.ptr())), meaning.ptr());
    throw nb::python_error();
  } catch (const nb::python_error& meant) {
    fail(where, meant);
  }
}

PyTransport::Waiting::Waiting(PyTransport& transport) : transport_(transport) {
  transport_.wait_peer_ = -1;
  transport_.wait_number_ += 1;
  transport_.wait_begin_ = std::chrono::steady_clock::now().time_since_epoch().count();
}

PyTransport::Waiting::~Waiting() { transport_.wait_begin_ = 0; }

void PyTransport::Waiting::is_for(int peer) const { transport_.wait_peer_ = peer; }

nb::object PyTransport::waiting() const {
  const std::uint64_t number = wait_number_;
  const auto begin = wait_begin_.load();
  if (begin == 0) return nb::none();
  const auto now = std::chrono::steady_clock::now().time_since_epoch().count();
  const std::chrono::steady_clock::duration taken(now - begin);
  return nb::make_tuple(number, std::chrono::duration<double>(taken).count(), wait_peer_.load());
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
  nb::class_<Pending>(module, "Transfer", nb::type_slots(pending_slots),
                      "One send or receive under way, as :meth:`Transport.send` and "
                      ":meth:`Transport.receive` of built-in transports return it.")
      .def("wait", &Pending::wait,
           "Blocks until the bytes have moved. TransportError after the deadline or an abort.")
      .def("cancel", &Pending::cancel, "Gives up; the buffer is not touched afterwards.");

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
          "waiting",
          [](const Transport& transport) -> nb::object {
            const auto* own = dynamic_cast<const PyTransport*>(&transport);
            return own == nullptr ? nb::none() : own->waiting();
          },
          nb::sig("def waiting(self) -> tuple[int, float, int] | None"),
          "Of a Python transport, from any thread: what a batch is being waited for, as (number of "
          "the wait, seconds so far, rank or -1); None: nothing is.")
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
