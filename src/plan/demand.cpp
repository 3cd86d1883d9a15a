#include "plan/demand.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <numeric>
#include <span>
#include <tuple>
#include <utility>

#include "plan/rank_sets.h"
#include "plan/row_partition.h"
#include "plan/selected_rows.h"

namespace annulus {
namespace {

// Rows of one range of the owner, in indices into that range: first, first + stride, ... < end.
// `needed_by` includes the owner. `begin` and `end` are where the reason for the demand starts and
// stops (a segment, a causal threshold), not where its rows do: demands of different strides then
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

// The selected rows of one range in one segment that may have to travel.
struct Piece {
  std::int64_t segment = 0;
  int rank = 0;
  int range = 0;
  int cuts = -1;  // index of its segment's cuts; -1: nobody else needs these rows
  Crossing::Rows rows;
};

// From position `begin` on (up to the next cut) a row is needed by these ranks.
struct Cut {
  std::int64_t begin = 0;
  int needed_by = 0;
};

// A rank's first and last selected position in a segment.
struct Presence {
  int rank = 0;
  std::int64_t first = 0;
  std::int64_t last = 0;
};

// In self-attention, segments that lie within one range are local: nobody else has rows in them.
// They are skipped in bulk (`skip_whole`), so that the work follows shard boundaries and not
// tokens.
std::vector<Piece> shard_pieces(const Placement& placement, const SelectedRows& selected,
                                bool skip_whole) {
  std::vector<Piece> pieces;
  for (int rank = 0; rank < placement.ranks(); ++rank) {
    const std::span<const RowSet> ranges = placement.ranges(rank);
    for (int range = 0; range < static_cast<int>(ranges.size()); ++range) {
      const RowSet& base = ranges[static_cast<std::size_t>(range)];
      if (base.count == 0) continue;
      const Crossing crossing(base, selected);
      const auto [whole_begin, whole_end] = crossing.whole_segments();
      for (std::int64_t s = crossing.first_segment(); s < crossing.end_segment(); ++s) {
        if (skip_whole && s >= whole_begin && s < whole_end) {
          s = whole_end - 1;
          continue;
        }
        const Crossing::Rows rows = crossing.in_segment(s);
        if (rows.elements.count > 0) pieces.push_back({s, rank, range, -1, rows});
      }
    }
  }
  return pieces;
}

// Which ranks need a row, as a function of its position, in a segment in which these ranks have
// rows of the side that stays. A causal key is needed by ranks that still have a query at or after
// it, a causal query by ranks that already have a key at or before it: the set changes only at a
// rank's last or first row. In self-attention (`same`) no row lies beyond the last one.
std::vector<Cut> segment_cuts(std::vector<Presence> present, const Mask& mask, Travel travel,
                              bool same, RankSets& sets) {
  std::vector<Cut> cuts;
  RankSets::Words ranks = sets.none();
  const auto cut = [&](std::int64_t begin) {
    if (!cuts.empty() && cuts.back().begin == begin) cuts.pop_back();
    cuts.push_back({begin, sets.intern(ranks)});
  };
  if (mask.kind == Mask::full || travel == Travel::keys) {
    for (const Presence& p : present) RankSets::flip(ranks, p.rank);
    cut(0);
    if (mask.kind == Mask::full) return cuts;
    std::sort(present.begin(), present.end(),
              [](const auto& a, const auto& b) { return a.last < b.last; });
    for (const Presence& p : present) {
      if (same && &p == &present.back()) break;
      RankSets::flip(ranks, p.rank);
      cut(p.last + 1);
    }
  } else {
    cut(0);
    std::sort(present.begin(), present.end(),
              [](const auto& a, const auto& b) { return a.first < b.first; });
    for (const Presence& p : present) {
      RankSets::flip(ranks, p.rank);
      cut(p.first);
    }
  }
  return cuts;
}

// Indices of pieces, segment by segment.
std::vector<std::size_t> by_segment(const std::vector<Piece>& pieces) {
  std::vector<std::size_t> order(pieces.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return pieces[a].segment < pieces[b].segment;
  });
  return order;
}

// What one (branch, offset) demands. Pieces of the side that travels are cut where the set of ranks
// changes that have use for them.
class DemandCollector {
 public:
  DemandCollector(const PlanOptions& options, RankSets& sets)
      : mask_(options.pattern.mask()),
        travel_(options.travel),
        travelling_(travel_ == Travel::keys ? options.keys : options.queries),
        staying_(travel_ == Travel::keys ? options.queries : options.keys),
        same_(travelling_.same_as(staying_)),
        sets_(&sets) {}

