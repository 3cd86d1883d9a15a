#include "torch_tensors.h"

#include <nanobind/nanobind.h>

#include <utility>

namespace annulus::python {
namespace {

// Looked up once and never released.
struct Torch {
  PyObject* tensor = nullptr;
  PyObject* parameter = nullptr;
  PyObject* float32 = nullptr;
  PyObject* float16 = nullptr;
  PyObject* bfloat16 = nullptr;
  PyObject* strided = nullptr;
  PyObject* current_stream = nullptr;  // (device) -> a number
  // Names of attributes.
  PyObject* data_ptr = PyUnicode_InternFromString("data_ptr");
  PyObject* shape = PyUnicode_InternFromString("shape");
  PyObject* stride = PyUnicode_InternFromString("stride");
  PyObject* dtype = PyUnicode_InternFromString("dtype");
  PyObject* layout = PyUnicode_InternFromString("layout");
  PyObject* is_cpu = PyUnicode_InternFromString("is_cpu");
  PyObject* is_cuda = PyUnicode_InternFromString("is_cuda");
  PyObject* get_device = PyUnicode_InternFromString("get_device");
  PyObject* is_neg = PyUnicode_InternFromString("is_neg");
};

// Null: PyTorch has not been imported, or its import has not finished.
const Torch* torch() {
  static Torch* known = nullptr;  // the GIL is held
  if (known != nullptr) return known;
  const nb::object name = nb::steal(PyUnicode_FromString("torch"));
  const nb::object module = nb::steal(PyImport_GetModule(name.ptr()));
  if (!module.is_valid()) {
    PyErr_Clear();
    return nullptr;
  }
  try {
    auto* found = new Torch;
    const auto get = [](nb::handle from, const char* what) {
      return nb::object(from.attr(what)).release().ptr();
    };
    found->tensor = get(module, "Tensor");
    found->parameter = get(module.attr("nn"), "Parameter");
    found->float32 = get(module, "float32");
    found->float16 = get(module, "float16");
    found->bfloat16 = get(module, "bfloat16");
    found->strided = get(module, "strided");
    // A tenth of what making a torch.cuda.Stream takes; builds without CUDA have neither.
    const nb::object low = module.attr("_C");
    if (nb::hasattr(low, "_cuda_getCurrentRawStream"))
      found->current_stream = get(low, "_cuda_getCurrentRawStream");
    known = found;
  } catch (nb::python_error& error) {  // it is being imported
    error.restore();
    PyErr_Clear();
  }
  return known;
}

nb::object get(nb::handle from, PyObject* name) {
  return nb::steal(PyObject_GetAttr(from.ptr(), name));
}
nb::object call(nb::handle on, PyObject* name) {
  PyObject* const arguments[] = {on.ptr()};
  return nb::steal(PyObject_VectorcallMethod(name, arguments, 1, nullptr));
}

bool read(const nb::object& tuple, std::array<std::int64_t, Found::kMostAxes>& out, int& count) {
  if (!tuple.is_valid() || !PyTuple_Check(tuple.ptr())) return false;
  const Py_ssize_t size = PyTuple_Size(tuple.ptr());
  if (size < 0 || size > Found::kMostAxes) return false;
  count = static_cast<int>(size);
  for (Py_ssize_t i = 0; i < size; ++i) {
    PyObject* const item = PyTuple_GetItem(tuple.ptr(), i);
    if (!PyLong_Check(item)) return false;  // a symbol
    out[static_cast<std::size_t>(i)] = PyLong_AsLongLong(item);
  }
  return true;
}

bool find(const Torch& names, nb::handle array, Found& found) {
  const nb::object dtype = get(array, names.dtype);
  if (!dtype.is_valid()) return false;
  if (dtype.is(names.float32)) {
    found.dtype = DType::f32;
  } else if (dtype.is(names.bfloat16)) {
    found.dtype = DType::bf16;
  } else if (dtype.is(names.float16)) {
    found.dtype = DType::f16;
  } else {
    return false;
  }
  if (!get(array, names.layout).is(names.strided)) return false;
  if (!call(array, names.is_neg).is(Py_False)) return false;  // the lazy negation bit is set
  found.device = {};
  if (!get(array, names.is_cpu).is(Py_True)) {
    if (!get(array, names.is_cuda).is(Py_True)) return false;
    const nb::object index = call(array, names.get_device);
    if (!index.is_valid()) return false;
    found.device = {Device::Kind::cuda, static_cast<int>(PyLong_AsLong(index.ptr()))};
  }
  int strides = 0;
  if (!read(get(array, names.shape), found.shape, found.axes) ||
      !read(call(array, names.stride), found.stride, strides) || strides != found.axes)
    return false;
  const nb::object address = call(array, names.data_ptr);  // wrappers have none
  if (!address.is_valid()) return false;
  found.data = PyLong_AsVoidPtr(address.ptr());
  return true;
}

}  // namespace

bool find_torch_tensor(nb::handle array, Found& found) {
  const Torch* const names = torch();
  if (names == nullptr) return false;
  const nb::handle type = array.type();
  // Subclasses may behave in any way.
  if (!type.is(names->tensor) && !type.is(names->parameter)) return false;
  const bool is_one = find(*names, array, found);
  if (PyErr_Occurred() == nullptr) return is_one;
  PyErr_Clear();
  return false;
}

std::uintptr_t current_torch_stream(int device) {
  const Torch* const names = torch();
  if (names != nullptr && names->current_stream != nullptr)
    return nb::cast<std::uintptr_t>(nb::handle(names->current_stream)(device));
  const nb::object cuda = nb::module_::import_("torch.cuda");
  return nb::cast<std::uintptr_t>(cuda.attr("current_stream")(device).attr("cuda_stream"));
}

TorchStreamScope::TorchStreamScope(int device, std::uintptr_t stream) {
  constexpr std::uintptr_t kLegacy = 1;  // another number for the default stream, which is 0
  if (stream == kLegacy) stream = 0;
  if (stream == current_torch_stream(device)) return;
  const nb::object cuda = nb::module_::import_("torch.cuda");
  const nb::object wanted = stream == 0
                                ? cuda.attr("default_stream")(device)
                                : cuda.attr("ExternalStream")(stream, nb::arg("device") = device);
  nb::object scope = cuda.attr("stream")(wanted);
  scope.attr("__enter__")();
  scope_ = std::move(scope);
}

TorchStreamScope::~TorchStreamScope() {
  if (!scope_.is_valid()) return;
  const nb::error_scope saved;  // may run during stack unwinding
  try {
    scope_.attr("__exit__")(nb::none(), nb::none(), nb::none());
  } catch (nb::python_error& error) {
    error.discard_as_unraisable("annulus: leaving a stream of PyTorch's");
  }
}

}  // namespace annulus::python
