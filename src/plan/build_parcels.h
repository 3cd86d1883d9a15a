#pragma once

#include <cstdint>
#include <vector>

#include "annulus/plan.h"
#include "plan/rank_sets.h"
#include "plan/traffic.h"

namespace annulus {

inline constexpr int kEveryRank = -1;

struct BuiltParcels {
  // The parcels that `rank` owns or needs, ordered by (owner, class, first row), which is the order
  // on every rank. Each row set lies in one range of its owner, so it is a strided view of the
  // owner's shard. Row sets of a parcel ascend by first position.
  std::vector<Parcel> parcels;
  // Of all ranks; the input of Traffic.
  RankSetList sets;
  std::vector<Flow> flows;
  std::int64_t parcel_count = 0;
};

// Builds the parcels of every owner, one owner at a time. Keeps the rows for one rank (or
// kEveryRank), and counts for all.
[[nodiscard]] BuiltParcels build_parcels(const PlanOptions& options,
                                         const std::vector<HeadClass>& classes, int rank);

// The same without the shortcut for periodic sequences. Tests compare build_parcels with it.
[[nodiscard]] BuiltParcels build_parcels_directly(const PlanOptions& options,
                                                  const std::vector<HeadClass>& classes, int rank);

}  // namespace annulus
