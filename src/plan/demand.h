#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "annulus/plan.h"
#include "annulus/row_set.h"
#include "pattern/division.h"
#include "plan/rank_sets.h"

namespace annulus {

// Rows of one range of the owner, in indices into that range: first, first + stride, ... < end.
// `needed_by` includes the owner. `begin` and `end` are the limits of what causes the demand (a
// segment, a limit of the band), not of its rows. Demands with different strides then have common
// boundaries, so uniting them makes fewer row sets.
struct Demand {
  int range = 0;
  int needed_by = 0;
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t first = 0;
  std::int64_t stride = 1;

  [[nodiscard]] RowSet rows_in(std::int64_t from, std::int64_t to) const {
    const std::int64_t start = first < from ? from + positive_mod(first - from, stride) : first;
    return {start, start < to ? (to - start - 1) / stride + 1 : 0, stride};
  }

  // If `next` continues this demand, appends it and returns true.
  bool extend(const Demand& next) {
    if (next.range != range || next.needed_by != needed_by || next.begin != end ||
        next.stride != stride || (next.first - first) % stride != 0) {
      return false;
    }
    end = next.end;
    return true;
  }
};

// The demands of one (branch, offset), ordered by (owner, range, begin).
struct SelectionDemands {
  std::vector<Demand> demands;
  std::vector<std::size_t> owner_begin;  // ranks + 1

  [[nodiscard]] std::span<const Demand> of(int owner) const {
    const auto i = static_cast<std::size_t>(owner);
    return std::span(demands).subspan(owner_begin[i], owner_begin[i + 1] - owner_begin[i]);
  }
};

// Collects the demands of one (branch, offset) in batch entries with these documents (none: all
// tokens are one document). The placement of the travelling side determines the owner of a row, and
// that of the staying side which ranks need it.
[[nodiscard]] SelectionDemands collect_demands(const PlanOptions& options,
                                               std::span<const Document> documents,
                                               const Branch& branch, std::int64_t offset,
                                               RankSets& sets);

}  // namespace annulus
