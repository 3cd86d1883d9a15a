#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "annulus/band.h"
#include "kernels/backend.h"
#include "kernels/work_groups.h"
#include "pattern/side.h"

// What a stage becomes on a CUDA device: plain tables that kernels walk, made once. No CUDA here:
// they are made and tested on the host.
namespace annulus::cuda {

// Evenly spaced rows of a list: row i of the run is row `first + i * stride` of its source.
struct Run {
  std::int32_t source = -1;  // < 0: the shard; else a received parcel
  std::int32_t before = 0;   // rows of the list before this run
  std::int32_t count = 0;
  std::int32_t index = 0;  // of the first row within its segment's progression: masks go by it
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
  // Tiles of the list are cut by index, [64 t, 64 t + 64), and may have gaps: where sums must not
  // depend on how many rows a rank was sent, tiles are the same everywhere.
  std::int32_t by_index = 0;
};

// Limits of a group's band that no difference of two indices is beyond.
inline constexpr std::int32_t kNoLeast = std::numeric_limits<std::int32_t>::min();
inline constexpr std::int32_t kNoMost = std::numeric_limits<std::int32_t>::max();

// Query rows against key rows of one segment, for heads that do the same. A pair counts once, and
// once more for each of the repeats that has both of its rows.
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
  std::int32_t head = 0;     // of queries
  std::int32_t kv_head = 0;  // of keys
  std::int32_t unit = 0;     // of parcels
};

// What one block of threads computes: rows [begin, begin + rows) of one side of a group against all
// rows of the other side that the mask allows. Forward and dQ: query rows of one member. dK and dV:
// key rows, for `members` members with one K/V head.
struct Item {
  std::int32_t group = 0;
  std::int32_t member = 0;  // the first
  std::int32_t members = 1;
  std::int32_t batch = 0;
  std::int32_t begin = 0;
  std::int32_t rows = 0;
};

// Items that may run side by side: no two of them write the same row.
struct Launch {
  std::int32_t branch = 0;
  std::int32_t first_item = 0;
  std::int32_t items = 0;
};

struct Tables {
  std::vector<Run> runs;
  std::vector<Group> groups;
  std::vector<Member> members;
  std::vector<Repeat> repeats;
  std::vector<Item> items;
  std::vector<std::uint32_t> earlier;  // of items that own key rows: see KeySums; or empty
  std::vector<std::uint32_t> later;    // of items that own query rows: see ForwardParams; or empty
  std::vector<Launch> launches;        // one after the other
};

// `tile`: most rows of an item. Branches come coarsest first, so that a branch that has every row
// is the last to write it. Where the stage's results must not depend on how rows are spread over
// ranks, `canonical`, rows are listed by index.
[[nodiscard]] Tables make_tables(const Stage& stage, const Computation& computation, Side side,
                                 int tile, bool canonical);

// Rows of the other side that items under way may walk past and still find in the cache: K and V of
// 128 bf16 columns are 16 MB then.
inline constexpr std::int64_t kCachedRows = 32768;
// Items of each launch: the longest first, so that multiprocessors that take one after the other
// end together; but first those of as many heads as have kCachedRows, then those of the next.
void put_longest_first(Tables& tables, Side side);

}  // namespace annulus::cuda
