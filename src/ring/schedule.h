#pragma once

#include <cstdint>

#include "annulus/plan.h"
#include "annulus/ring_attention.h"

namespace annulus::ring {

// What `automatic` means: ring where gathering would exceed the communication limit; gather below
// options.min_tokens_for_ring; else the smaller predicted time, and ring, which needs less memory,
// when they are equal. `row_bytes` is what one travelling row costs.
// The plan's own schedule does not matter; every rank's view gives the same answer.
[[nodiscard]] Schedule choose_schedule(const Plan& plan, const RingOptions& options,
                                       std::int64_t row_bytes);

}  // namespace annulus::ring
