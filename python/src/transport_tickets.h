#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "errors.h"
#include "prepared_messages.h"
#include "transport.h"

// Messages of a Python transport that are under way.
namespace annulus::python {

inline void add(TransportCounters& moved, const Message& message) {
  const bool sends = message.way == Way::send;
  (sends ? moved.bytes_sent : moved.bytes_received) += static_cast<std::uint64_t>(message.bytes);
  (sends ? moved.messages_sent : moved.messages_received) += 1;
}

// The objects that Python methods returned for the messages of a batch, or for all of it.
class PyTicket final : public Ticket {
 public:
  // `limit`: the argument of wait() of these objects, or None to call it without one.
  PyTicket(PyTransport& transport, std::string where, nb::object limit = nb::none())
      : transport_(&transport), where_(std::move(where)), limit_(limit.release().ptr()) {}
  PyTicket(const PyTicket&) = delete;
  PyTicket& operator=(const PyTicket&) = delete;

  // May run while an error unwinds the executor, so it must not throw.
  ~PyTicket() override {
    if (!can_hold_gil()) return;
    const nb::gil_scoped_acquire gil;
    // Calls into Python here must not disturb an exception that is being raised.
    const nb::error_scope scope;
    if (Py_IsInitialized()) {  // else Python's modules are being taken apart
      for (std::size_t i = waited_; i < transfers_.size(); ++i) cancel(transfers_[i].object);
    }
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
  // The object that moves one message, or all of them (peer -1). None: moved already.
  void add_transfer(nb::object transfer, int peer, Way way) {
    if (!transfer.is_none()) transfers_.push_back({transfer.release().ptr(), peer, way});
  }
  void add_bytes(const Message& message) { add(moved_, message); }

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
    } catch (const std::exception&) {  // cannot be handled; must not throw
    }
  }

  // The executor reuses the memory from here on. Using a view that was kept raises an error in
  // Python instead of reading other bytes. If an array over the view still exists, the release
  // fails, and the array's owner must not use it.
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
  std::size_t waited_ = 0;  // index of the next transfer
  bool finished_ = false;
};

// A batch in device memory, which Python has enqueued on the stream of `copies`.
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
    if (!can_hold_gil()) return;
    const nb::gil_scoped_acquire gil;
    const nb::error_scope scope;
    if (Py_IsInitialized() && !enqueued_ && PyObject_HasAttrString(transfer_, "cancel") == 1) {
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

// A batch in memory of several devices, or of a device and the host: Python gets one call for each.
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

}  // namespace annulus::python
