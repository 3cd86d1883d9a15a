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

// p row sets of stride s that interleave become one of stride s / p, as long as that is possible
// anywhere.
void join_interleaved(std::vector<RowSet>& sets);

// Single rows at equal distances become one row set: causal demands on striped shards leave one row
// per segment.
void join_single_rows(std::vector<RowSet>& sets);

// Disjoint row sets, each with the ranks that need it. Adding rows splits what is there only where
// the ranks differ.
class RowPartition {
 public:
  explicit RowPartition(RankSets& sets) : sets_(&sets) {}

  void clear() { pieces_.clear(); }
  [[nodiscard]] const std::vector<LabelledRows>& pieces() const { return pieces_; }

  void add(const RowSet& rows, int needed_by);

  // Undoes splits that turned out to be needless: heads with different offsets that share a K/V
  // head often need, taken together, every row.
  void join();

 private:
  RankSets* sets_;
  std::vector<LabelledRows> pieces_;
  std::vector<LabelledRows> next_pieces_;
  std::vector<RowSet> rest_;
  std::vector<RowSet> next_rest_;
};

}  // namespace annulus
