#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "core/lease_pool.h"
#include "errors.h"

namespace annulus::python {
namespace {

// A reference that any thread may drop, because any thread may run out of memory.
class Held {
 public:
  explicit Held(nb::object object) : pointer_(object.release().ptr(), release_anywhere) {}
  [[nodiscard]] nb::handle get() const { return pointer_.get(); }

 private:
  std::unique_ptr<PyObject, void (*)(PyObject*) noexcept> pointer_;
};

// Executors between calls, for callers that take and return them.
struct Pool {
  explicit Pool(std::size_t capacity) : core(capacity) {}
  LeasePool<Held> core;

  [[nodiscard]] std::vector<nb::object> executors() const {
    std::vector<nb::object> kept;
    core.for_each([&](const Held& executor) { kept.push_back(nb::borrow(executor.get())); });
    return kept;
  }
};

// Python objects are only used with the GIL, and the pool's lock is never held while Python runs.
// So the garbage collector never meets a locked pool.
int traverse_pool(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (!nb::inst_ready(self)) return 0;
  int result = 0;
  nb::inst_ptr<Pool>(self)->core.for_each([&](const Held& executor) {
    if (result == 0) result = visit(executor.get().ptr(), arg);
  });
  return result;
}

int clear_pool(PyObject* self) {
  if (nb::inst_ready(self)) nb::inst_ptr<Pool>(self)->core.clear();
  return 0;
}

}  // namespace

void bind_executor_pool(nb::module_& module) {
  static PyType_Slot pool_slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(traverse_pool)},
                                     {Py_tp_clear, reinterpret_cast<void*>(clear_pool)},
                                     {0, nullptr}};
  nb::class_<Pool>(module, "ExecutorPool", nb::type_slots(pool_slots),
                   R"(Executors between calls, by what they are for.

One is taken out while it runs, so that a caller on another thread makes its own instead of waiting.
At most `capacity` are kept, and no more bytes than the memory of their device has room for (see
:class:`RingAttentionCache`); the least recently used one is dropped first, all of them when memory runs
out.)")
      .def(nb::init<std::size_t>(), nb::arg("capacity") = 20)
      .def(
          "take",
          [](Pool& self, const std::string& key) {
            const std::optional<Held> held = self.core.take(key);
            return held ? nb::borrow(held->get()) : nb::object(nb::none());
          },
          nb::arg("key"), nb::sig("def take(self, key: str) -> RingAttention | None"),
          "Takes an executor that was given back under this key out of the pool; None: there is "
          "none.")
      .def(
          "make_room", [](Pool& self) { self.core.make_room(); },
          "Makes room for one more executor, so that memory is free before that one allocates its "
          "own.")
      .def(
          "give_back",
          [](Pool& self, std::string key, nb::object executor) {
            const Footprint footprint = footprint_of(executor);
            self.core.give_back(std::move(key), Held(std::move(executor)), footprint.bytes,
                                footprint.device);
          },
          nb::arg("key"), nb::arg("executor"),
          nb::sig("def give_back(self, key: str, executor: RingAttention) -> None"),
          "Keeps an executor for the next call.")
      .def(
          "clear", [](Pool& self) { self.core.clear(); }, "Drops all executors in the pool.")
      .def(
          "executors",
          [](const Pool& self) {
            nb::list list;
            for (const nb::object& executor : self.executors()) list.append(executor);
            return list;
          },
          nb::sig("def executors(self) -> list[RingAttention]"), "The executors in the pool.");
}

}  // namespace annulus::python
