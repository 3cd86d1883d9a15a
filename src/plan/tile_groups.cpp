#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "annulus/error.h"
#include "annulus/plan.h"
#include "pattern/entry_groups.h"
#include "pattern/segments.h"
#include "plan/pair_counts.h"
#include "plan/selected_rows.h"

namespace annulus {
namespace {

bool earlier(const PlacedRows& a, const PlacedRows& b) { return a.rows.first < b.rows.first; }

PlacedRows place(const RowSet& base, const RowSet& elements, int parcel, std::int64_t base_store) {
  const std::int64_t stride = elements.count > 1 ? elements.stride : 1;
  return {{base[elements.first], elements.count, elements.count > 1 ? stride * base.stride : 1},
          parcel,
          base_store + elements.first,
          stride};
}

Stretch stretch_of(const RowSet& rows) { return {rows.first, rows.last()}; }

// The stretch from the first row to the last, over all row sets. There is at least one.
Stretch stretch_of(const std::vector<PlacedRows>& list) {
  Stretch all = stretch_of(list.front().rows);
  for (const PlacedRows& rows : list) {
    all.first = std::min(all.first, rows.rows.first);
    all.last = std::max(all.last, rows.rows.last());
  }
  return all;
}

// The rows of one side of a shard that one (branch, offset) selects, by segment.
class LocalRowsBySegment {
 public:
  struct Segment {
    std::int64_t segment = 0;
    std::size_t begin = 0;  // of its row sets
    std::size_t end = 0;
    std::int64_t first = 0;  // position of its first row
    std::int64_t last = 0;
  };

  LocalRowsBySegment(std::span<const RowSet> ranges, const SelectedRows& selected) {
    std::vector<std::pair<std::int64_t, PlacedRows>> all;
    std::int64_t base_store = 0;
    for (const RowSet& range : ranges) {
      if (range.count == 0) continue;
      const Crossing crossing(range, selected);
      for (std::int64_t s = crossing.first_segment(); s < crossing.end_segment(); ++s) {
        const RowSet elements = crossing.in_segment(s).elements;
        if (elements.count > 0) all.emplace_back(s, place(range, elements, -1, base_store));
      }
      base_store += range.count;
    }
    std::sort(all.begin(), all.end(), [](const auto& a, const auto& b) {
      return std::tie(a.first, a.second.rows.first) < std::tie(b.first, b.second.rows.first);
    });
    rows_.reserve(all.size());
    for (const auto& [segment, rows] : all) {
      if (segments_.empty() || segments_.back().segment != segment) {
        segments_.push_back({segment, rows_.size(), 0, rows.rows.first, rows.rows.last()});
      }
      rows_.push_back(rows);
      segments_.back().end = rows_.size();
      segments_.back().last = std::max(segments_.back().last, rows.rows.last());
    }
  }

  [[nodiscard]] const std::vector<Segment>& segments() const { return segments_; }
  [[nodiscard]] std::span<const PlacedRows> rows(const Segment& segment) const {
    return std::span(rows_).subspan(segment.begin, segment.end - segment.begin);
  }
  [[nodiscard]] std::span<const PlacedRows> rows_in(std::int64_t segment) const {
    const std::size_t i = find(segment);
    if (i == segments_.size() || segments_[i].segment != segment) return {};
    return rows(segments_[i]);
  }
  // Index of the first segment that is not before `segment`.
  [[nodiscard]] std::size_t find(std::int64_t segment) const {
    const auto found =
        std::lower_bound(segments_.begin(), segments_.end(), segment,
                         [](const Segment& s, std::int64_t value) { return s.segment < value; });
    return static_cast<std::size_t>(found - segments_.begin());
  }

