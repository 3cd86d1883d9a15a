#pragma once

#include <cstdint>

#include "annulus/ring_attention.h"
#include "kernels/backend.h"

namespace annulus::ring {

// ConfigError for values that are wrong whatever the ring.
void check_values(const RingOptions& options);

// What a backend is asked to compute for a rank of that many tokens; ConfigError if it cannot.
// Refers to the options' pattern.
[[nodiscard]] Computation computation_of(const RingOptions& options, const Backend& backend,
                                         std::int64_t query_tokens, std::int64_t key_tokens);

}  // namespace annulus::ring
