#pragma once

#include "annulus/band.h"

namespace annulus {

// Number of (query, key) that a band in indices allows, with all queries and keys of two stretches.
// A stretch whose last row is before its first one is empty.
[[nodiscard]] double band_pairs(const Band& band, const Stretch& queries, const Stretch& keys);

}  // namespace annulus