 private:
  std::vector<Segment> segments_;
  std::vector<PlacedRows> rows_;
};

// Received rows, grouped by segments in which the shard has rows.
class ReceivedRowsBySegment {
 public:
  ReceivedRowsBySegment(const Plan& plan, const std::vector<int>& parcels,
                        const SelectedRows& selected, const LocalRowsBySegment& shard)
      : begin_(shard.segments().size() + 1, 0) {
    if (shard.segments().empty()) return;  // striped shards select all or nothing
    const bool keys_travel = plan.options().travel == Travel::keys;
    // In a large ring, most received rows are needed by coarse branches only, and are far from the
    // shard's segments of this one.
    const std::int64_t begin = selected.part(shard.segments().front().segment).begin;
    const std::int64_t end = selected.part(shard.segments().back().segment).end;
    std::vector<std::pair<std::size_t, PlacedRows>> found;
    for (const int p : parcels) {
      std::int64_t base_store = 0;
      for (const RowSet& base : plan.parcels()[static_cast<std::size_t>(p)].rows) {
        if (base.last() < begin || base.first >= end) {
          base_store += base.count;
          continue;
        }
        const Crossing crossing(base, selected);
        for (std::size_t i = shard.find(crossing.first_segment()); i + 1 < begin_.size(); ++i) {
          const LocalRowsBySegment::Segment& here = shard.segments()[i];
          if (here.segment >= crossing.end_segment()) break;
          const RowSet elements = crossing.in_segment(here.segment).elements;
          if (elements.count == 0) continue;
          const PlacedRows rows = place(base, elements, p, base_store);
          const Stretch travelling = stretch_of(rows.rows);
          const Stretch staying{here.first, here.last};
          const Band band = selected.segments->in_tokens(plan.pattern().band(), here.segment);
          if (!band.hides_all(keys_travel ? staying : travelling,
                              keys_travel ? travelling : staying))
            found.emplace_back(i, rows);
        }
        base_store += base.count;
      }
    }
    // Counting sort: a rank of a large striped ring meets a million of these.
    for (const auto& [i, rows] : found) ++begin_[i + 1];
    std::partial_sum(begin_.begin(), begin_.end(), begin_.begin());
    rows_.resize(found.size());
    std::vector<std::size_t> next(begin_.begin(), begin_.end() - 1);
    for (const auto& [i, rows] : found) rows_[next[i]++] = rows;
  }

  // Rows in the i-th segment of the shard, in no particular order.
  [[nodiscard]] std::span<const PlacedRows> rows(std::size_t i) const {
    return std::span(rows_).subspan(begin_[i], begin_[i + 1] - begin_[i]);
  }

