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
// `needed_by` includes the owner. `begin` and `end` are where the reason for the demand starts and
// stops (a segment, a limit of the band), not where its rows do: demands of different strides then
// have common boundaries and are not chopped up at their ends.
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

  // True when `next` simply goes on where this one ends; it is then part of this one.
  bool extend(const Demand& next) {
    if (next.range != range || next.needed_by != needed_by || next.begin != end ||
        next.stride != stride || (next.first - first) % stride != 0) {
      return false;
    }
    end = next.end;
    return true;
  }
};

// What one (branch, offset) demands of every owner, ordered by (owner, range, begin).
struct SelectionDemands {
  std::vector<Demand> demands;
  std::vector<std::size_t> owner_begin;  // ranks + 1

  [[nodiscard]] std::span<const Demand> of(int owner) const {
    const auto i = static_cast<std::size_t>(owner);
    return std::span(demands).subspan(owner_begin[i], owner_begin[i + 1] - owner_begin[i]);
  }
};

// What one (branch, offset) demands in batch entries with these documents (none: all tokens are
// one). The placement of the side that travels says who owns a row,
// that of the other side who needs it.
[[nodiscard]] SelectionDemands collect_demands(const PlanOptions& options,
                                               std::span<const Document> documents,
                                               const Branch& branch, std::int64_t offset,
                                               RankSets& sets);

}  // namespace annulus
