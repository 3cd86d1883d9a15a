#pragma once

#include <nanobind/nanobind.h>

#include <string>

#include "annulus/ring_attention.h"

namespace annulus::python {

namespace nb = nanobind;

// An executor's options from Python's keyword arguments, by the one list of options
// (ring/option_list.h). TypeError for a keyword that is none of them (nor `also`) and for values of
// another type; ConfigError for names that an enumeration does not have.
[[nodiscard]] RingOptions options_from(const Pattern& pattern, const Placement& placement,
                                       const nb::kwargs& given, const char* also = "");

// "def name(self, pattern: Pattern, placement: Placement, *, batch: int = 1, ..., rest", for the
// stub; lives for ever, as nanobind needs it to.
[[nodiscard]] const char* signature_with_options(const std::string& name, const std::string& rest);

}  // namespace annulus::python