 private:
  std::vector<std::size_t> begin_;
  std::vector<PlacedRows> rows_;
};

// Removes row sets that the band hides entirely. False if no pair is left.
bool trim(TileGroup& group, const Band& band) {
  if (group.queries.empty() || group.keys.empty()) return false;
  const Stretch queries = stretch_of(group.queries);
  std::erase_if(group.keys,
                [&](const PlacedRows& k) { return band.hides_all(queries, stretch_of(k.rows)); });
  if (group.keys.empty()) return false;
  const Stretch keys = stretch_of(group.keys);
  std::erase_if(group.queries,
                [&](const PlacedRows& q) { return band.hides_all(stretch_of(q.rows), keys); });
  if (group.queries.empty()) return false;
  if (band.least == -Band::kUnlimited || band.most == Band::kUnlimited) return true;
  // A band with two limits can fit between the rows of a stretch, so these have to be counted.
  const auto meet = [&](const PlacedRows& q, const PlacedRows& k) {
    return !band.hides_all(stretch_of(q.rows), stretch_of(k.rows)) &&
           allowed_pairs(band, q.rows, k.rows) > 0;
  };
  std::erase_if(group.keys, [&](const PlacedRows& k) {
    return std::none_of(group.queries.begin(), group.queries.end(),
                        [&](const PlacedRows& q) { return meet(q, k); });
  });
  std::erase_if(group.queries, [&](const PlacedRows& q) {
    return std::none_of(group.keys.begin(), group.keys.end(),
                        [&](const PlacedRows& k) { return meet(q, k); });
  });
  return !group.queries.empty();
}

// The full band if every query sees every key; kernels then skip the comparison.
Band band_of(const TileGroup& group, const Band& band) {
  return band.shows_all(stretch_of(group.queries), stretch_of(group.keys)) ? Band{} : band;
}

}  // namespace

std::vector<TileGroup> Plan::tile_groups(int first_step, int last_step) const {
  if (first_step < 0 || last_step > steps()) {
    throw ConfigError("Plan::tile_groups: found steps " + std::to_string(first_step) + ".." +
                      std::to_string(last_step) + ", expected steps within 0.." +
                      std::to_string(steps()));
  }
  std::vector<std::vector<int>> received(classes().size());  // parcels by class
  for (int step = std::max(first_step, 1); step <= last_step; ++step) {
    for (const Hop& hop : incoming(step)) {
      const Parcel& parcel = parcels()[static_cast<std::size_t>(hop.parcel)];
      received[static_cast<std::size_t>(parcel.head_class)].push_back(hop.parcel);
    }
  }

  std::vector<TileGroup> groups;
  const bool keys_travel = options_.travel == Travel::keys;
  const bool with_local = first_step == 0 && last_step >= 0;
  for (std::size_t b = 0; b < pattern().branches.size(); ++b) {
    const Branch& branch = pattern().branches[b];
    // Of one group of batch entries: the classes of a group follow each other.
    std::optional<Segments> segments;
    std::size_t first_document = 0;
    std::int64_t entry = -1;
    // By offset, because classes share them. In self-attention both sides share them, too.
    std::map<std::int64_t, LocalRowsBySegment> shards;
    std::map<std::int64_t, LocalRowsBySegment> travelling_shards;
    for (std::size_t c = 0; c < classes().size(); ++c) {
      if (classes()[c].entries.begin != entry) {
        entry = classes()[c].entries.begin;
        const std::span<const Document> documents = documents_of(pattern(), entry);
        segments.emplace(documents, branch, query_placement().tokens(), key_placement().tokens());
        first_document =
            pattern().documents.empty()
                ? 0
                : static_cast<std::size_t>(documents.data() - pattern().documents.data());
        shards.clear();
        travelling_shards.clear();
      }
      const std::size_t class_begin = groups.size();
      int selections = 0;
      for (std::size_t s = 0; s < classes()[c].selections.size(); ++s) {
        const Selection& selection = classes()[c].selections[s];
        if (static_cast<std::size_t>(selection.branch) != b) continue;
        if (!with_local && received[c].empty()) continue;
        ++selections;
        const auto selected_on = [&](Side side) {
          return SelectedRows(*segments, side, branch.dilation, selection.offset);
        };
        const auto shard_of = [&](Side side, auto& made) -> const LocalRowsBySegment& {
          const Placement& placement = side == Side::keys ? key_placement() : query_placement();
          return made.try_emplace(selection.offset, placement.ranges(rank_), selected_on(side))
              .first->second;
        };
        const Side travelling_side = keys_travel ? Side::keys : Side::queries;
        const LocalRowsBySegment& shard =
            shard_of(keys_travel ? Side::queries : Side::keys, shards);
        const LocalRowsBySegment& home =
            self_attention_ ? shard : shard_of(travelling_side, travelling_shards);
        const ReceivedRowsBySegment visiting(*this, received[c], selected_on(travelling_side),
                                             shard);
        for (std::size_t i = 0; i < shard.segments().size(); ++i) {
          const std::span<const PlacedRows> arrived = visiting.rows(i);
          const LocalRowsBySegment::Segment& here = shard.segments()[i];
          const std::span<const PlacedRows> local =
              with_local ? home.rows_in(here.segment) : std::span<const PlacedRows>();
          if (local.empty() && arrived.empty()) continue;
          const std::span<const PlacedRows> waiting = shard.rows(here);
          TileGroup group;
          group.head_class = static_cast<int>(c);
          group.selection = static_cast<int>(s);
          group.segment = here.segment;
          const Segments::Origins origins = segments->origins(here.segment);
          group.document = static_cast<int>(first_document + origins.document);
          group.query_origin = origins.query;
          group.key_origin = origins.key;
          (keys_travel ? group.queries : group.keys).assign(waiting.begin(), waiting.end());
          std::vector<PlacedRows>& travelling = keys_travel ? group.keys : group.queries;
          travelling.reserve(arrived.size() + local.size());
          travelling.assign(local.begin(), local.end());
          travelling.insert(travelling.end(), arrived.begin(), arrived.end());
          if (!arrived.empty()) std::sort(travelling.begin(), travelling.end(), earlier);
          const Band band = origins.in_tokens(pattern().band());
          if (!trim(group, band)) continue;
          group.band = band_of(group, band);
          groups.push_back(std::move(group));
        }
      }
      if (selections > 1) {  // several offsets of one branch: order by segment first
        std::stable_sort(
            groups.begin() + static_cast<std::ptrdiff_t>(class_begin), groups.end(),
            [](const TileGroup& x, const TileGroup& y) { return x.segment < y.segment; });
      }
    }
  }
  return groups;
}

}  // namespace annulus
