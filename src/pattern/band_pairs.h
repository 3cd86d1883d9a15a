#pragma once

#include <cstdint>

#include "annulus/band.h"

namespace annulus {

// Number of (query, key) that a band in indices allows, with both sides 0..rows - 1.
[[nodiscard]] double band_pairs(const Band& band, std::int64_t rows);

}  // namespace annulus
