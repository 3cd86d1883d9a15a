#pragma once

#include <cstdint>
#include <vector>

#include "kernels/cuda/work/tables.h"

// The order in which items that own keys add to dQ, for kernels that do so while they iterate over
// the queries. Items that add to the same rows form a chain: each waits, block by block, until the
// previous item of the chain has added. Plain data, made and tested on the host.
namespace annulus::cuda {

// The position of a row of dQ is its index, or its place in the list if indices do not ascend; the
// rows of an item's next member are `span` further. An item processes its rows by ascending
// position. Its progress is the position before which it, and all items before it in the chain,
// have added everything.
struct ItemTurn {
  std::int32_t after = -1;  // the previous item in the chain, as an index into the tables; -1: none
  // No earlier item of the chain has rows of a member below this position, so they need no waiting.
  std::int32_t alone = 0;
  std::int32_t finish =
      0;  // 1: some earlier items have rows after its last, so they must end first
  std::int32_t span = 0;
};

// Progress counters per item: two warps add its rows of dQ, a half each.
inline constexpr int kBackwardTurns = 2;

// The blocks that take items one after the other.
struct ChainOptions {
  int blocks = 1;       // number that run at a time
  int step = 64;        // query rows in one step
  double distance = 4;  // wanted distance of neighbours in a chain, in steps, so that few wait
};

// Orders the items of each launch into chains, of which several run in parallel; each item comes
// after the one that it waits for. Splits a launch if an item would have to wait for several.
// Returns the turns of all items.
[[nodiscard]] std::vector<ItemTurn> put_in_chains(Tables& tables, const ChainOptions& options);

}  // namespace annulus::cuda
