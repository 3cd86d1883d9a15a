#include "plan/build_parcels.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <span>
#include <tuple>
#include <utility>

#include "pattern/entry_groups.h"
#include "plan/demand.h"
#include "plan/periodic_parcels.h"
#include "plan/range_union.h"
#include "plan/rank_sets.h"

namespace annulus {
namespace {

using SelectionKey = std::tuple<std::int64_t, int, std::int64_t>;  // (first entry, branch, offset)
SelectionKey key_of(const HeadClass& head_class, const Selection& selection) {
  return {head_class.entries.begin, selection.branch, selection.offset};
}

// Collects the row sets of one owner, class by class and range by range, into one parcel per class
// and rank set.
class ParcelBuilder {
 public:
  ParcelBuilder(const Placement& placement, const std::vector<HeadClass>& classes, RankSets& sets,
                int rank)
      : placement_(&placement), classes_(&classes), sets_(&sets), rank_(rank) {}

  void add(int owner, int range, std::span<const LabelledRows> pieces) {
    const RowSet& base = placement_->ranges(owner)[static_cast<std::size_t>(range)];
    for (const LabelledRows& piece : pieces) {
      Open& open = open_[piece.needed_by];
      open.row_count += piece.rows.count;
      if (!keeps(owner, piece.needed_by)) continue;
      if (open.range != range) close_range(open, range);
      open.in_range.push_back({base[piece.rows.first], piece.rows.count,
                               piece.rows.count > 1 ? piece.rows.stride * base.stride : 1});
    }
  }

  void finish_class(int owner, int head_class) {
    const std::int64_t units = (*classes_)[static_cast<std::size_t>(head_class)].unit_rows();
    const std::size_t begin = parcels_.size();
    for (auto& [needed_by, open] : open_) {
      ++parcel_count_;
      moved_[needed_by] += open.row_count * units;
      if (!keeps(owner, needed_by)) continue;
      close_range(open, -1);
      Parcel parcel{owner, head_class, std::move(open.rows), open.row_count, needed_by};
      std::sort(parcel.rows.begin(), parcel.rows.end(),
                [](const RowSet& a, const RowSet& b) { return a.first < b.first; });
      for (RowSet& rows : parcel.rows) {
        if (rows.count == 1) rows.stride = 1;
      }
      parcels_.push_back(std::move(parcel));
    }
    std::sort(parcels_.begin() + static_cast<std::ptrdiff_t>(begin), parcels_.end(),
              [](const Parcel& a, const Parcel& b) {
                return a.rows.front().first < b.rows.front().first;
              });
    open_.clear();
  }

  void finish_owner(int owner) {
    for (const auto& [needed_by, unit_rows] : moved_) {
      flows_.push_back({owner, needed_by, unit_rows});
    }
    moved_.clear();
  }

  // Keeps only the rank sets that are in use. Planning made many intermediate ones.
  BuiltParcels take() {
    RankSetList used(placement_->ranks());
    std::vector<int> new_id(static_cast<std::size_t>(sets_->list().size()), -1);
    for (Flow& flow : flows_) {
      int& id = new_id[static_cast<std::size_t>(flow.rank_set)];
      if (id < 0) {
        std::copy_n(sets_->list().words(flow.rank_set), used.words_per_set(), used.append());
        id = used.size() - 1;
      }
      flow.rank_set = id;
    }
    for (Parcel& parcel : parcels_) {
      parcel.rank_set = new_id[static_cast<std::size_t>(parcel.rank_set)];
    }
    return {std::move(parcels_), std::move(used), std::move(flows_), parcel_count_};
  }

 private:
  struct Open {
    int range = -1;
    std::int64_t row_count = 0;
    std::vector<RowSet> in_range;  // of the current range; row sets never cross ranges
    std::vector<RowSet> rows;
  };

  [[nodiscard]] bool keeps(int owner, int needed_by) const {
    return rank_ == kEveryRank || owner == rank_ || sets_->contains(needed_by, rank_);
  }