  SelectionDemands collect(const Branch& branch, std::int64_t offset) {
    std::vector<Piece> moving =
        shard_pieces(travelling_, {branch, offset, travelling_.tokens()}, same_);
    cuts_.clear();
    if (same_) {
      assign_cuts(moving, moving);
    } else {
      assign_cuts(moving, shard_pieces(staying_, {branch, offset, staying_.tokens()}, false));
    }
    SelectionDemands result;
    std::size_t i = 0;
    for (int owner = 0; owner < travelling_.ranks(); ++owner) {
      const std::size_t owner_begin = result.demands.size();
      result.owner_begin.push_back(owner_begin);
      for (; i < moving.size() && moving[i].rank == owner; ++i) {
        if (moving[i].cuts >= 0) add_demands(moving[i], owner_begin, result.demands);
      }
    }
    result.owner_begin.push_back(result.demands.size());
    return result;
  }

 private:
  // Ranks that have rows of the staying side in a segment.
  void find_present(const std::vector<Piece>& waiting, std::span<const std::size_t> segment) {
    present_.clear();
    for (const std::size_t i : segment) {
      const Piece& piece = waiting[i];
      const RowSet& range = staying_.ranges(piece.rank)[static_cast<std::size_t>(piece.range)];
      const std::int64_t first = range[piece.rows.elements.first];
      const std::int64_t last = range[piece.rows.elements.last()];
      if (present_.empty() || present_.back().rank != piece.rank) {
        present_.push_back({piece.rank, first, last});
      } else {
        present_.back().first = std::min(present_.back().first, first);
        present_.back().last = std::max(present_.back().last, last);
      }
    }
  }

  void assign_cuts(std::vector<Piece>& moving, const std::vector<Piece>& waiting) {
    const std::vector<std::size_t> movers = by_segment(moving);
    const std::vector<std::size_t> waiters = by_segment(waiting);
    const auto end_of = [](const std::vector<Piece>& pieces, const std::vector<std::size_t>& order,
                           std::size_t from) {
      std::size_t end = from;
      while (end < order.size() && pieces[order[end]].segment == pieces[order[from]].segment) ++end;
      return end;
    };
    std::size_t w = 0;
    for (std::size_t m = 0, end = 0; m < movers.size(); m = end) {
      end = end_of(moving, movers, m);
      const std::int64_t segment = moving[movers[m]].segment;
      while (w < waiters.size() && waiting[waiters[w]].segment < segment) ++w;
      if (w == waiters.size()) return;
      if (waiting[waiters[w]].segment != segment) continue;
      find_present(waiting, std::span(waiters).subspan(w, end_of(waiting, waiters, w) - w));
      const int only = present_.size() == 1 ? present_.front().rank : -1;
      bool needed = false;  // by anybody but the owner
      for (std::size_t j = m; j < end; ++j) needed = needed || moving[movers[j]].rank != only;
      if (!needed) continue;
      for (std::size_t j = m; j < end; ++j) {
        moving[movers[j]].cuts = static_cast<int>(cuts_.size());
      }
      cuts_.push_back(segment_cuts(present_, mask_, travel_, same_, *sets_));
    }
  }

  void add_demands(const Piece& piece, std::size_t owner_begin, std::vector<Demand>& demands) {
    const RowSet& range = travelling_.ranges(piece.rank)[static_cast<std::size_t>(piece.range)];
    const std::vector<Cut>& segment = cuts_[static_cast<std::size_t>(piece.cuts)];
    const Crossing::Rows& rows = piece.rows;
    auto cut =
        std::upper_bound(segment.begin(), segment.end(), range[rows.elements.first],
                         [](std::int64_t position, const Cut& c) { return position < c.begin; });
    for (--cut; cut != segment.end() && cut->begin <= range[rows.elements.last()]; ++cut) {
      // The owner is in every set, needed or not: sets that differ in nothing else are one parcel.
      const int needed_by = sets_->with(cut->needed_by, piece.rank);
      if (sets_->has_one_member(needed_by)) continue;  // by the owner alone
      Demand demand{piece.range, needed_by,           rows.begin,
                    rows.end,    rows.elements.first, rows.elements.stride};
      demand.begin = std::max(demand.begin, ceil_div(cut->begin - range.first, range.stride));
      if (cut + 1 != segment.end()) {
        demand.end = std::min(demand.end, ceil_div((cut + 1)->begin - range.first, range.stride));
      }
      demand.first = demand.rows_in(demand.begin, demand.end).first;
      if (demand.first >= demand.end) continue;
      if (demands.size() == owner_begin || !demands.back().extend(demand)) {
        demands.push_back(demand);
      }
    }
  }

