#pragma once

#include <nanobind/nanobind.h>

#include <string>

#include "annulus/ring_attention.h"

namespace annulus::python {

namespace nb = nanobind;

// An executor's options from Python's keyword arguments, by the one list of options
// (ring/option_list.h). TypeError for a pattern or placement that is none, a keyword that is none
// of them (nor `also`) and for values of another type; ConfigError for names that an enumeration
// does not have.
[[nodiscard]] RingOptions options_from(nb::handle pattern, nb::handle placement,
                                       const nb::kwargs& given, const char* also = "");

// The list itself, for what is made of it in Python: a dict per option with its 'name', 'default',
// 'annotation' (of its type), 'kind' ('flag', 'whole', 'number', 'number or none', 'name' or
// 'device'), 'names', 'shared' ('same', 'choice' or 'own', see ring::Shared) and 'help'.
[[nodiscard]] nb::list listed_options();

// `text`, a docstring that ends with its arguments, and those options that it leaves out.
[[nodiscard]] const char* doc_with_options(const std::string& text);

// "def name(self, pattern: Pattern, placement: Placement, *, batch: int = 1, ..., rest", for the
// stub; lives for ever, as nanobind needs it to.
[[nodiscard]] const char* signature_with_options(const std::string& name, const std::string& rest);

}  // namespace annulus::python
