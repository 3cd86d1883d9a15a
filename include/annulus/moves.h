#pragma once

#include <cstdint>
#include <vector>

#include "annulus/placement.h"
#include "annulus/row_set.h"

namespace annulus {

// Rows that go from one rank to another, or stay, when a sequence is placed anew. Rows are named by
// where they lie in a shard, and in the order in which they travel.
struct Move {
  int peer = 0;              // who gets them, or gives them
  std::vector<RowSet> rows;  // local tokens of this rank
  std::int64_t count = 0;    // of all rows

  bool operator==(const Move&) const = default;
};

// One rank's part. Every row that another rank is to hold leaves its old holder once, straight for
// the new one, and no other row is sent: fewer bytes are impossible.
struct Moves {
  std::vector<Move> sends;     // by peer, in ascending order; rows of the old shard
  std::vector<Move> receives;  // likewise; rows of the new shard
  // What stays: old_rows[i] becomes new_rows[i], which has as many.
  std::vector<RowSet> old_rows;
  std::vector<RowSet> new_rows;
};

// What `rank` sends, receives and keeps so that tokens placed by `from` are placed by `to`. They
// have the same tokens, ConfigError otherwise. Ranks are the same processes in both; one of them
// may have more: these join or leave. A pure function: ranks need not talk to agree on the rows of
// a message.
[[nodiscard]] Moves moves(const Placement& from, const Placement& to, int rank);

}  // namespace annulus
