#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <tuple>
#include <utility>
#include <vector>

#include "plan/demand.h"
#include "plan/row_partition.h"

namespace annulus {

// Unites the demands of all selections of a class for rows of one range into disjoint row sets,
// each with all ranks that need it.
class RangeUnion {
 public:
  explicit RangeUnion(RankSets& sets) : partition_(sets) {}

  // Demands do not change between two neighbouring boundaries, so the ranks that need a row depend
  // only on its residues modulo the strides. A row set that continues beyond a boundary with the
  // same ranks is extended across it.
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
      // Dense rows first: most of the others are then subsets and split nothing. The order is
      // total, so that every rank gets the same row sets with any standard library.
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
  std::vector<std::pair<Key, std::size_t>> open_;  // row sets that reach the previous boundary
  std::vector<std::pair<Key, std::size_t>> next_open_;
};

}  // namespace annulus