  static void close_range(Open& open, int next_range) {
    join_single_rows(open.in_range);
    open.rows.insert(open.rows.end(), open.in_range.begin(), open.in_range.end());
    open.in_range.clear();
    open.range = next_range;
  }

  const Placement* placement_;
  const std::vector<HeadClass>* classes_;
  RankSets* sets_;
  int rank_;
  std::map<int, Open> open_;           // of the current owner and class, by rank set
  std::map<int, std::int64_t> moved_;  // of the current owner, by rank set: rows x units
  std::vector<Parcel> parcels_;
  std::vector<Flow> flows_;
  std::int64_t parcel_count_ = 0;
};

// The demands of one class for rows of one owner, range by range.
class ClassDemands {
 public:
  void start(const HeadClass& head_class, int owner,
             const std::map<SelectionKey, SelectionDemands>& demands) {
    queues_.clear();
    for (const Selection& s : head_class.selections) {
      const std::span<const Demand> queue = demands.at(key_of(head_class, s)).of(owner);
      if (!queue.empty()) queues_.push_back(queue);
    }
  }

  [[nodiscard]] bool empty() const { return queues_.empty(); }

  // Disjoint row sets of the next range, each with the ranks that need it.
  std::pair<int, std::span<const LabelledRows>> next_range(RangeUnion& range_union) {
    int range = std::numeric_limits<int>::max();
    for (const auto& queue : queues_) range = std::min(range, queue.front().range);
    together_.clear();
    int sources = 0;
    for (auto& queue : queues_) {
      const auto end = std::find_if(queue.begin(), queue.end(),
                                    [&](const Demand& d) { return d.range != range; });
      sources += end != queue.begin() ? 1 : 0;
      together_.insert(together_.end(), queue.begin(), end);
      queue = std::span(end, queue.end());
    }
    std::erase_if(queues_, [](const auto& queue) { return queue.empty(); });
    if (sources > 1) return {range, range_union.unite(together_)};
    pieces_.clear();  // demands of one selection are disjoint
    for (const Demand& d : together_) pieces_.push_back({d.rows_in(d.begin, d.end), d.needed_by});
    return {range, pieces_};
  }

 private:
  std::vector<std::span<const Demand>> queues_;
  std::vector<Demand> together_;
  std::vector<LabelledRows> pieces_;
};

}  // namespace

BuiltParcels build_parcels(const PlanOptions& options, const std::vector<HeadClass>& classes,
                           int rank) {
  std::optional<BuiltParcels> periodic = build_periodic_parcels(options, classes, rank);
  return periodic ? std::move(*periodic) : build_parcels_directly(options, classes, rank);
}

BuiltParcels build_parcels_directly(const PlanOptions& options,
                                    const std::vector<HeadClass>& classes, int rank) {
  const Placement& placement = options.travel == Travel::keys ? options.keys : options.queries;
  RankSets sets(placement.ranks());
  // Classes share selections (16 heads of LongNet: 31 instead of 80), so walk the shards once per
  // selection, not once per class.
  std::map<SelectionKey, SelectionDemands> demands;
  for (const HeadClass& head_class : classes) {
    for (const Selection& s : head_class.selections) {
      const auto [found, is_new] = demands.try_emplace(key_of(head_class, s));
      if (!is_new) continue;
      const Branch& branch = options.pattern.branches[static_cast<std::size_t>(s.branch)];
      const std::span<const Document> documents =
          documents_of(options.pattern, head_class.entries.begin);
      found->second = collect_demands(options, documents, branch, s.offset, sets);
    }
  }
  RangeUnion range_union(sets);
  ClassDemands of_class;
  ParcelBuilder builder(placement, classes, sets, rank);
  for (int owner = 0; owner < placement.ranks(); ++owner) {
    for (std::size_t c = 0; c < classes.size(); ++c) {
      of_class.start(classes[c], owner, demands);
      while (!of_class.empty()) {
        const auto [range, pieces] = of_class.next_range(range_union);
        builder.add(owner, range, pieces);
      }
      builder.finish_class(owner, static_cast<int>(c));
    }
    builder.finish_owner(owner);
  }
  return builder.take();
}

}  // namespace annulus
