#pragma once

#include <cstdint>

#include "annulus/ring_attention.h"
#include "kernels/backend.h"

namespace annulus::ring {

// ConfigError for values that are invalid for every ring.
void check_values(const RingOptions& options);

// The backend's input for a rank with this many tokens. ConfigError if the backend does not support
// it. Keeps a pointer to the options' pattern.
[[nodiscard]] Computation computation_of(const RingOptions& options, const Backend& backend,
                                         std::int64_t query_tokens, std::int64_t key_tokens);

}  // namespace annulus::ring
