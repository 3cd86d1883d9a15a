#include "annulus/moves.h"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <span>
#include <string>
#include <utility>

#include "annulus/error.h"

namespace annulus {
namespace {

// A range of a rank's tokens and the local index of its first token.
struct Piece {
  RowSet rows;
  std::int64_t local = 0;
};

// The ranges of one rank in ascending order, so that bisection finds those that may intersect a
// range. `reach[i]` is the last position of ranges 0 to i.
struct Shard {
  std::vector<Piece> pieces;
  std::vector<std::int64_t> reach;
};

Shard shard_of(const Placement& placement, int rank) {
  Shard shard;
  if (rank >= placement.ranks()) return shard;
  std::int64_t local = 0;
  for (const RowSet& rows : placement.ranges(rank)) {
    shard.pieces.push_back({rows, local});
    local += rows.count;
  }
  std::sort(shard.pieces.begin(), shard.pieces.end(),
            [](const Piece& a, const Piece& b) { return a.rows.first < b.rows.first; });
  std::int64_t reach = std::numeric_limits<std::int64_t>::min();
  for (const Piece& piece : shard.pieces) {
    reach = std::max(reach, piece.rows.last());
    shard.reach.push_back(reach);
  }
  return shard;
}

RowSet local_rows(const Piece& piece, const RowSet& rows) {
  const std::int64_t stride = rows.count > 1 ? rows.stride / piece.rows.stride : 1;
  return {piece.local + (rows.first - piece.rows.first) / piece.rows.stride, rows.count, stride};
}

// Appends rows; extends the last run if they continue it with the same stride.
void append(std::vector<RowSet>& all, const RowSet& rows) {
  if (!all.empty()) {
    RowSet& last = all.back();
    const std::int64_t step = rows.first - last.last();
    const bool even = (last.count == 1 || step == last.stride) &&
                      (rows.count == 1 || step == rows.stride) && step > 0;
    if (even) {
      last.stride = step;
      last.count += rows.count;
      return;
    }
  }
  all.push_back(rows);
}

// The rows that two shards have in common: their locations in one and in the other, in an order
// that depends on the two shards only.
std::int64_t meet(const Shard& from, const Shard& to, std::vector<RowSet>& old_rows,
                  std::vector<RowSet>& new_rows, bool together) {
  std::int64_t count = 0;
  for (const Piece& piece : from.pieces) {
    const auto begin = std::lower_bound(to.reach.begin(), to.reach.end(), piece.rows.first);
    for (auto i = static_cast<std::size_t>(begin - to.reach.begin());
         i < to.pieces.size() && to.pieces[i].rows.first <= piece.rows.last(); ++i) {
      const RowSet common = intersect(piece.rows, to.pieces[i].rows);
      if (common.count == 0) continue;
      count += common.count;
      const RowSet old_local = local_rows(piece, common);
      const RowSet new_local = local_rows(to.pieces[i], common);
      if (together) {  // entry by entry: both sides merge or neither does
        old_rows.push_back(old_local);
        new_rows.push_back(new_local);
      } else {
        append(old_rows, old_local);
        append(new_rows, new_local);
      }
    }
  }
  return count;
}

}  // namespace

Moves moves(const Placement& from, const Placement& to, int rank) {
  const int ranks = std::max(from.ranks(), to.ranks());
  if (from.tokens() != to.tokens()) {
    throw ConfigError("moves: from has " + std::to_string(from.tokens()) + " tokens and to has " +
                      std::to_string(to.tokens()) + ", expected the same");
  }
  if (rank < 0 || rank >= ranks) {
    throw ConfigError("moves: rank is " + std::to_string(rank) + ", expected 0.." +
                      std::to_string(ranks - 1));
  }
  Moves result;
  const Shard mine_before = shard_of(from, rank);
  const Shard mine_after = shard_of(to, rank);
  (void)meet(mine_before, mine_after, result.old_rows, result.new_rows, true);
  for (int peer = 0; peer < ranks; ++peer) {
    if (peer == rank) continue;
    std::vector<RowSet> theirs;
    if (!mine_before.pieces.empty()) {
      Move send{.peer = peer, .rows = {}, .count = 0};
      send.count = meet(mine_before, shard_of(to, peer), send.rows, theirs, false);
      if (send.count > 0) result.sends.push_back(std::move(send));
    }
    theirs.clear();
    if (!mine_after.pieces.empty()) {
      Move receive{.peer = peer, .rows = {}, .count = 0};
      receive.count = meet(shard_of(from, peer), mine_after, theirs, receive.rows, false);
      if (receive.count > 0) result.receives.push_back(std::move(receive));
    }
  }
  return result;
}

}  // namespace annulus
