#pragma once

#include <vector>

#include "annulus/plan.h"

namespace annulus {

// Who needs which rows: the parcels of every owner, ordered by (owner, class, first row). The
// placement of the side that travels says who owns a row, that of the other side who needs it. Each
// row set lies in one range of its owner, so it is a strided view of the owner's shard; row sets of
// a parcel ascend by first position.
[[nodiscard]] std::vector<Parcel> build_parcels(const PlanOptions& options,
                                                const std::vector<HeadClass>& classes);

}  // namespace annulus
