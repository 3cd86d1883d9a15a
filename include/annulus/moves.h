#pragma once

#include <cstdint>
#include <vector>

#include "annulus/placement.h"
#include "annulus/row_set.h"

namespace annulus {

// Rows that move from one rank to another, or stay, when the placement of a sequence changes. Rows
// are identified by their local tokens, in the order in which they travel.
struct Move {
  int peer = 0;              // the receiver or sender
  std::vector<RowSet> rows;  // local tokens of this rank
  std::int64_t count = 0;    // total number of rows

  bool operator==(const Move&) const = default;
};

// One rank's part. Every row that another rank will hold is sent once, directly from its old holder
// to the new one. No other row is sent, so the number of bytes is minimal.
struct Moves {
  std::vector<Move> sends;     // by peer, in ascending order; rows of the old shard
  std::vector<Move> receives;  // likewise; rows of the new shard
  // Rows that stay: old_rows[i] becomes new_rows[i], which has the same count.
  std::vector<RowSet> old_rows;
  std::vector<RowSet> new_rows;
};

// What `rank` sends, receives and keeps when tokens move from placement `from` to placement `to`.
// ConfigError unless both have the same number of tokens. Ranks are the same processes in both; if
// one placement has more, these ranks join or leave. A pure function: ranks agree on the rows of
// every message without communication.
[[nodiscard]] Moves moves(const Placement& from, const Placement& to, int rank);

}  // namespace annulus
