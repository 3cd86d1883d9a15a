#include "arrays.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <new>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "annulus/error.h"
#include "core/caches.h"
#include "core/memory.h"
#include "errors.h"
#include "values.h"

namespace annulus::python {
namespace {

constexpr nb::dlpack::dtype kBfloat16{static_cast<std::uint8_t>(nb::dlpack::dtype_code::Bfloat), 16,
                                      1};

std::optional<DType> dtype_of(const nb::dlpack::dtype& dtype) {
  if (dtype == nb::dtype<float>()) return DType::f32;
  if (dtype == kBfloat16) return DType::bf16;
  const auto floats = static_cast<std::uint8_t>(nb::dlpack::dtype_code::Float);
  if (dtype.code == floats && dtype.bits == 16 && dtype.lanes == 1) return DType::f16;
  return std::nullopt;
}

std::string dtype_text(const nb::dlpack::dtype& dtype) {
  using Code = nb::dlpack::dtype_code;
  const auto code = static_cast<Code>(dtype.code);
  const char* kind = code == Code::Int       ? "int"
                     : code == Code::UInt    ? "uint"
                     : code == Code::Float   ? "float"
                     : code == Code::Bfloat  ? "bfloat"
                     : code == Code::Complex ? "complex"
                     : code == Code::Bool    ? "bool"
                                             : "a dtype of another kind, bits ";
  return code == Code::Bool ? kind : kind + std::to_string(dtype.bits);
}

std::string type_text(nb::handle object) {
  const std::string module = nb::str(object.type().attr("__module__")).c_str();
  const std::string name = nb::str(object.type().attr("__qualname__")).c_str();
  return module == "builtins" ? name : module + "." + name;
}

// By DLPack's numbers. None: kernels cannot access it.
std::optional<Device> device_of(int type, int index) {
  switch (type) {
    case 1:
    case 3:   // host memory, pinned by CUDA
    case 11:  // or by ROCm
      return Device{};
    case 2:
    case 13:  // managed by CUDA
      return Device{Device::Kind::cuda, index};
    default:
      return std::nullopt;
  }
}

std::string device_text(int type) {
  switch (type) {
    case 8:
      return "a Metal device";
    case 10:
      return "a ROCm device";
    default:
      return fmt::format("a device of DLPack type {}", type);
  }
}

bool requires_grad(nb::handle array) {
  return nb::getattr(array, "requires_grad", nb::none()).is(Py_True);
}

bool is_bfloat16_numpy(nb::handle array) {
  const nb::object dtype = nb::getattr(array, "dtype", nb::none());
  return nb::hasattr(array, "__array_interface__") && nb::hasattr(dtype, "name") &&
         nb::str(dtype.attr("name")).equal(nb::str("bfloat16"));
}

// A PyTorch tensor with the lazy negation bit set, which DLPack does not convey.
bool is_negated(nb::handle array) {
  const nb::object asked = nb::getattr(array, "is_neg", nb::none());
  return PyCallable_Check(asked.ptr()) != 0 && asked().is(Py_True);
}

// Python's reason why an array cannot be exported.
std::string export_problem(nb::handle array) {
  try {
    array.attr("__dlpack__")();
  } catch (const nb::python_error& error) {
    return printed(error.value());
  }
  return "";
}

template <typename Array>
bool try_import(nb::handle array, Array& out) {
  return nb::try_cast(nb::borrow(array), out, /*convert=*/false);
}

// Whether an array says that it is in CUDA memory.
bool says_cuda(nb::handle array) {
  if (PyObject_CheckBuffer(array.ptr()) != 0) return false;  // NumPy's
  const nb::object method = nb::getattr(array, "__dlpack_device__", nb::none());
  if (method.is_none()) return false;
  try {
    const nb::object device = method();
    const std::optional<Device> found = device_of(nb::cast<int>(nb::object(device[0])), 0);
    return found.has_value() && found->kind == Device::Kind::cuda;
  } catch (const std::exception&) {  // then it is rejected for what it gives to DLPack
    return false;
  }
}

// Exports an array of a CUDA device, so that work enqueued on `stream` comes after its pending
// work.
nb::object export_to_stream(nb::handle array, std::uintptr_t stream, bool writable) {
  constexpr std::uintptr_t kDefault = 1;  // 0 is ambiguous for DLPack
  const std::uintptr_t number = stream == 0 ? kDefault : stream;
  try {
    if (writable) {  // only newer versions flag arrays that are read-only
      return array.attr("__dlpack__")(nb::arg("stream") = number,
                                      nb::arg("max_version") = nb::make_tuple(1, 0));
    }
    return array.attr("__dlpack__")(nb::arg("stream") = number);
  } catch (const nb::python_error& error) {
    if (!error.matches(PyExc_TypeError) && !error.matches(PyExc_BufferError)) throw;
  }
  if (writable) return array.attr("__dlpack__")(nb::arg("stream") = number);
  return array.attr("__dlpack__")(nb::arg("stream") = number,
                                  nb::arg("max_version") = nb::make_tuple(1, 0));
}

}  // namespace

void Arrays::complain(const std::string& text) {
  if (complaint_.empty()) complaint_ = text;
}

void Arrays::check(const char* where) const {
  if (!complaint_.empty()) throw ConfigError(std::string(where) + ": " + complaint_);
}

template <typename Array>
bool Arrays::find(nb::handle array, const char* name, std::vector<Array>& held, Found& found) {
  constexpr bool kWritable = std::is_same_v<Array, nb::ndarray<>>;
  Array imported;
  bool bfloat16 = false;
  bool is_one = false;
  if (std::string_view(Py_TYPE(array.ptr())->tp_name) == "MaskedArray") {  // of numpy.ma
    complain(
        fmt::format("{} is a masked array, expected a plain one: its mask would be lost", name));
    return false;
  }
  if (is_negated(array)) {
    complain(fmt::format("{} has its lazy negation bit set, expected x.resolve_neg()", name));
    return false;
  }
  if (says_cuda(array)) {
    if (!stream_) {
      stream_ = 1;  // the default stream, in DLPack's numbering and in CUDA's
      waits_ = true;
    }
    try {
      is_one = try_import(export_to_stream(array, *stream_, kWritable), imported);
    } catch (const nb::python_error&) {  // reported below
    }
  } else {
    is_one = try_import(array, imported);
  }
  if (!is_one) {
    // Brings rarer kinds of arrays into a form that can be exported without a copy.
    nb::object other;
    if (requires_grad(array)) {
      other = array.attr("detach")();
    } else if (is_bfloat16_numpy(array)) {  // ml_dtypes: NumPy cannot export its dtype by name
      other = array.attr("view")("uint16");
      bfloat16 = true;
    } else if (nb::hasattr(array, "__array_interface__") && !nb::hasattr(array, "__dlpack__")) {
      other = nb::module_::import_("numpy").attr("asarray")(array);
    }
    is_one = other.is_valid() && try_import(other, imported);
  }
  if (!is_one) {
    nb::ndarray<nb::ro> readable;
    if (kWritable && try_import(array, readable)) {
      complain(fmt::format("{} is read-only, expected an array that can be written to", name));
    } else if (!nb::hasattr(array, "__dlpack__")) {
      complain(fmt::format(
          "{} is a {}, expected an array with __dlpack__ or __array_interface__ (NumPy, "
          "PyTorch, JAX, ...)",
          name, type_text(array)));
    } else {
      complain(fmt::format("{} (a {}) cannot be used without a copy: {}", name, type_text(array),
                           export_problem(array)));
    }
    return false;
  }
  const std::optional<Device> device = device_of(imported.device_type(), imported.device_id());
  if (!device) {
    complain(fmt::format("{} is on {}, expected the CPU or a CUDA device", name,
                         device_text(imported.device_type())));
    return false;
  }
  const std::optional<DType> dtype =
      bfloat16 ? std::optional(DType::bf16) : dtype_of(imported.dtype());
  if (!dtype) {
    complain(fmt::format("{} is {}, expected float32, float16 or bfloat16", name,
                         dtype_text(imported.dtype())));
    return false;
  }
  found.data = const_cast<void*>(static_cast<const void*>(imported.data()));
  found.dtype = *dtype;
  found.device = *device;
  found.axes = static_cast<int>(std::min<std::size_t>(imported.ndim(), Found::kMostAxes));
  for (std::size_t axis = 0; axis < static_cast<std::size_t>(found.axes); ++axis) {
    found.shape[axis] = static_cast<std::int64_t>(imported.shape(axis));
    found.stride[axis] = imported.stride(axis);
  }
  held.push_back(std::move(imported));
  return true;
}

template <typename Array>
TensorView Arrays::import(nb::handle array, const char* name, int axes, std::vector<Array>& held) {
  Found found;
  if (find_torch_tensor(array, found)) {
    tensors_.push_back(nb::borrow(array));
    if (found.device.kind == Device::Kind::cuda && !stream_)
      stream_ = current_torch_stream(found.device.index);
  } else if (!find(array, name, held, found)) {
    return {};
  }
  if (!device_) {
    device_ = found.device;
    first_ = name;
  }
  if (found.device != *device_) {
    complain(fmt::format("{} is on {}, expected {} like {}", name, name_of(found.device),
                         name_of(*device_), first_ != nullptr ? first_ : "the executor"));
    return {};
  }
  on_cuda_ = on_cuda_ || found.device.kind == Device::Kind::cuda;
  if (found.axes != axes) {
    const std::span<const std::int64_t> shape(found.shape.data(),
                                              static_cast<std::size_t>(found.axes));
    complain(fmt::format("{} is [{}], expected {}", name, fmt::join(shape, ", "),
                         axes == 1   ? "1 axis: [heads]"
                         : axes == 3 ? "3 axes: [batch, tokens, heads]"
                                     : "4 axes: [batch, tokens, heads, head_dim]"));
    return {};
  }
  TensorView view;
  view.data = found.data;
  view.dtype = found.dtype;
  view.device = found.device;
  view.rank = axes;
  for (std::size_t axis = 0; axis < static_cast<std::size_t>(axes); ++axis) {
    view.shape[axis] = found.shape[axis];
    view.stride[axis] = found.stride[axis];
  }
  if (view.elements() == 0) {  // without tokens; strides are arbitrary then
    std::int64_t step = 1;
    for (auto axis = static_cast<std::size_t>(axes); axis-- > 0;) {
      view.stride[axis] = step;
      step *= view.shape[axis];
    }
  }
  if (axes == 4 && view.stride[3] != 1 && view.shape[3] > 1) {
    complain(fmt::format("{} has stride {} on its last axis, expected 1: make head_dim contiguous",
                         name, view.stride[3]));
    return {};
  }
  return view;
}

ConstTensorView Arrays::input(nb::handle array, const char* name, int axes) {
  const TensorView view = import(array, name, axes, inputs_);
  seen_.push_back({view, name});
  return view;
}

TensorView Arrays::output(nb::handle array, const char* name, int axes) {
  const TensorView view = import(array, name, axes, outputs_);
  if (view.rank == 0) return view;
  for (std::size_t axis = 0; axis < static_cast<std::size_t>(axes); ++axis) {
    if (view.stride[axis] != 0 || view.shape[axis] <= 1 || view.elements() == 0) continue;
    complain(fmt::format(
        "{} has stride 0 on axis {}, expected an array whose elements are distinct", name, axis));
    return {};
  }
  for (const Seen& other : seen_) {
    if (!share_memory(view, other.view)) continue;
    complain(
        fmt::format("{} shares memory with {}, expected an array of its own", name, other.name));
    return {};
  }
  seen_.push_back({view, name});
  return view;
}

std::span<std::byte> Arrays::bytes(nb::handle array, const char* name, DType dtype,
                                   const Device& device) {
  const auto refuse = [&] {
    complain(fmt::format("{} is a {}, expected a contiguous {} array on {} that can be written to",
                         name, type_text(array), python_name_of(dtype), name_of(device)));
    return std::span<std::byte>();
  };
  if (Found tensor; find_torch_tensor(array, tensor)) {
    std::int64_t elements = 1;
    bool dense = true;
    for (auto axis = static_cast<std::size_t>(tensor.axes); axis-- > 0;) {
      dense = dense && (tensor.shape[axis] == 1 || tensor.stride[axis] == elements);
      elements *= tensor.shape[axis];
    }
    if (!(dense || elements == 0) || tensor.dtype != dtype || tensor.device != device)
      return refuse();
    tensors_.push_back(nb::borrow(array));
    return {static_cast<std::byte*>(tensor.data),
            static_cast<std::size_t>(elements) * size_of(dtype)};
  }
  nb::ndarray<nb::c_contig> found;
  const bool bfloat16 = is_bfloat16_numpy(array);
  const nb::object exported = bfloat16 ? array.attr("view")("uint16") : nb::borrow(array);
  if (!try_import(exported, found) ||
      (bfloat16 ? DType::bf16 : dtype_of(found.dtype())) != std::optional(dtype) ||
      device_of(found.device_type(), found.device_id()) != std::optional(device))
    return refuse();
  outputs_.emplace_back(found);
  return {static_cast<std::byte*>(found.data()), found.nbytes()};
}

namespace {

constexpr std::size_t kAlignment = 64;  // what JAX asks of memory that it takes over

nb::object numpy_empty(const nb::tuple& shape, nb::handle dtype) {
  return nb::module_::import_("numpy").attr("empty")(shape, dtype);
}

// Makes an array in a framework. A lack of memory may be reported only here: as MemoryError, or as
// PyTorch's error.
template <typename Make>
nb::object with_room(const Make& make) {
  try {
    return make();
  } catch (const OutOfMemory&) {
  } catch (const nb::python_error& error) {
    if (!error.matches(PyExc_MemoryError) && !error.matches(PyExc_RuntimeError)) throw;
  }
  drop_caches();
  return make();
}

nb::object own_memory(const ConstTensorView& shape_of, DType dtype, int axes) {
  std::vector<std::size_t> shape;
  std::size_t bytes = size_of(dtype);
  for (std::size_t axis = 0; axis < static_cast<std::size_t>(axes); ++axis) {
    shape.push_back(static_cast<std::size_t>(shape_of.shape[axis]));
    bytes *= shape.back();
  }
  bytes = (bytes + kAlignment) / kAlignment * kAlignment;
  admit(static_cast<std::int64_t>(bytes), "results");
  void* data = std::aligned_alloc(kAlignment, bytes);
  if (data == nullptr) throw out_of_memory(static_cast<std::int64_t>(bytes), "results", Device{});
  const nb::capsule owner(data, [](void* pointer) noexcept { std::free(pointer); });
  const auto floats = static_cast<std::uint8_t>(nb::dlpack::dtype_code::Float);
  const nb::dlpack::dtype type =
      dtype == DType::bf16
          ? kBfloat16
          : nb::dlpack::dtype{floats, static_cast<std::uint8_t>(8 * size_of(dtype)), 1};
  return nb::cast(
      nb::ndarray<nb::array_api>(data, shape.size(), shape.data(), owner, nullptr, type));
}

}  // namespace

Result::Result(nb::object given, nb::handle like, const ConstTensorView& shape_of, DType dtype,
               int axes, std::optional<std::uintptr_t> stream) {
  if (!given.is_none()) {
    writable_ = std::move(given);
    return;
  }
  nb::list extents;
  for (std::size_t axis = 0; axis < static_cast<std::size_t>(axes); ++axis) {
    extents.append(shape_of.shape[axis]);
  }
  const nb::tuple shape(extents);
  const bool same_dtype = shape_of.rank > 0 && shape_of.dtype == dtype;
  if (nb::hasattr(like, "new_empty")) {  // PyTorch is loaded, because `like` is its tensor
    std::optional<TorchStreamScope> scope;
    if (stream && shape_of.device.kind == Device::Kind::cuda)
      scope.emplace(shape_of.device.index, *stream);
    writable_ = with_room([&]() -> nb::object {
      if (same_dtype) return like.attr("new_empty")(shape);
      return like.attr("new_empty")(
          shape, nb::arg("dtype") = nb::module_::import_("torch").attr(python_name_of(dtype)));
    });
  } else if (shape_of.device.kind == Device::Kind::cuda) {
    throw ConfigError(fmt::format(
        "a {} on {} came in, and results on CUDA devices are made for PyTorch only: pass arrays "
        "for all of them (RingAttention.forward and backward take them)",
        type_text(like), name_of(shape_of.device)));
  } else if (nb::isinstance(like, nb::module_::import_("numpy").attr("ndarray"))) {
    const nb::object type =
        same_dtype ? nb::object(like.attr("dtype")) : nb::object(nb::str(python_name_of(dtype)));
    writable_ = with_room([&] { return numpy_empty(shape, type); });
  } else if (nb::hasattr(like, "__array_namespace__")) {
    writable_ = with_room([&] { return own_memory(shape_of, dtype, axes); });
    convert_ = like.attr("__array_namespace__")().attr("from_dlpack");
  } else {
    if (dtype == DType::bf16) {
      throw ConfigError("a " + type_text(like) +
                        " of bfloat16 came in, and NumPy has no such dtype: pass arrays for the "
                        "results");
    }
    writable_ = with_room([&] { return numpy_empty(shape, nb::str(python_name_of(dtype))); });
  }
}

nb::object Result::finish() const { return convert_.is_valid() ? convert_(writable_) : writable_; }

}  // namespace annulus::python