  Mask mask_;
  Travel travel_;
  Placement travelling_;
  Placement staying_;
  bool same_;
  RankSets* sets_;
  std::vector<std::vector<Cut>> cuts_;  // per segment that somebody else needs
  std::vector<Presence> present_;
};

// Unites what the selections of one class demand of one range into disjoint row sets, each with
// everybody who needs it.
class RangeUnion {
 public:
  explicit RangeUnion(RankSets& sets) : partition_(sets) {}

  // Between two neighbouring boundaries the demands do not change: there the ranks that need a row
  // depend only on its residues modulo the strides. Row sets that go on beyond a boundary with the
  // same ranks are extended across it.
  const std::vector<LabelledRows>& unite(std::vector<Demand>& demands) {
    result_.clear();
    open_.clear();
    boundaries_.clear();
    active_.clear();
    for (const Demand& d : demands) boundaries_.insert(boundaries_.end(), {d.begin, d.end});
    std::sort(boundaries_.begin(), boundaries_.end());
    boundaries_.erase(std::unique(boundaries_.begin(), boundaries_.end()), boundaries_.end());
    std::sort(demands.begin(), demands.end(), [](const Demand& a, const Demand& b) {
      return std::tie(a.begin, a.stride) < std::tie(b.begin, b.stride);
    });
    std::size_t next = 0;
    for (std::size_t i = 0; i + 1 < boundaries_.size(); ++i) {
      const std::int64_t begin = boundaries_[i];
      std::erase_if(active_, [&](const Demand* d) { return d->end <= begin; });
      for (; next < demands.size() && demands[next].begin == begin; ++next) {
        active_.push_back(&demands[next]);
      }
      // Dense rows first: the others then mostly fall into them and split nothing. The order is
      // total, so that every rank gets the same row sets, whatever its standard library.
      std::sort(active_.begin(), active_.end(), [](const Demand* a, const Demand* b) {
        return std::tie(a->stride, a->first, a->needed_by) <
               std::tie(b->stride, b->first, b->needed_by);
      });
      partition_.clear();
      for (const Demand* d : active_) {
        partition_.add(d->rows_in(begin, boundaries_[i + 1]), d->needed_by);
      }
      partition_.join();
      append(partition_.pieces());
    }
    return result_;
  }

 private:
  using Key = std::tuple<std::int64_t, std::int64_t, int>;  // next row, stride, ranks

  void append(const std::vector<LabelledRows>& pieces) {
    next_open_.clear();
    for (const LabelledRows& piece : pieces) {
      const Key key{piece.rows.first, piece.rows.stride, piece.needed_by};
      const auto found =
          std::lower_bound(open_.begin(), open_.end(), std::pair(key, std::size_t{0}));
      std::size_t index = result_.size();
      if (found != open_.end() && found->first == key) {
        index = found->second;
        result_[index].rows.count += piece.rows.count;
      } else {
        result_.push_back(piece);
      }
      next_open_.push_back(
          {{piece.rows.last() + piece.rows.stride, piece.rows.stride, piece.needed_by}, index});
    }
    std::sort(next_open_.begin(), next_open_.end());
    std::swap(open_, next_open_);
  }

  RowPartition partition_;
  std::vector<LabelledRows> result_;
  std::vector<std::int64_t> boundaries_;
  std::vector<const Demand*> active_;
  std::vector<std::pair<Key, std::size_t>> open_;  // row sets that reach the last boundary
  std::vector<std::pair<Key, std::size_t>> next_open_;
};

// Collects the row sets of one owner and one class into parcels, one per rank set.
class ParcelBuilder {
 public:
  ParcelBuilder(const Placement& placement, const RankSets& sets)
      : placement_(&placement), sets_(&sets) {}

  void add(int owner, int range, std::span<const LabelledRows> pieces) {
    const RowSet& base = placement_->ranges(owner)[static_cast<std::size_t>(range)];
    for (const LabelledRows& piece : pieces) {
      Open& open = open_[piece.needed_by];
      if (open.range != range) close_range(open, range);
      open.in_range.push_back({base[piece.rows.first], piece.rows.count,
                               piece.rows.count > 1 ? piece.rows.stride * base.stride : 1});
    }
  }

