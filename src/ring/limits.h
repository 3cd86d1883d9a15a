#pragma once

#include <cstdint>

#include "annulus/in_process.h"
#include "annulus/ring_attention.h"

namespace annulus::ring {

// The tensors that will be allocated after the limits are chosen and must fit beside the executor's
// memory.
enum class Missing : std::uint8_t {
  all_tensors,  // the tool: inputs and results of all passes
  results,  // a caller that has the inputs (its arrays are used in place or copied): results of one
            // pass
};

// Limits per rank for an in-process ring whose ranks share `available_bytes` equally: a fifth is
// for messages, the rest for tensors, fp32 accumulators of 16-bit tensors, and the branch rows that
// detached mixing keeps.
[[nodiscard]] Limits limits_for_memory(const RingOptions& options, std::int64_t available_bytes,
                                       Missing missing);

// Ranks of one process share the cores, so a rank may wait while all others compute. The deadline
// only detects hangs: it allows for a machine of 1 GFLOP/s.
[[nodiscard]] InProcessOptions patient_ring(const RingOptions& options);

}  // namespace annulus::ring
