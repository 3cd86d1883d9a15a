#include "core/memory.h"

#include <nanobind/nanobind.h>

#include <cstdint>

#include "bindings.h"
#include "core/caches.h"

namespace annulus::python {
namespace {

PyObject* hook = nullptr;  // released by set_allocation_hook only, with the GIL

bool ask(std::int64_t bytes, const char* what) {
  const nb::gil_scoped_acquire gil;
  const nb::object asked = nb::borrow(hook);
  return !asked.is_valid() || nb::cast<bool>(asked(bytes, what));
}

}  // namespace

void bind_memory(nb::module_& module) {
  module.def(
      "drop_caches",
      [] {
        const nb::gil_scoped_release no_gil;
        return drop_caches().bytes;
      },
      "Frees all workspaces that this process keeps between calls and that are not in use: of "
      "attention, "
      "of "
      "all rings and caches. Returns their bytes.");
  module.def(
      "set_allocation_hook",
      [](nb::object callable) {
        set_allocation_hook(nullptr);
        PyObject* const before = hook;
        hook = callable.is_none() ? nullptr : callable.release().ptr();
        Py_XDECREF(before);
        if (hook != nullptr) set_allocation_hook(&ask);
      },
      nb::arg("callable").none(),
      nb::sig(
          "def set_allocation_hook(callable: typing.Callable[[int, str], bool] | None) -> None"),
      "For tests: callable(bytes, what) decides whether an allocation succeeds. Set it while no "
      "call "
      "runs.");
  module.def("memory_in_use", &memory_in_use,
             "For tests: bytes that the library has allocated and not freed.");
}

}  // namespace annulus::python
