#include "prepared_messages.h"

#include <cstring>
#include <functional>
#include <utility>
#include <vector>

namespace annulus::python {
namespace {

// Records of agreements lie at varying addresses on stack and heap, so some messages never recur.
// All entries older than this number of entries are dropped together. A ring of 64 ranks has about
// 400.
constexpr std::size_t kMostKnown = 4096;

}  // namespace

nb::object view_of(const Message& message) {
  static char nothing = 0;  // an empty span may be null; a memoryview may not
  nb::object view = nb::steal(PyMemoryView_FromMemory(
      message.bytes == 0 ? &nothing : reinterpret_cast<char*>(message.data()),
      static_cast<Py_ssize_t>(message.bytes), message.way == Way::send ? PyBUF_READ : PyBUF_WRITE));
  if (!view.is_valid()) throw nb::python_error();
  return view;
}

std::size_t PreparedMessages::Hash::operator()(const Key& key) const {
  std::size_t hash = std::hash<const void*>()(key.data);
  for (const std::uint64_t part :
       {static_cast<std::uint64_t>(key.bytes), static_cast<std::uint64_t>(key.tag),
        static_cast<std::uint64_t>(key.peer) * 2 + (key.way == Way::send ? 1 : 0)}) {
    hash = (hash ^ part) * 0x100000001b3U;
  }
  return hash;
}

void wait_for(nb::handle transfer, nb::handle limit) {
  static PyObject* const name = PyUnicode_InternFromString("wait");
  const nb::object done =
      nb::steal(limit.is_none() ? PyObject_CallMethodNoArgs(transfer.ptr(), name)
                                : PyObject_CallMethodOneArg(transfer.ptr(), name, limit.ptr()));
  if (!done.is_valid()) throw nb::python_error();
}

void PreparedMessages::finish_sends(const nb::object& limit) {
  std::vector<nb::object> under_way;  // another thread may clear the entries while Python runs
  for (const Map* map : {&known_before_, &known_}) {
    for (const auto& [key, entry] : *map) {
      for (const Prepared& prepared : entry->turns) {
        if (prepared.under_way.is_valid()) under_way.push_back(prepared.under_way);
      }
    }
  }
  for (const nb::object& transfer : under_way) {
    try {
      wait_for(transfer, limit);
    } catch (const nb::python_error& error) {
      if (!error.matches(PyExc_Exception)) throw;
    }
  }
}

void PreparedMessages::clear() {
  known_.clear();
  known_before_.clear();
}

int PreparedMessages::traverse(visitproc visit, void* arg) const {
  for (const Map* map : {&known_, &known_before_}) {
    for (const auto& [key, entry] : *map) {
      for (const Prepared& prepared : entry->turns) {
        Py_VISIT(prepared.call.ptr());
        Py_VISIT(prepared.arguments.ptr());
        Py_VISIT(prepared.under_way.ptr());
      }
    }
  }
  return 0;
}

PreparedMessages::Prepared PreparedMessages::ask(const Message& message,
                                                 const nb::object& prepare) {
  Prepared prepared;
  Region copy;
  Message asked = message;
  if (message.way == Way::send && message.bytes <= kShortMessage) {
    prepared.copy = std::make_unique<std::byte[]>(static_cast<std::size_t>(message.bytes));
    copy.data = prepared.copy.get();
    copy.bytes = message.bytes;
    asked.region = &copy;
    asked.offset = 0;
  }
  const nb::object told = prepare(message.way == Way::send ? "send" : "receive", message.peer,
                                  message.tag, view_of(asked));
  if (!PyTuple_Check(told.ptr()) || PyTuple_GET_SIZE(told.ptr()) != 2 ||
      !PyTuple_Check(PyTuple_GET_ITEM(told.ptr(), 1))) {
    PyErr_SetString(PyExc_TypeError,
                    "Transport.prepare must return a callable and the tuple of its arguments");
    throw nb::python_error();
  }
  prepared.call = nb::borrow(PyTuple_GET_ITEM(told.ptr(), 0));
  prepared.arguments = nb::borrow(PyTuple_GET_ITEM(told.ptr(), 1));
  return prepared;
}

nb::object PreparedMessages::begin(const Message& message, const nb::object& prepare,
                                   const nb::object& limit) {
  const Key key{message.way, message.peer, message.tag, message.data(), message.bytes};
  if (known_.size() >= kMostKnown) known_before_ = std::exchange(known_, {});
  std::shared_ptr<Entry>& known = known_[key];
  if (known == nullptr) known = std::make_shared<Entry>();
  const std::shared_ptr<Entry> entry = known;  // another thread may clear them while Python runs
  Prepared& prepared = entry->turns[entry->next];
  if (!prepared.call.is_valid()) prepared = ask(message, prepare);
  if (prepared.copy != nullptr) {
    entry->next = 1 - entry->next;
    if (prepared.under_way.is_valid()) wait_for(prepared.under_way, limit);
    prepared.under_way.reset();
    std::memcpy(prepared.copy.get(), message.data(), static_cast<std::size_t>(message.bytes));
  }
  nb::object transfer =
      nb::steal(PyObject_CallObject(prepared.call.ptr(), prepared.arguments.ptr()));
  if (!transfer.is_valid()) throw nb::python_error();
  if (prepared.copy == nullptr) return transfer;
  if (transfer.is_none()) return {};  // finished already
  prepared.under_way = std::move(transfer);
  return {};
}

}  // namespace annulus::python
