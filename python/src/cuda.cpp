#include <fmt/format.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <atomic>
#include <string>

#include "annulus/cuda.h"
#include "annulus/error.h"
#include "bindings.h"

namespace annulus::python {
namespace {

// Python's functions for memory. Never released, because executors may outlive the module.
struct PythonAllocator {
  PyObject* allocate;
  PyObject* free;
  PyObject* spare;
};

// Set when Python begins to exit: memory freed afterwards is released with the process.
std::atomic<bool> python_ends = false;

void* allocate(const PythonAllocator& from, int device, std::int64_t bytes) {
  if (python_ends) return nullptr;
  const nb::gil_scoped_acquire gil;
  try {
    const nb::object address = nb::handle(from.allocate)(device, bytes);
    return reinterpret_cast<void*>(nb::cast<std::uintptr_t>(address));
  } catch (const nb::python_error& error) {
    throw DeviceError(fmt::format("cuda:{}: allocating {} bytes: {}", device, bytes, error.what()));
  }
}

void free(const PythonAllocator& from, int device, void* memory) noexcept {
  if (python_ends || !Py_IsInitialized()) return;
  const nb::gil_scoped_acquire gil;
  const nb::error_scope scope;  // may run during stack unwinding
  try {
    nb::handle(from.free)(device, reinterpret_cast<std::uintptr_t>(memory));
  } catch (nb::python_error& error) {
    error.discard_as_unraisable("annulus: freeing memory of a CUDA device");
  } catch (const std::exception&) {  // cannot be handled; must not throw
  }
}

std::int64_t spare(const PythonAllocator& from, int device) noexcept {
  if (python_ends || !Py_IsInitialized()) return 0;
  const nb::gil_scoped_acquire gil;
  const nb::error_scope scope;
  try {
    return nb::cast<std::int64_t>(nb::handle(from.spare)(device));
  } catch (nb::python_error& error) {
    error.discard_as_unraisable("annulus: asking for spare memory of a CUDA device");
  } catch (const std::exception&) {  // not a number
  }
  return 0;
}

nb::list devices() {
  nb::list list;
  for (int index = 0; index < cuda_device_count(); ++index) {
    CudaDevice found;
    std::string complaint;
    try {
      found = cuda_device(index);
    } catch (const Error& error) {
      complaint = error.what();
    }
    nb::dict dict;
    dict["device"] = name_of(Device{Device::Kind::cuda, index});
    dict["name"] = found.name;
    dict["capability"] = nb::make_tuple(found.major, found.minor);
    dict["multiprocessors"] = found.multiprocessors;
    dict["memory_bytes"] = found.memory_bytes;
    dict["free_bytes"] = found.free_bytes;
    dict["kernels"] = found.kernels;
    dict["complaint"] = complaint;
    list.append(dict);
  }
  return list;
}

}  // namespace

void bind_cuda(nb::module_& module) {
  module.def("cuda_built", &cuda_built, "Whether this build has kernels for CUDA devices.");
  module.def("cuda_complaint", &cuda_complaint,
             "Why there is no CUDA device to be used; empty: there is one.");
  module.def(
      "cuda_devices", &devices, nb::sig("def cuda_devices() -> list[dict[str, typing.Any]]"),
      R"(The CUDA devices of this machine, a dict each: 'device' ('cuda:0'), 'name', 'capability', a pair,
'multiprocessors', 'memory_bytes', 'free_bytes', 'kernels' (the best ones that run there) and
'complaint' (why the device cannot be used, else empty). No devices: :func:`cuda_complaint` says why.)");
  module.def(
      "use_cuda_allocator",
      [](nb::object allocate_with, nb::object free_with, nb::object spare_by) {
        if (!cuda_built()) return;
        const PythonAllocator from{allocate_with.release().ptr(), free_with.release().ptr(),
                                   spare_by.release().ptr()};
        use_cuda_allocator(
            {.allocate = [from](int device,
                                std::int64_t bytes) { return allocate(from, device, bytes); },
             .free = [from](int device, void* memory) { free(from, device, memory); },
             .spare = [from](int device) { return spare(from, device); }});
      },
      nb::arg("allocate"), nb::arg("free"), nb::arg("spare"),
      nb::sig("def use_cuda_allocator(allocate: collections.abc.Callable[[int, int], int], free: "
              "collections.abc.Callable[[int, int], None], spare: collections.abc.Callable[[int], "
              "int]) -> None"),
      R"(From where executors that are made from now on take memory of CUDA devices.

allocate(device, bytes) returns an address that any stream may use at once, or 0 where there is no
memory; free(device, address) takes it back when all work with it is done; spare(device) is the number
of bytes that it keeps from the device and could give.)");
  // Functions registered with atexit run before Python finalises.
  nb::module_::import_("atexit").attr("register")(nb::cpp_function([] { python_ends = true; }));
}

}  // namespace annulus::python
