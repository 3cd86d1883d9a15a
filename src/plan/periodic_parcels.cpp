#include "plan/periodic_parcels.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <utility>

namespace annulus {
namespace {

// Periods of the reduced sequence, besides the remainder: one at the start, the one that is
// repeated, and two before the end.
constexpr std::int64_t kPeriods = 4;
constexpr std::int64_t kRepeated = 1;

bool is_striped(const Placement& placement) {
  const int ranks = placement.ranks();
  for (int rank = 0; rank < ranks; ++rank) {
    const auto ranges = placement.ranges(rank);
    if (ranges.size() != 1 || ranges[0].first != rank || ranges[0].stride != ranks) return false;
  }
  return true;
}

// The number of positions after which pattern and stripes repeat; 0: more than `limit`.
std::int64_t period_of(const PlanOptions& options, std::int64_t limit) {
  std::int64_t period = options.queries.ranks();
  const std::int64_t tokens = options.queries.tokens();
  for (const Branch& branch : options.pattern.branches) {
    // A whole-sequence branch has one segment: only its selected rows have to repeat.
    const std::int64_t length =
        branch.segment_length < tokens ? branch.segment_length : branch.dilation;
    if (length > limit) return 0;
    const std::int64_t common = std::gcd(period, length);
    if (period / common > limit / length) return 0;
    period = period / common * length;
  }
  return period;
}

PlanOptions with_tokens(const PlanOptions& options, std::int64_t tokens) {
  PlanOptions shorter = options;
  shorter.queries = shorter.keys = Placement::striped(tokens, options.queries.ranks());
  // A branch must have one segment in both sequences, or several in both.
  for (Branch& branch : shorter.pattern.branches) {
    if (branch.segment_length >= options.queries.tokens()) branch.segment_length = kWholeSequence;
  }
  return shorter;
}

// Extends row sets to a sequence that is `times` periods longer. False if they do not repeat.
bool repeat(std::vector<RowSet>& rows, std::int64_t period, std::int64_t times) {
  const std::int64_t begin = kRepeated * period;
  const std::int64_t end = begin + period;
  std::vector<RowSet> longer;
  std::size_t i = 0;
  std::size_t copied_begin = 0;
  for (; i < rows.size() && rows[i].first < end; ++i) {
    if (rows[i].first < begin) copied_begin = i + 1;
    longer.push_back(rows[i]);
    if (rows[i].last() < end + period) continue;
    if (period % rows[i].stride != 0) return false;  // a row set that continues through all periods
    longer.back().count += times * (period / rows[i].stride);
  }
  const std::size_t copied_end = i;
  for (std::int64_t n = 1; n <= times; ++n) {
    for (std::size_t j = copied_begin; j < copied_end; ++j) {
      if (rows[j].last() >= end + period) continue;
      longer.push_back({rows[j].first + n * period, rows[j].count, rows[j].stride});
    }
  }
  for (; i < rows.size(); ++i) {
    longer.push_back({rows[i].first + times * period, rows[i].count, rows[i].stride});
  }
  rows = std::move(longer);
  return true;
}

bool same_set(const RankSetList& a, int i, const RankSetList& b, int j) {
  return std::equal(a.words(i), a.words(i) + a.words_per_set(), b.words(j));
}

std::int64_t count_rows(const std::vector<RowSet>& rows) {
  std::int64_t count = 0;
  for (const RowSet& r : rows) count += r.count;
  return count;
}

// Whether the plan of the sequence that is one period longer equals the extended plan, row set by
// row set.
bool parcels_repeat(const BuiltParcels& one, const BuiltParcels& longer, std::int64_t period) {
  if (one.parcels.size() != longer.parcels.size() || one.parcel_count != longer.parcel_count) {
    return false;
  }
  for (std::size_t i = 0; i < one.parcels.size(); ++i) {
    const Parcel& a = one.parcels[i];
    const Parcel& b = longer.parcels[i];
    if (a.owner != b.owner || a.head_class != b.head_class ||
        !same_set(one.sets, a.rank_set, longer.sets, b.rank_set)) {
      return false;
    }
    std::vector<RowSet> rows = a.rows;
    if (!repeat(rows, period, 1) || rows != b.rows) return false;
  }
  return true;
}

// Adds to each flow `times` times its growth per period. False if the flows are not the same.
bool extend_flows(BuiltParcels& one, const BuiltParcels& longer, std::int64_t times) {
  if (one.flows.size() != longer.flows.size()) return false;
  std::size_t begin = 0;
  for (std::size_t i = 0; i < one.flows.size(); ++i) {
    Flow& flow = one.flows[i];
    while (begin < longer.flows.size() && longer.flows[begin].owner < flow.owner) ++begin;
    std::size_t j = begin;  // an owner has few
    while (j < longer.flows.size() && longer.flows[j].owner == flow.owner &&
           !same_set(one.sets, flow.rank_set, longer.sets, longer.flows[j].rank_set)) {
      ++j;
    }
    if (j == longer.flows.size() || longer.flows[j].owner != flow.owner) return false;
    flow.unit_rows += times * (longer.flows[j].unit_rows - flow.unit_rows);
  }
  return true;
}

}  // namespace

std::optional<BuiltParcels> build_periodic_parcels(const PlanOptions& options,
                                                   const std::vector<HeadClass>& classes,
                                                   int rank) {
  if (!options.queries.same_as(options.keys) || options.queries.ranks() < 2 ||
      !options.pattern.documents.empty()) {
    return std::nullopt;
  }
  const std::int64_t tokens = options.queries.tokens();
  const std::int64_t period = period_of(options, tokens / (2 * kPeriods));
  if (period == 0 || !is_striped(options.queries)) return std::nullopt;
  const std::int64_t reduced = kPeriods * period + tokens % period;
  const std::int64_t times = (tokens - reduced) / period;

  BuiltParcels built = build_parcels_directly(with_tokens(options, reduced), classes, rank);
  const BuiltParcels longer =
      build_parcels_directly(with_tokens(options, reduced + period), classes, rank);
  if (!parcels_repeat(built, longer, period) || !extend_flows(built, longer, times)) {
    return std::nullopt;
  }
  for (Parcel& parcel : built.parcels) {
    if (!repeat(parcel.rows, period, times)) return std::nullopt;
    parcel.row_count = count_rows(parcel.rows);
  }
  return built;
}

}  // namespace annulus
