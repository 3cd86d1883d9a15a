#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <string>

#include "annulus/error.h"

namespace annulus::python {

namespace nb = nanobind;

// Carries a Python exception through the library, which knows TransportErrors only. Back in Python,
// the original is raised if it was an Annulus error or not an Exception (KeyboardInterrupt);
// otherwise a TransportError whose __cause__ is the original.
class PythonFailure : public TransportError {
 public:
  // `where` begins the message. Needs the GIL.
  PythonFailure(const std::string& where, const nb::python_error& error);
  // Sets Python's error indicator. Needs the GIL.
  void raise() const;

 private:
  std::shared_ptr<PyObject> original_;
};

// Conversion of texts between C++ and Python. Not all C++ texts are UTF-8 (a file name, or a
// message cut off inside a character), and not all Python texts can be encoded (a name that Python
// could not decode). What cannot be converted is escaped, because reporting an error must not raise
// another one.
[[nodiscard]] nb::object python_text(const std::string& text);
// str(object), or a placeholder if that raises. Needs the GIL.
[[nodiscard]] std::string printed(nb::handle object);

// Whether this thread can hold the GIL: it cannot once Python ends, except the thread that
// finalises it.
[[nodiscard]] bool can_hold_gil() noexcept;

// Drops a reference, from any thread. Does nothing if the thread cannot hold the GIL.
void release_anywhere(PyObject* object) noexcept;

}  // namespace annulus::python
