#pragma once

#include <cstdint>
#include <vector>

#include "annulus/band.h"
#include "annulus/plan.h"
#include "annulus/row_set.h"

namespace annulus {

// Number of (query, key) that a band allows, with a query of `queries` and a key of `keys`.
[[nodiscard]] double allowed_pairs(const Band& band, const RowSet& queries, const RowSet& keys);

// Allowed pairs (branch, head, query, key) whose side that does not travel is on this rank: all
// that it computes. Closed form.
[[nodiscard]] double shard_pairs(const Pattern& pattern, const Placement& queries,
                                 const Placement& keys, int rank, Travel travel);

// Of the plan's rank, by step 0..steps(). Walks the tiles.
[[nodiscard]] std::vector<double> pairs_by_step(const Plan& plan);

}  // namespace annulus
