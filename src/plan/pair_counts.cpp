#include "plan/pair_counts.h"

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <map>
#include <numeric>
#include <utility>

#include "pattern/band_pairs.h"
#include "pattern/entry_groups.h"
#include "pattern/segments.h"
#include "plan/selected_rows.h"

namespace annulus {
namespace {

// Sum over i in [0, n) of floor((a * i + b) / m), for non-negative arguments: Euclid's algorithm on
// the lattice points below a line.
double floor_sum(std::int64_t n, std::int64_t m, std::int64_t a, std::int64_t b) {
  double sum = 0.0;
  while (n > 0) {
    const auto count = static_cast<double>(n);
    const std::int64_t slope = a / m;  // integer parts of slope and start
    const std::int64_t start = b / m;
    sum += count * (count - 1.0) / 2.0 * static_cast<double>(slope);
    sum += count * static_cast<double>(start);
    a %= m;
    b %= m;
    const std::int64_t top = a * n + b;
    if (top < m) break;
    n = top / m;
    b = top % m;
    std::swap(a, m);
  }
  return sum;
}

// Sum of clamp(j + shift, 0, most) over the evenly spaced j of `rows`.
double clamped_sum(const RowSet& rows, std::int64_t shift, std::int64_t most) {
  if (shift == Band::kUnlimited) return static_cast<double>(rows.count) * static_cast<double>(most);
  if (shift == -Band::kUnlimited) return 0.0;
  const RowSet above = clip(rows, most - shift, Band::kUnlimited);
  const RowSet within = clip(rows, 1 - shift, most - shift);
  const double ends =
      within.count > 0 ? static_cast<double>(within.first + within.last() + 2 * shift) : 0.0;
  return static_cast<double>(within.count) * ends / 2.0 +
         static_cast<double>(above.count) * static_cast<double>(most);
}

// Counts the pairs of one query head whose staying row is in a range. `selected` are the selected
// rows of the staying side, `other` those of the travelling side.
class RangePairs {
 public:
  RangePairs(const RowSet& range, const SelectedRows& selected, const SelectedRows& other,
             const Band& band)
      : range_(range),
        crossing_(range, selected),
        selected_(selected),
        other_(other),
        band_(band.divided_by(selected.dilation)) {}

  [[nodiscard]] double count() const {
    const auto [whole_begin, whole_end] = crossing_.whole_segments();
    const Segments& segments = *selected_.segments;
    const std::int64_t end = crossing_.end_segment();
    // Strided ranges meet every segment. Segments repeat after `period` segments, except at the
    // ends of the range and of the document, so one period is counted and multiplied.
    const std::int64_t period = range_.stride / std::gcd(range_.stride, segments.length());
    double pairs = 0.0;
    for (std::int64_t s = crossing_.first_segment(); s < end; ++s) {
      if (s >= whole_begin && s < whole_end) {
        const std::int64_t stop = segments.alike_until(s, whole_end);
        pairs += static_cast<double>(stop - s) * in_whole_segment(s);
        s = stop - 1;
        continue;
      }
      const std::int64_t times = (segments.alike_until(s, end - 1) - s) / period;
      if (range_.stride > 1 && s > crossing_.first_segment() && times > 1) {
        double once = 0.0;
        for (std::int64_t i = s; i < s + period; ++i) once += in_segment(i);
        pairs += once * static_cast<double>(times);
        s += times * period - 1;
        continue;
      }
      pairs += in_segment(s);
    }
    return pairs;
  }

 private:
  [[nodiscard]] bool holds_queries() const { return selected_.side == Side::queries; }

  // Pairs in a segment that lies entirely in the range.
  [[nodiscard]] double in_whole_segment(std::int64_t s) const {
    return holds_queries() ? band_pairs(band_, selected_.indices(s), other_.indices(s))
                           : band_pairs(band_, other_.indices(s), selected_.indices(s));
  }

  [[nodiscard]] double in_segment(std::int64_t s) const {
    const RowSet rows = crossing_.in_segment(s).elements;
    const Stretch others = other_.indices(s);
    if (rows.count == 0 || others.last < others.first) return 0.0;
    // In indices of selected rows within a segment, the range's rows are a progression, too.
    const std::int64_t start = selected_.part(s).origin + selected_.offset;
    const RowSet own{(range_[rows.first] - start) / selected_.dilation, rows.count,
                     rows.count > 1 ? (range_[rows.last()] - range_[rows.first]) /
                                          (rows.count - 1) / selected_.dilation
                                    : 1};
    // A query i sees keys [i + least, i + most], a key i is seen by queries [i - most, i - least].
    const std::int64_t first = holds_queries() ? band_.least : -band_.most;
    const std::int64_t last = holds_queries() ? band_.most : -band_.least;
    const std::int64_t all = others.last - others.first + 1;
    const auto up_to = [&](std::int64_t difference) {  // pairs with other - own < difference
      const bool limited = std::abs(difference) < Band::kUnlimited;
      return clamped_sum(own, limited ? difference - others.first : difference, all);
    };
    return up_to(last == Band::kUnlimited ? last : last + 1) - up_to(first);
  }

