#pragma once

#include <cstdint>
#include <vector>

#include "annulus/band.h"
#include "annulus/plan.h"
#include "annulus/row_set.h"

namespace annulus {

// Number of pairs (query, key) of `queries` x `keys` that a band allows.
[[nodiscard]] double allowed_pairs(const Band& band, const RowSet& queries, const RowSet& keys);

// Allowed pairs (branch, head, query, key) whose staying row is on this rank: all pairs that it
// computes. Closed form.
[[nodiscard]] double shard_pairs(const Pattern& pattern, const Placement& queries,
                                 const Placement& keys, int rank, Travel travel);

// Pairs that the plan's rank computes in each step 0..steps(). Walks the tiles.
[[nodiscard]] std::vector<double> pairs_by_step(const Plan& plan);

}  // namespace annulus
