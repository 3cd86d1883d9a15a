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

// Makes an executor or a cache work on its callers' CUDA streams.
class CallerStream {
 public:
  // Enqueues calls on the stream from now on, after all earlier work.
  template <typename Core>
  void use(Core& core, std::uintptr_t number) {
    if (queue_ != nullptr && number_ == number && &core.queue() == queue_.get()) return;
    queue_ = queue_of(core.options().device, number);
    number_ = number;
    core.use_queue(queue_);
  }
  // Stops using a stream that its owner may destroy. The next calls come after the work enqueued
  // there.
  template <typename Core>
  void leave(Core& core) {
    if (queue_ == nullptr) return;
    if (own_ == nullptr) own_ = own_queue(core.options().device, core.options().threads);
    core.use_queue(own_);
    queue_ = nullptr;
  }

 private:
  [[nodiscard]] static std::shared_ptr<Queue> queue_of(const Device& device, std::uintptr_t number);
  [[nodiscard]] static std::shared_ptr<Queue> own_queue(const Device& device, int threads);

  // The caller's stream that this object last gave to the executor, and its queue. Another object
  // that shares the executor may have given it a different one since.
  std::uintptr_t number_ = 0;
  std::shared_ptr<Queue> queue_;
  std::shared_ptr<Queue> own_;  // used between streams; null: no stream was left yet
};

// An executor and the transport that it uses.
struct Ring {
  nb::object transport;
  std::shared_ptr<RingAttention> core;
  double flops = 0;           // of forward
  std::string documents_key;  // by which callers recognise the documents that it has
  std::int64_t bytes = 0;
  CallerStream stream;

  Ring(nb::object link, std::shared_ptr<RingAttention> executor);
  void set_documents(std::vector<Document> documents);
  void measure();  // flops and bytes
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
