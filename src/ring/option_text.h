#pragma once

#include <string>
#include <vector>

#include "annulus/ring_attention.h"
#include "ring/agreement.h"

namespace annulus::ring {

// Of q.k: as given, or 1/sqrt(head_dim).
[[nodiscard]] double scale_of(const RingOptions& options);

// What the ranks must agree on before they can compute together, except what they choose for
// themselves.
[[nodiscard]] std::vector<Claim> claims_of(const RingOptions& options);

// Everything that makes two executors differ: equal keys mean equal executors.
[[nodiscard]] std::string options_key(const RingOptions& options);

}  // namespace annulus::ring
