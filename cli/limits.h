#pragma once

#include <string>

#include "cli/options.h"

namespace annulus::cli {

// Limits, and where they come from. Throws ConfigError if q, k and v of a rank exceed them, before
// anything is planned or allocated, and in arithmetic that cannot overflow.
struct ChosenLimits {
  Limits limits;
  std::string origin;  // "derived from 21.4 GiB of available memory", "as given"
};
[[nodiscard]] ChosenLimits choose_limits(const ProblemFlags& flags, const Shape& shape, DType dtype,
                                         bool backward);

}  // namespace annulus::cli
