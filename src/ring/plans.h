#pragma once

#include <cstdint>
#include <memory>

#include "annulus/plan.h"
#include "annulus/ring_attention.h"

namespace annulus::ring {

// Bytes of a row in messages, per travelling head. `there`: K and V, or Q, dO and statistics.
// `back`, in backward: fp32 dK and dV, or fp32 dQ.
struct RowBytes {
  std::int64_t there = 0;
  std::int64_t back = 0;
};
[[nodiscard]] RowBytes row_bytes(const RingOptions& options, Travel travel, bool gradients);

// The plans of an executor's passes, in the view of one rank.
struct Plans {
  std::unique_ptr<Plan> keys;
  std::unique_ptr<Plan> queries;  // backward with travelling queries, or reproducible
  Schedule schedule = Schedule::ring;
  Travel travel = Travel::keys;  // backward
};

// Makes all choices that the options leave open, and the same ones on all ranks: ring or gather,
// and which side travels in backward (the one with fewer bytes).
[[nodiscard]] Plans make_plans(const RingOptions& options, int rank);

}  // namespace annulus::ring
