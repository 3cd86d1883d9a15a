#pragma once

#include <optional>
#include <vector>

#include "annulus/plan.h"
#include "plan/build_parcels.h"

namespace annulus {

// With striped shards, the plan is periodic, except near the ends of the sequence: its period is
// the least common multiple of the lengths of stripes and segments. A sequence of many periods is
// planned as one of a few periods, whose middle period is repeated. Returns nullopt for other
// placements, too few periods, and row sets that do not repeat (this is checked, not assumed).
[[nodiscard]] std::optional<BuiltParcels> build_periodic_parcels(
    const PlanOptions& options, const std::vector<HeadClass>& classes, int rank);

}  // namespace annulus
