#pragma once

#include <cstdint>
#include <vector>

#include "annulus/row_set.h"
#include "plan/rank_sets.h"

namespace annulus {

struct LabelledRows {
  RowSet rows;
  int needed_by = 0;  // id of a rank set
};

// Joins p interleaved row sets of stride s to one of stride s / p, repeatedly, until no more can be
// joined.
void join_interleaved(std::vector<RowSet>& sets);

// Joins single rows at equal distances to one row set. Causal demands on striped shards leave one
// row per segment.
void join_single_rows(std::vector<RowSet>& sets);

// Disjoint row sets, each with the ranks that need it. Adding rows splits existing row sets only if
// their ranks change for a part of their rows.
class RowPartition {
 public:
  explicit RowPartition(RankSets& sets) : sets_(&sets) {}

  void clear() { pieces_.clear(); }
  [[nodiscard]] const std::vector<LabelledRows>& pieces() const { return pieces_; }

  void add(const RowSet& rows, int needed_by);

  // Undoes needless splits: query heads with different offsets that share a K/V head often need
  // every row together.
  void join();

 private:
  RankSets* sets_;
  std::vector<LabelledRows> pieces_;
  std::vector<LabelledRows> next_pieces_;
  std::vector<RowSet> rest_;
  std::vector<RowSet> next_rest_;
};

}  // namespace annulus
