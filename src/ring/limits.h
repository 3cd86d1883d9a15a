#pragma once

#include <cstdint>

#include "annulus/in_process.h"
#include "annulus/ring_attention.h"

namespace annulus::ring {

// What is not there yet when the limits are chosen, and has to fit beside the executor's own
// memory.
enum class Missing : std::uint8_t {
  all_tensors,  // the tool: inputs and results of all passes
  results,      // a caller with arrays of its own, which are views or copied: results of one pass
};

// Limits per rank for an in-process ring of which every rank gets its share of `available_bytes`: a
// fifth for messages; the rest for tensors, their fp32 accumulators where the dtype is narrower,
// and the rows of branches that detached mixing keeps.
[[nodiscard]] Limits limits_for_memory(const RingOptions& options, std::int64_t available_bytes,
                                       Missing missing);

// Ranks of one process share the cores, so one may wait for as long as all others compute. A
// deadline is there to find hangs: this allows for a machine of 1 GFLOP/s.
[[nodiscard]] InProcessOptions patient_ring(const RingOptions& options);

}  // namespace annulus::ring