  void finish(int owner, int head_class, std::vector<Parcel>& parcels) {
    const std::size_t begin = parcels.size();
    for (auto& [needed_by, open] : open_) {
      close_range(open, -1);
      Parcel parcel{owner, head_class, std::move(open.rows), 0, {}};
      std::sort(parcel.rows.begin(), parcel.rows.end(),
                [](const RowSet& a, const RowSet& b) { return a.first < b.first; });
      for (RowSet& rows : parcel.rows) {
        if (rows.count == 1) rows.stride = 1;
        parcel.row_count += rows.count;
      }
      for (const int rank : sets_->members(needed_by)) {
        if (rank != owner) parcel.itinerary.push_back(rank);
      }
      // Cyclic order after the owner, so that the parcels of different owners use different links
      // in a step.
      std::rotate(parcel.itinerary.begin(),
                  std::lower_bound(parcel.itinerary.begin(), parcel.itinerary.end(), owner),
                  parcel.itinerary.end());
      parcels.push_back(std::move(parcel));
    }
    std::sort(parcels.begin() + static_cast<std::ptrdiff_t>(begin), parcels.end(),
              [](const Parcel& a, const Parcel& b) {
                return a.rows.front().first < b.rows.front().first;
              });
    open_.clear();
  }

 private:
  struct Open {
    int range = -1;
    std::vector<RowSet> in_range;  // of the current range; row sets never cross ranges
    std::vector<RowSet> rows;
  };

  static void close_range(Open& open, int next_range) {
    join_single_rows(open.in_range);
    open.rows.insert(open.rows.end(), open.in_range.begin(), open.in_range.end());
    open.in_range.clear();
    open.range = next_range;
  }

  const Placement* placement_;
  const RankSets* sets_;
  std::map<int, Open> open_;  // by rank set
};

}  // namespace

std::vector<Parcel> build_parcels(const PlanOptions& options,
                                  const std::vector<HeadClass>& classes) {
  const Placement& placement = options.travel == Travel::keys ? options.keys : options.queries;
  RankSets sets(placement.ranks());
  DemandCollector collector(options, sets);
  // Classes share selections (16 heads of LongNet: 31 instead of 80): walk the shards once for
  // each.
  std::map<std::pair<int, std::int64_t>, SelectionDemands> demands;
  for (const HeadClass& head_class : classes) {
    for (const Selection& s : head_class.selections) {
      if (demands.contains({s.branch, s.offset})) continue;
      const Branch& branch = options.pattern.branches[static_cast<std::size_t>(s.branch)];
      demands.emplace(std::pair(s.branch, s.offset), collector.collect(branch, s.offset));
    }
  }

  std::vector<Parcel> parcels;
  RangeUnion range_union(sets);
  ParcelBuilder builder(placement, sets);
  std::vector<std::span<const Demand>> queues;
  std::vector<Demand> together;
  std::vector<LabelledRows> pieces;
  for (int owner = 0; owner < placement.ranks(); ++owner) {
    for (std::size_t c = 0; c < classes.size(); ++c) {
      queues.clear();
      for (const Selection& s : classes[c].selections) {
        const std::span<const Demand> queue = demands.at({s.branch, s.offset}).of(owner);
        if (!queue.empty()) queues.push_back(queue);
      }
      while (!queues.empty()) {
        int range = std::numeric_limits<int>::max();
        for (const auto& queue : queues) range = std::min(range, queue.front().range);
        together.clear();
        int sources = 0;
        for (auto& queue : queues) {
          const auto end = std::find_if(queue.begin(), queue.end(),
                                        [&](const Demand& d) { return d.range != range; });
          sources += end != queue.begin() ? 1 : 0;
          together.insert(together.end(), queue.begin(), end);
          queue = std::span(end, queue.end());
        }
        if (sources > 1) {
          builder.add(owner, range, range_union.unite(together));
        } else {  // demands of one selection are disjoint
          pieces.clear();
          for (const Demand& d : together)
            pieces.push_back({d.rows_in(d.begin, d.end), d.needed_by});
          builder.add(owner, range, pieces);
        }
        std::erase_if(queues, [](const auto& queue) { return queue.empty(); });
      }
      builder.finish(owner, static_cast<int>(c), parcels);
    }
  }
  return parcels;
}

}  // namespace annulus
