#pragma once

#include <cstdint>

#include "annulus/plan.h"
#include "annulus/ring_attention.h"

namespace annulus::ring {

// What `automatic` means: gather below options.min_tokens_for_ring; ring where gathering would
// exceed the communication limit; else the smaller predicted time, and ring, which needs less
// memory, when they are equal. `row_bytes` is what one travelling row costs.
// The plan's own schedule does not matter; every rank's view gives the same answer.
[[nodiscard]] Schedule choose_schedule(const Plan& plan, const RingOptions& options,
                                       std::int64_t row_bytes);

// Predicted seconds of one forward under a schedule, on the slowest rank: compute spread evenly
// over the steps, each step hiding the transfer of the next one.
[[nodiscard]] double predicted_seconds(const Plan& plan, Schedule schedule, std::int64_t row_bytes,
                                       int head_dim, std::int64_t batch, const Rates& rates);

}  // namespace annulus::ring
