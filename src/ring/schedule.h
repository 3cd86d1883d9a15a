#pragma once

#include <cstdint>

#include "annulus/plan.h"
#include "annulus/ring_attention.h"

namespace annulus::ring {

// Resolves `automatic`: ring if gathered rows would exceed the communication limit; otherwise
// gather below options.min_tokens_for_ring tokens; otherwise the schedule with the smaller
// predicted time, and ring, which needs less memory, if they are equal. `row_bytes` are the bytes
// of one travelling row. The plan's own schedule does not matter; every rank's view gives the same
// answer.
[[nodiscard]] Schedule choose_schedule(const Plan& plan, const RingOptions& options,
                                       std::int64_t row_bytes);

}  // namespace annulus::ring
