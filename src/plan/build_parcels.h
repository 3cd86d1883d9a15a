#pragma once

#include <cstdint>
#include <vector>

#include "annulus/plan.h"
#include "plan/rank_sets.h"
#include "plan/traffic.h"

namespace annulus {

inline constexpr int kEveryRank = -1;

struct BuiltParcels {
  // Those that `rank` owns or needs, ordered by (owner, class, first row): the order in which every
  // rank counts them. Each row set lies in one range of its owner, so it is a strided view of the
  // owner's shard; row sets of a parcel ascend by first position.
  std::vector<Parcel> parcels;
  // Of all ranks: what Traffic is made of.
  RankSetList sets;
  std::vector<Flow> flows;
  std::int64_t parcel_count = 0;
};

// Walks the parcels of every owner, one owner at a time, and keeps rows for one rank (or
// kEveryRank), counts for all.
[[nodiscard]] BuiltParcels build_parcels(const PlanOptions& options,
                                         const std::vector<HeadClass>& classes, int rank);

// The same without looking for periods in long sequences: what build_parcels is held against.
[[nodiscard]] BuiltParcels build_parcels_directly(const PlanOptions& options,
                                                  const std::vector<HeadClass>& classes, int rank);

}  // namespace annulus
