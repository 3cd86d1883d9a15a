#pragma once

#include <cstdint>
#include <vector>

#include "kernels/cuda/work/tables.h"

// In which order items that own keys add to dQ, for kernels that do so while they walk the queries.
// Items that add to the same rows form a chain: each waits, block by block, until the one before it
// in the chain has added. Plain data, made and tested on the host.
namespace annulus::cuda {

// A row of dQ has a position: its index, or its place in the list where indices do not rise; rows
// of an item's next member come `span` later. An item takes its rows by rising position. Its
// progress is the position before which it has added everything, and so have all before it in the
// chain.
struct ItemTurn {
  std::int32_t after = -1;  // the item before it in the chain, of the tables; -1: none
  // Rows of a member below this position are not those of items before it: they need no waiting.
  std::int32_t alone = 0;
  std::int32_t finish = 0;  // 1: some of them have rows after its last, so they must end first
  std::int32_t span = 0;
};

// Counters of an item's progress: two warps add its rows of dQ, a half each.
inline constexpr int kBackwardTurns = 2;

// Who takes items one after the other, and how.
struct ChainOptions {
  int blocks = 1;       // of threads that do so at a time
  int step = 64;        // query rows in one step
  double distance = 4;  // steps by which neighbours of a chain should be apart, so that few wait
};

// Puts the items of each launch into chains, several of them side by side, and each item after the
// one that it waits for. Launches are split where an item would have to wait for several. Returns
// the turns of all items.
[[nodiscard]] std::vector<ItemTurn> put_in_chains(Tables& tables, const ChainOptions& options);

}  // namespace annulus::cuda
