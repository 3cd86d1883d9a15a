#pragma once

#include <cstdint>
#include <memory>

#include "annulus/plan.h"
#include "annulus/ring_attention.h"

namespace annulus::ring {

// Bytes that a row costs in a message, per head that travels: K and V, or Q, dO and statistics. In
// backward also what comes back: fp32 dK and dV, or fp32 dQ.
struct RowBytes {
  std::int64_t there = 0;
  std::int64_t back = 0;
};
[[nodiscard]] RowBytes row_bytes(const RingOptions& options, Travel travel, bool gradients);

// What moves in the passes of an executor, as one rank sees it.
struct Plans {
  std::unique_ptr<Plan> keys;
  std::unique_ptr<Plan> queries;  // backward with travelling queries, or reproducible
  Schedule schedule = Schedule::ring;
  Travel travel = Travel::keys;  // backward
};

// Every choice that the options leave open is made here, on all ranks alike: ring or gather, and
// which side travels in backward (fewer bytes).
[[nodiscard]] Plans make_plans(const RingOptions& options, int rank);

}  // namespace annulus::ring
