#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "annulus/band.h"
#include "kernels/backend.h"
#include "kernels/work_groups.h"
#include "pattern/side.h"

// The compiled form of a stage on a CUDA device: plain tables that kernels read. Made once and
// tested on the host, without CUDA.
namespace annulus::cuda {

// Evenly spaced rows of a list: row i of the run is row `first + i * stride` of its source.
struct Run {
  std::int32_t source = -1;  // < 0: the shard; else a received parcel
  std::int32_t before = 0;   // rows of the list before this run
  std::int32_t count = 0;
  std::int32_t index = 0;  // of the first row; see row_index.h
  std::int32_t index_stride = 1;
  std::int32_t stride = 1;
  std::int64_t first = 0;
};

// Rows of one side of a group: runs [begin, begin + runs) of the table.
struct RowList {
  std::int32_t begin = 0;
  std::int32_t runs = 0;
  std::int32_t rows = 0;
  std::int32_t ascending = 1;  // indices rise from row to row over the whole list
  // Tiles of the list are ranges of indices, [64 t, 64 t + 64), which may have gaps. They are the
  // same on all ranks, as reproducible sums need.
  std::int32_t by_index = 0;
};

// Stand for no limit of a group's band: beyond any difference of two indices.
inline constexpr std::int32_t kNoLeast = std::numeric_limits<std::int32_t>::min();
inline constexpr std::int32_t kNoMost = std::numeric_limits<std::int32_t>::max();

// Query rows against key rows of one segment, for all heads that compute the same pairs. A pair
// counts once, and once more for each repeat that contains both of its rows.
struct Group {
  RowList queries;
  RowList keys;
  std::int32_t least = kNoLeast;  // of key index - query index: a Band in 32 bits, never empty
  std::int32_t most = kNoMost;
  std::int32_t first_repeat = 0;
  std::int32_t repeats = 0;
  std::int32_t branch = 0;
  std::int32_t dilation = 1;

  void set_band(const Band& band);
  [[nodiscard]] Band band() const {
    return {least == kNoLeast ? -Band::kUnlimited : least,
            most == kNoMost ? Band::kUnlimited : most};
  }
};

struct Member {
  std::int32_t head = 0;     // query head
  std::int32_t kv_head = 0;  // K/V head
  std::int32_t unit = 0;     // unit in parcels
};

// The work of one thread block: rows [begin, begin + rows) of one side of a group against all rows
// of the other side that the band allows. Forward and dQ: query rows of one member. dK and dV: key
// rows, for `members` members with one K/V head.
struct Item {
  std::int32_t group = 0;
  std::int32_t member = 0;  // the first
  std::int32_t members = 1;
  std::int32_t batch = 0;
  std::int32_t begin = 0;
  std::int32_t rows = 0;
};

// Items that may run in parallel: no two of them write the same row. They belong to one branch, or
// to several branches of one dilation that have no row in common (all offsets of a dilation).
struct Launch {
  std::int32_t branch = 0;  // the first, and the only one if branches have their own deltas
  std::int32_t first_item = 0;
  std::int32_t items = 0;
};

struct Tables {
  std::vector<Run> runs;
  std::vector<Group> groups;
  std::vector<Member> members;
  std::vector<Repeat> repeats;
  std::vector<Item> items;
  std::vector<std::uint32_t> earlier;  // for items that own key rows: see KeySums; or empty
  std::vector<std::uint32_t> later;    // for items that own query rows: see ForwardParams; or empty
  std::vector<Launch> launches;        // run one after the other
};

// `tile`: most rows of an item. Branches are ordered coarsest first, so that a branch that has
// every row is the last to write it. `canonical`: rows are listed by index, so that results do not
// depend on how rows are spread over ranks.
[[nodiscard]] Tables make_tables(const Stage& stage, const Computation& computation, Side side,
                                 int tile, bool canonical);

// Rows of the other side that running items may read and still find in the cache: 16 MB of K and V
// with 128 bf16 columns.
inline constexpr std::int64_t kCachedRows = 32768;
// Sorts the items of each launch, the longest first, so that multiprocessors end together. Sorts
// within stretches of heads that together read at most kCachedRows.
void put_longest_first(Tables& tables, Side side);
// Sorts the items of launches with narrow windows by position, so that blocks that run at the same
// time read nearby memory. Leaves launches as they are if the rows of the other side that all heads
// and offsets see from one position on, `tile` rows further, are more than 2 * kCachedRows.
void put_by_position(Tables& tables, int tile);

}  // namespace annulus::cuda
