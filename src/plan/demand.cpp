#include "plan/demand.h"

#include <algorithm>
#include <numeric>
#include <tuple>

#include "pattern/segments.h"
#include "plan/selected_rows.h"

namespace annulus {
namespace {

// The selected rows of one range in one segment that may have to travel.
struct Piece {
  std::int64_t segment = 0;
  int rank = 0;
  int range = 0;
  int cuts = -1;  // index of its segment's cuts; -1: no other rank needs these rows
  Crossing::Rows rows;
};

// From position `begin` to the next cut, these ranks need a row.
struct Cut {
  std::int64_t begin = 0;
  int needed_by = 0;
};

// Positions at which a rank needs rows of the travelling side.
struct Use {
  int rank = 0;
  std::int64_t first = 0;
  std::int64_t last = 0;
};

// In self-attention, segments within one range are local: no other rank has rows in them. They are
// skipped in bulk (`skip_whole`), so that the cost grows with shard boundaries, not with tokens.
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

// Which ranks need a row, as a function of its position: the set changes at the beginning of a use
// and after its end. No row lies beyond position `end`.
std::vector<Cut> segment_cuts(const std::vector<Use>& uses, std::int64_t end, RankSets& sets) {
  std::vector<std::pair<std::int64_t, int>> changes;  // (position, rank that joins or leaves)
  for (const Use& use : uses) {
    if (use.first > end) continue;
    changes.emplace_back(std::max<std::int64_t>(use.first, 0), use.rank);
    if (use.last < end) changes.emplace_back(use.last + 1, use.rank);
  }
  std::stable_sort(changes.begin(), changes.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<Cut> cuts;
  RankSets::Words ranks = sets.none();
  std::size_t i = 0;
  for (std::int64_t begin = 0;; begin = changes[i].first) {
    for (; i < changes.size() && changes[i].first == begin; ++i)
      RankSets::flip(ranks, changes[i].second);
    cuts.push_back({begin, sets.intern(ranks)});
    if (i == changes.size()) return cuts;
  }
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

// Collects the demands of one (branch, offset). Pieces of the travelling side are cut where the set
// of ranks that need them changes.
class DemandCollector {
 public:
  DemandCollector(const PlanOptions& options, std::span<const Document> documents,
                  const Branch& branch, RankSets& sets)
      : options_(options),
        segments_(documents, branch, options.queries.tokens(), options.keys.tokens()),
        dilation_(branch.dilation),
        travelling_(options.travel == Travel::keys ? options.keys : options.queries),
        staying_(options.travel == Travel::keys ? options.queries : options.keys),
        sets_(&sets) {}

  SelectionDemands collect(std::int64_t offset) {
    const bool keys_travel = options_.travel == Travel::keys;
    const auto pieces_of = [&](const Placement& placement, Side side) {
      return shard_pieces(placement, {segments_, side, dilation_, offset},
                          options_.self_attention());
    };
    std::vector<Piece> moving = pieces_of(travelling_, keys_travel ? Side::keys : Side::queries);
    cuts_.clear();
    if (options_.self_attention()) {
      assign_cuts(moving, moving);
    } else {
      assign_cuts(moving, pieces_of(staying_, keys_travel ? Side::queries : Side::keys));
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
  // Finds the positions in a segment at which ranks with rows of the staying side need rows of the
  // travelling side. The uses of one rank do not overlap.
  void find_uses(const std::vector<Piece>& waiting, std::span<const std::size_t> segment) {
    uses_.clear();
    // Positions of both sides differ by multiples of the dilation.
    Band band = options_.pattern.band().divided_by(dilation_);
    if (band.empty()) return;
    const bool limited = band.least != -Band::kUnlimited && band.most != Band::kUnlimited;
    if (band.least != -Band::kUnlimited) band.least *= dilation_;
    if (band.most != Band::kUnlimited) band.most *= dilation_;
    band = segments_.in_tokens(band, waiting[segment.front()].segment);
    const auto add = [&](int rank, std::int64_t first, std::int64_t last) {
      const Stretch use = options_.travel == Travel::keys ? band.keys_of({first, last})
                                                          : band.queries_of({first, last});
      if (use.last >= 0) uses_.push_back({rank, use.first, use.last});
    };
    // Whether the uses of neighbouring rows overlap or are adjacent. Always true if the band has no
    // limit on one side.
    const auto seamless = [&](std::int64_t step) {
      return !limited || step <= band.most - band.least + dilation_;
    };
    for (const std::size_t i : segment) {
      const Piece& piece = waiting[i];
      const RowSet& range = staying_.ranges(piece.rank)[static_cast<std::size_t>(piece.range)];
      const RowSet& elements = piece.rows.elements;
      if (elements.count == 1 || seamless(range.stride * elements.stride)) {
        add(piece.rank, range[elements.first], range[elements.last()]);
      } else {
        for (std::int64_t row = 0; row < elements.count; ++row)
          add(piece.rank, range[elements[row]], range[elements[row]]);
      }
    }
    std::sort(uses_.begin(), uses_.end(), [](const Use& a, const Use& b) {
      return std::tie(a.rank, a.first) < std::tie(b.rank, b.first);
    });
    std::size_t kept = 0;
    for (const Use& use : uses_) {
      if (kept > 0 && uses_[kept - 1].rank == use.rank &&
          use.first <= uses_[kept - 1].last + dilation_) {
        uses_[kept - 1].last = std::max(uses_[kept - 1].last, use.last);
      } else {
        uses_[kept++] = use;
      }
    }
    uses_.resize(kept);
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
      find_uses(waiting, std::span(waiters).subspan(w, end_of(waiting, waiters, w) - w));
      if (uses_.empty()) continue;
      const bool one_rank = uses_.front().rank == uses_.back().rank;
      bool needed = false;  // by a rank other than the owner
      std::int64_t last = 0;
      for (std::size_t j = m; j < end; ++j) {
        const Piece& piece = moving[movers[j]];
        const RowSet& range = travelling_.ranges(piece.rank)[static_cast<std::size_t>(piece.range)];
        needed = needed || !one_rank || piece.rank != uses_.front().rank;
        last = std::max(last, range[piece.rows.elements.last()]);
      }
      if (!needed) continue;
      for (std::size_t j = m; j < end; ++j) {
        moving[movers[j]].cuts = static_cast<int>(cuts_.size());
      }
      cuts_.push_back(segment_cuts(uses_, last, *sets_));
    }
  }

  void add_demands(const Piece& piece, std::size_t owner_begin, std::vector<Demand>& demands) {
    const RowSet& range = travelling_.ranges(piece.rank)[static_cast<std::size_t>(piece.range)];
    const std::vector<Cut>& segment = cuts_[static_cast<std::size_t>(piece.cuts)];
    const Crossing::Rows& rows = piece.rows;
    // Searches forward from row to row: a striped segment has as many cuts as ranks, but a rank has
    // few rows in it.
    auto cut = segment.begin();
    for (std::int64_t row = rows.elements.first; row < rows.end;) {
      cut =
          std::upper_bound(cut, segment.end(), range[row],
                           [](std::int64_t position, const Cut& c) { return position < c.begin; }) -
          1;
      Demand demand{piece.range, -1, rows.begin, rows.end, row, rows.elements.stride};
      demand.begin = std::max(demand.begin, ceil_div(cut->begin - range.first, range.stride));
      if (cut + 1 != segment.end()) {
        demand.end = std::min(demand.end, ceil_div((cut + 1)->begin - range.first, range.stride));
      }
      row += ceil_div(demand.end - row, demand.stride) * demand.stride;
      // The owner is in every set, whether it needs the rows or not, so that sets that differ only
      // in the owner make one parcel.
      demand.needed_by = sets_->with(cut->needed_by, piece.rank);
      if (sets_->has_one_member(demand.needed_by)) continue;  // only the owner
      if (demands.size() == owner_begin || !demands.back().extend(demand)) {
        demands.push_back(demand);
      }
    }
  }

  const PlanOptions& options_;
  Segments segments_;
  std::int64_t dilation_;
  const Placement& travelling_;
  const Placement& staying_;
  RankSets* sets_;
  std::vector<std::vector<Cut>> cuts_;  // per segment with rows that other ranks need
  std::vector<Use> uses_;
};

}  // namespace

SelectionDemands collect_demands(const PlanOptions& options, std::span<const Document> documents,
                                 const Branch& branch, std::int64_t offset, RankSets& sets) {
  return DemandCollector(options, documents, branch, sets).collect(offset);
}

}  // namespace annulus
