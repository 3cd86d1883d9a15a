#pragma once

#include <vector>

#include "annulus/pattern.h"
#include "annulus/placement.h"
#include "annulus/plan.h"

namespace annulus {

// Who needs which rows: the parcels of every owner, ordered by (owner, class, first row). Each row
// set lies in one range of its owner's placement, so it is a strided view of the owner's shard; row
// sets of a parcel ascend by first position.
[[nodiscard]] std::vector<Parcel> build_parcels(const Pattern& pattern, const Placement& placement,
                                                const std::vector<HeadClass>& classes,
                                                Travel travel);

}  // namespace annulus
