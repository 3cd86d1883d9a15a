#pragma once

#include <optional>
#include <vector>

#include "annulus/plan.h"
#include "plan/build_parcels.h"

namespace annulus {

// Striped shards and segments repeat: after the least common multiple of their lengths everything
// is as before, except near the ends of the sequence. So a sequence of many periods is planned as
// one of a few, and the middle period is repeated. Nothing where that is not possible: other
// placements, too few periods, or row sets that do not repeat (they are checked, not assumed).
[[nodiscard]] std::optional<BuiltParcels> build_periodic_parcels(
    const PlanOptions& options, const std::vector<HeadClass>& classes, int rank);

}  // namespace annulus