  RowSet range_;
  Crossing crossing_;
  SelectedRows selected_;
  SelectedRows other_;
  Band band_;
};

// Number of pairs with key <= query.
double causal_pairs(const RowSet& queries, const RowSet& keys) {
  if (queries.count == 0 || keys.count == 0 || keys.first > queries.last()) return 0.0;
  const auto all_keys = static_cast<double>(keys.count);
  // Queries at or after the last key see all keys, those before the first none.
  const RowSet above = clip(queries, keys.last(), queries.last() + 1);
  const RowSet within = clip(queries, keys.first, keys.last());
  return static_cast<double>(above.count) * all_keys + static_cast<double>(within.count) +
         floor_sum(within.count, keys.stride, queries.stride, within.first - keys.first);
}

}  // namespace

double allowed_pairs(const Band& band, const RowSet& queries, const RowSet& keys) {
  if (band.empty()) return 0.0;
  // Pairs with key - query <= difference.
  const auto up_to = [&](std::int64_t difference) {
    return causal_pairs({queries.first + difference, queries.count, queries.stride}, keys);
  };
  const double below = band.most == Band::kUnlimited
                           ? static_cast<double>(queries.count) * static_cast<double>(keys.count)
                           : up_to(band.most);
  return band.least == -Band::kUnlimited ? below : below - up_to(band.least - 1);
}

double shard_pairs(const Pattern& pattern, const Placement& queries, const Placement& keys,
                   int rank, Travel travel) {
  const Placement& staying = travel == Travel::keys ? queries : keys;
  const Side staying_side = travel == Travel::keys ? Side::queries : Side::keys;
  const Side travelling_side = travel == Travel::keys ? Side::keys : Side::queries;
  double pairs = 0.0;
  const std::vector<EntryGroup> groups = entry_groups(pattern);
  for (const Branch& branch : pattern.branches) {
    std::map<std::int64_t, int> heads_of;  // by offset
    for (const std::int64_t offset : branch.offset) {
      if (offset >= 0) ++heads_of[offset];
    }
    for (const EntryGroup& group : groups) {
      const Segments segments(group.documents, branch, queries.tokens(), keys.tokens());
      for (const auto& [offset, heads] : heads_of) {
        const SelectedRows selected(segments, staying_side, branch.dilation, offset);
        const SelectedRows other(segments, travelling_side, branch.dilation, offset);
        double per_head = 0.0;
        for (const RowSet& range : staying.ranges(rank)) {
          if (range.count == 0) continue;
          per_head += RangePairs(range, selected, other, pattern.band()).count();
        }
        pairs += per_head * heads * static_cast<double>(group.entries.times());
      }
    }
  }
  return pairs;
}

std::vector<double> pairs_by_step(const Plan& plan) {
  std::vector<double> pairs(static_cast<std::size_t>(plan.steps()) + 1, 0.0);
  const bool keys_travel = plan.options().travel == Travel::keys;
  for (const TileGroup& group : plan.tile_groups(0, plan.steps())) {
    const HeadClass& head_class = plan.classes()[static_cast<std::size_t>(group.head_class)];
    const Selection& selection = head_class.selections[static_cast<std::size_t>(group.selection)];
    const double members = static_cast<double>(selection.members.size()) *
                           static_cast<double>(head_class.entries.times());
    for (const PlacedRows& travelling : keys_travel ? group.keys : group.queries) {
      double sum = 0.0;
      for (const PlacedRows& staying : keys_travel ? group.queries : group.keys) {
        sum += keys_travel ? allowed_pairs(group.band, staying.rows, travelling.rows)
                           : allowed_pairs(group.band, travelling.rows, staying.rows);
      }
      const int step = travelling.parcel < 0 ? 0 : plan.arrival(travelling.parcel);
      pairs[static_cast<std::size_t>(step)] += sum * members;
    }
  }
  return pairs;
}

}  // namespace annulus
