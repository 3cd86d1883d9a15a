#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <string>

#include "annulus/error.h"

namespace annulus::python {

namespace nb = nanobind;

// A Python exception on its way through the library, which knows TransportErrors only. Back in
// Python it is the original again if that was one of ours or no Exception (KeyboardInterrupt),
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

// Texts between C++ and Python. Not all of ours are UTF-8 (a file's name, or a message cut off
// inside a character), and not all of Python's can become it (a name that it could not decode):
// what cannot be said otherwise is escaped, because an error must not end in another one about its
// words.
[[nodiscard]] nb::object python_text(const std::string& text);
// str(object), or a word about it where that raises. Needs the GIL.
[[nodiscard]] std::string printed(nb::handle object);

// Drops a reference on a thread that may not hold the GIL, and when Python may be gone.
void release_anywhere(PyObject* object) noexcept;

}  // namespace annulus::python
