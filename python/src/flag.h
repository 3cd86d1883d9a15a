#pragma once

#include <nanobind/nanobind.h>

#include <string_view>

namespace annulus::python {

// A bool of Python or NumPy. nanobind's bool accepts Python's only.
struct Flag {
  bool value = false;
  operator bool() const { return value; }  // NOLINT(google-explicit-constructor): it is one
};

}  // namespace annulus::python

template <>
struct nanobind::detail::type_caster<annulus::python::Flag> {
  NB_TYPE_CASTER(annulus::python::Flag, const_name("bool"))

  bool from_python(handle source, std::uint32_t /*flags*/, cleanup_list* /*list*/) noexcept {
    // Its name is numpy.bool from version 2 on.
    const std::string_view type = Py_TYPE(source.ptr())->tp_name;
    if (!PyBool_Check(source.ptr()) && type != "numpy.bool" && type != "numpy.bool_") return false;
    const int truth = PyObject_IsTrue(source.ptr());
    if (truth < 0) PyErr_Clear();
    value.value = truth == 1;
    return truth >= 0;
  }

  static handle from_cpp(annulus::python::Flag flag, rv_policy /*policy*/,
                         cleanup_list* /*list*/) noexcept {
    return handle(flag.value ? Py_True : Py_False).inc_ref();
  }
};
