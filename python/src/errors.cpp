#include "errors.h"

#include <nanobind/nanobind.h>

#include <exception>
#include <iterator>
#include <string>

#include "annulus/error.h"
#include "bindings.h"

namespace annulus::python {
namespace {

// The module owns the classes. Errors are translated only while it lives.
struct Classes {
  PyObject* error = nullptr;
  PyObject* config = nullptr;
  PyObject* transport = nullptr;
  PyObject* device = nullptr;
  PyObject* memory = nullptr;
  PyObject* interrupted = nullptr;
};
Classes classes;

PyObject* make_class(nb::module_& module, const char* name, const char* doc, const nb::tuple& bases,
                     const nb::dict& members = nb::dict()) {
  const std::string full = std::string(nb::str(module.attr("__name__")).c_str()) + "." + name;
  nb::object type =
      nb::steal(PyErr_NewExceptionWithDoc(full.c_str(), doc, bases.ptr(), members.ptr()));
  if (!type.is_valid()) nb::raise_python_error();
  module.attr(name) = type;
  return type.ptr();
}

nb::object make_transport_error(const std::string& message, int rank) {
  nb::object error = nb::borrow(classes.transport)(python_text(message));
  error.attr("rank") = rank;
  return error;
}

void set_error(PyObject* type, const std::exception& error) {
  PyErr_SetObject(type, python_text(error.what()).ptr());
}

void translate(const std::exception_ptr& pointer, void*) {
  try {
    std::rethrow_exception(pointer);
  } catch (const PythonFailure& failure) {
    failure.raise();
  } catch (const TransportError& error) {
    const nb::object object = make_transport_error(error.what(), error.rank());
    PyErr_SetObject(classes.transport, object.ptr());
  } catch (const ConfigError& error) {
    set_error(classes.config, error);
  } catch (const OutOfMemory& error) {
    const nb::object object = nb::borrow(classes.memory)(python_text(error.what()));
    object.attr("asked_bytes") = error.shortage().asked;
    object.attr("needed_bytes") = error.shortage().needed;
    object.attr("free_bytes") = error.shortage().free;
    PyErr_SetObject(classes.memory, object.ptr());
  } catch (const DeviceError& error) {
    set_error(classes.device, error);
  } catch (const Interrupted& error) {
    set_error(classes.interrupted, error);
  } catch (const Error& error) {
    set_error(classes.error, error);
  }
}

std::string message_of(const std::string& where, const nb::python_error& error) {
  const nb::handle value = error.value();
  const std::string text = printed(value);
  // Annulus errors already say where and what.
  if (PyObject_IsInstance(value.ptr(), classes.error) == 1) return text;
  const std::string type = printed(error.type().attr("__name__"));
  return where + ": " + type + (text.empty() ? "" : ": " + text);
}

int rank_of(const nb::python_error& error) {
  const nb::object rank = nb::getattr(error.value(), "rank", nb::int_(-1));
  int number = -1;
  return nb::try_cast(rank, number) ? number : -1;
}

}  // namespace

nb::object python_text(const std::string& text) {
  nb::object object =
      nb::steal(PyUnicode_DecodeUTF8(text.data(), std::ssize(text), "backslashreplace"));
  if (!object.is_valid()) nb::raise_python_error();  // no memory
  return object;
}

std::string printed(nb::handle object) {
  const nb::object text = nb::steal(PyObject_Str(object.ptr()));
  const nb::object bytes =
      nb::steal(text.is_valid() ? PyUnicode_AsEncodedString(text.ptr(), "utf-8", "backslashreplace")
                                : nullptr);
  if (!bytes.is_valid()) {
    PyErr_Clear();
    return "(it cannot be printed)";
  }
  return {PyBytes_AS_STRING(bytes.ptr()), static_cast<std::size_t>(PyBytes_GET_SIZE(bytes.ptr()))};
}

bool can_hold_gil() noexcept {
  if (Py_IsInitialized()) return true;
    // While Python finalises, Py_IsInitialized() is false, but the thread that does it holds the
    // GIL and destroys objects. Other threads must not wait for the GIL then.
#if PY_VERSION_HEX >= 0x030D0000
  const PyThreadState* const holder = PyThreadState_GetUnchecked();
#else
  const PyThreadState* const holder = _PyThreadState_UncheckedGet();
#endif
  return holder != nullptr && holder == PyGILState_GetThisThreadState();
}

void release_anywhere(PyObject* object) noexcept {
  if (object == nullptr || !can_hold_gil()) return;
  const nb::gil_scoped_acquire gil;
  Py_DECREF(object);
}

PythonFailure::PythonFailure(const std::string& where, const nb::python_error& error)
    : TransportError(message_of(where, error), rank_of(error)),
      original_(error.value().inc_ref().ptr(), release_anywhere) {}

void PythonFailure::raise() const {
  PyObject* original = original_.get();
  const bool ours = PyObject_IsInstance(original, classes.error) == 1;
  if (ours || !PyErr_GivenExceptionMatches(original, PyExc_Exception)) {
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(original)), original);
    return;
  }
  const nb::object error = make_transport_error(what(), rank());
  PyException_SetCause(error.ptr(), Py_NewRef(original));
  PyErr_SetObject(classes.transport, error.ptr());
}

void bind_errors(nb::module_& module) {
  const auto builtin = [](PyObject* type) { return nb::borrow(type); };
  classes.error = make_class(module, "Error",
                             "Every error of annulus. Messages say where, what was found, what was "
                             "expected and what to do.",
                             nb::make_tuple(builtin(PyExc_Exception)));
  const nb::object base = nb::borrow(classes.error);
  classes.config = make_class(
      module, "ConfigError",
      "The caller is wrong: shapes, options, dtypes. Nothing has been changed; everything "
      "still works.",
      nb::make_tuple(base, builtin(PyExc_ValueError)));
  nb::dict members;
  members["rank"] = -1;
  classes.transport = make_class(
      module, "TransportError",
      "The ring is broken; build new transports. `rank` is the rank at fault as far as it is "
      "known, else -1.",
      nb::make_tuple(base, builtin(PyExc_ConnectionError)), members);
  classes.device =
      make_class(module, "DeviceError",
                 "The device cannot do it: out of memory, a missing instruction set, CUDA.",
                 nb::make_tuple(base, builtin(PyExc_RuntimeError)));
  nb::dict bytes;
  for (const char* name : {"asked_bytes", "needed_bytes", "free_bytes"}) bytes[name] = -1;
  classes.memory = make_class(
      module, "OutOfMemory",
      "Memory ran out, on this rank or another one of the ring, and what could be done about it "
      "has "
      "been done: see the option `recover`. Raised on every rank. The message says what would fit; "
      "`asked_bytes` could not be had, where `free_bytes` were free and `needed_bytes` were needed "
      "in "
      "all (-1: not known).",
      nb::make_tuple(nb::borrow(classes.device)), bytes);
  classes.interrupted = make_class(module, "Interrupted",
                                   ":meth:`RingAttention.interrupt` ended a pass on this rank.",
                                   nb::make_tuple(base));
  nb::register_exception_translator(translate);
}

}  // namespace annulus::python
