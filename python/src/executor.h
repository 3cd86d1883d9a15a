#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "annulus/error.h"
#include "annulus/ring_attention.h"

// What the bindings of executors, of their cache and of other collective calls share.
namespace annulus::python {

namespace nb = nanobind;

// An executor and the transport that it uses.
struct Ring {
  nb::object transport;
  std::shared_ptr<RingAttention> core;
  double flops = 0;           // of forward
  std::string documents_key;  // by which callers recognise the documents that it has
  std::int64_t bytes = 0;
  // The caller's stream that this object last gave to the executor, and its queue. Another object
  // that shares the executor may have given it a different one since.
  std::uintptr_t stream = 0;
  std::shared_ptr<Queue> queue;
  std::shared_ptr<Queue> own;  // used between streams; null: no stream was left yet

  Ring(nb::object link, std::shared_ptr<RingAttention> executor);
  void set_documents(std::vector<Document> documents);
  void measure();  // flops and bytes
  // Enqueues passes on the stream from now on, after all earlier work.
  void use_stream(std::uintptr_t number);
  // Stops using a stream that its owner may destroy. The next passes come after the work enqueued
  // there.
  void leave_stream();
};

// A transport written in Python may refer back to its executor. The garbage collector must see both
// edges of such a cycle.
template <typename T>
int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (nb::inst_ready(self)) Py_VISIT(nb::inst_ptr<T>(self)->transport.ptr());
  return 0;
}

template <typename T>
int clear(PyObject* self) {
  // The executor goes first, because it holds transfers of the transport.
  if (nb::inst_ready(self)) {
    nb::inst_ptr<T>(self)->core.reset();
    nb::inst_ptr<T>(self)->transport.reset();
  }
  return 0;
}

template <typename T>
PyType_Slot* slots() {
  static PyType_Slot table[] = {{Py_tp_traverse, reinterpret_cast<void*>(traverse<T>)},
                                {Py_tp_clear, reinterpret_cast<void*>(clear<T>)},
                                {0, nullptr}};
  return table;
}

// Whether calls wait for other ranks in C++, where Ctrl-C is not noticed.
[[nodiscard]] bool waits_in_cpp(const Transport& transport);

// Runs a collective call that is no pass, such as a construction. Ctrl-C ends the transport.
void construct(Transport& transport, const std::function<void()>& make);

// The text of an error for the other ranks. Needs the GIL.
[[nodiscard]] std::string reason_of(const std::exception& error);

// Runs `make`, which checks this rank's arguments before it can take part in a call. If that fails,
// reports the error to the other ranks and rethrows it.
template <typename Make>
auto telling_others(Transport& transport, const Make& make) {
  try {
    return make();
  } catch (const std::exception& error) {
    const std::string reason = reason_of(error);
    try {
      construct(transport, [&] { RingAttention::refuse(transport, reason); });
    } catch (const ConfigError&) {  // expected; the original error says more
    }
    throw;
  }
}

[[nodiscard]] nb::dict dict_of(const MemoryInfo& info);

}  // namespace annulus::python
