#include "transport.h"

#include <fmt/format.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "annulus/cuda.h"
#include "annulus/error.h"
#include "errors.h"
#include "transport_tickets.h"

namespace annulus::python {
namespace {

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

std::string doing(Way way, int peer) {
  return fmt::format("{} rank {}", way == Way::send ? "send to" : "receive from", peer);
}

}  // namespace

std::chrono::milliseconds milliseconds_of(double seconds) {
  constexpr double kLongest = 1e9;  // seconds, about 30 years: long enough
  if (!(seconds > 0.0)) {
    throw ConfigError(
        fmt::format("Transport.set_deadline: the deadline is {} s, expected more than 0", seconds));
  }
  const double rounded = std::ceil(std::min(seconds, kLongest) * 1000.0);
  return std::chrono::milliseconds(static_cast<std::int64_t>(rounded));
}

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
    batch.append(nb::make_tuple(message.way == Way::send ? "send" : "receive", message.peer,
                                message.tag, reinterpret_cast<std::uintptr_t>(message.data()),
                                message.bytes));
    add(moved, message);
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

void PyTransport::finish_sends() {
  const nb::object self = nb::find(static_cast<Transport*>(this));
  prepared_.finish_sends(nb::getattr(self, "wait_limit", nb::none()));
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
  if (health_.alive) health_ = std::move(health);  // keep only the first reason
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
    // Checks for Ctrl-C here, because everything else waits in C++. It is raised when that has
    // ended.
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
  } catch (const std::exception&) {  // cannot be handled; must not throw
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

}  // namespace annulus::python
