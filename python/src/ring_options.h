#pragma once

#include <nanobind/nanobind.h>

#include <string>

#include "annulus/ring_attention.h"

namespace annulus::python {

namespace nb = nanobind;

// An executor's options from Python keyword arguments, according to the list of options
// (ring/option_list.h). TypeError for a pattern or placement of another type, for unknown keywords
// (except `also`) and for values of another type. ConfigError for unknown names of an enumeration.
[[nodiscard]] RingOptions options_from(nb::handle pattern, nb::handle placement,
                                       const nb::kwargs& given, const char* also = "");

// The list itself, for code that Python derives from it: a dict per option with 'name', 'default',
// 'annotation' (of its type), 'kind' ('flag', 'whole', 'number', 'number or none', 'name' or
// 'device'), 'names', 'shared' ('same', 'choice' or 'own', see ring::Shared) and 'help'.
[[nodiscard]] nb::list listed_options();

// `text`, a docstring that ends with its arguments, followed by the options that it does not
// mention.
[[nodiscard]] const char* doc_with_options(const std::string& text);

// "def name(self, pattern: Pattern, placement: Placement, *, batch: int = 1, ..., rest", for the
// stub. Never freed, as nanobind requires.
[[nodiscard]] const char* signature_with_options(const std::string& name, const std::string& rest);

}  // namespace annulus::python
