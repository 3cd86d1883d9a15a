#pragma once

#include <vector>

#include "annulus/plan.h"
#include "plan/traffic.h"

namespace annulus {

inline constexpr int kEveryRank = -1;

struct BuiltParcels {
  // Those that `rank` owns or needs, ordered by (owner, class, first row): the order in which every
  // rank counts them. Each row set lies in one range of its owner, so it is a strided view of the
  // owner's shard; row sets of a parcel ascend by first position.
  std::vector<Parcel> parcels;
  Traffic traffic;  // of all ranks
};

// Walks the parcels of every owner, one owner at a time, and keeps rows for one rank (or
// kEveryRank), counts for all.
[[nodiscard]] BuiltParcels build_parcels(const PlanOptions& options,
                                         const std::vector<HeadClass>& classes, int rank);

}  // namespace annulus
