#pragma once

#include <cfloat>
#include <climits>
#include <cstdint>

#include "kernels/cuda/launch.h"
#include "kernels/cuda/rows/lists.cuh"

// Finds the rows of a list, for all kernels that take any layout.
namespace annulus::cuda {

inline constexpr int kAbsent = INT_MAX;  // index of an absent row

struct PlacedRow {
  std::int32_t source;
  std::int32_t index;
  std::int64_t row;
};

__device__ inline PlacedRow place_row(const Run* runs, const RowList& list, int row) {
  const Run run = runs[run_of(runs, list, row)];
  const int i = row - run.before;
  return {run.source, run.index + i * run.index_stride,
          run.first + static_cast<std::int64_t>(i) * run.stride};
}

// The last run of an ascending list whose first index is at most this one; the first run if there
// is none.
__device__ inline int run_with_index(const Run* runs, const RowList& list, int index) {
  int low = list.begin;
  int high = list.begin + list.runs - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (runs[middle].index <= index) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// The row with this index, if the ascending list contains it.
__device__ inline bool find_index(const Run* runs, const RowList& list, int index, PlacedRow& row) {
  const Run run = runs[run_with_index(runs, list, index)];
  const int i = (index - run.index) / run.index_stride;
  if (index < run.index || i >= run.count || (index - run.index) % run.index_stride != 0)
    return false;
  row = {run.source, index, run.first + static_cast<std::int64_t>(i) * run.stride};
  return true;
}

// The extent of a list in the unit of its tiles: number of rows, or last index + 1.
__device__ inline int tile_extent(const Run* runs, const RowList& list) {
  if (list.by_index == 0 || list.rows == 0) return list.rows;
  return place_row(runs, list, list.rows - 1).index + 1;
}

__device__ inline std::byte* address(const Channel& channel, const PlacedRow& row,
                                     const RowOwner& owner) {
  if (row.source < 0) {
    const TensorRows& local = channel.local;
    return local.base + owner.batch * local.batch_step + owner.head * local.head_step +
           row.row * local.row_step;
  }
  const Source source = channel.sources[row.source];
  const std::int64_t unit = owner.batch * source.units + owner.unit;
  return source.base + (unit * channel.bytes_all + channel.bytes_before) * source.rows +
         row.row * channel.row_bytes + channel.row_offset;
}

// Bit i: repeat i contains the row.
__device__ inline unsigned repeats_with(const Repeat* repeats, int count, int index) {
  unsigned mask = 0;
  for (int i = 0; i < count; ++i) {
    if (index % repeats[i].stride == repeats[i].phase) mask |= 1U << i;
  }
  return mask;
}

// log2 of the number of times that a pair counts.
__device__ inline float log2_weight(unsigned query_repeats, unsigned key_repeats) {
  switch (__popc(query_repeats & key_repeats)) {
    case 0:
      return 0.0F;
    case 1:
      return 1.0F;
    case 2:
      return 1.5849625F;
    case 3:
      return 2.0F;
    default:
      return 2.3219281F;
  }
}

// Indices are not negative, so their differences fit. A difference from the lower limit wraps if it
// is below it.
__device__ inline bool hidden_pair(const Group& group, int query, int key) {
  const auto below = static_cast<unsigned>(group.least);
  return query == kAbsent || key == kAbsent ||
         static_cast<unsigned>(key) - static_cast<unsigned>(query) - below >
             static_cast<unsigned>(group.most) - below;
}
__device__ inline bool limited(const Group& group) {
  return group.least != kNoLeast || group.most != kNoMost;
}
// The first and the last index that a query sees.
__device__ inline int first_key_of(const Group& group, int query) {
  return static_cast<int>(max(0LL, static_cast<long long>(query) + group.least));
}
__device__ inline int last_key_of(const Group& group, int query) {
  return static_cast<int>(
      max(-1LL, min(kAbsent - 1LL, static_cast<long long>(query) + group.most)));
}

// The part of the extent of an ascending list with indices of at most `last`.
__device__ inline int extent_up_to(const Run* runs, const RowList& list, int last) {
  if (list.rows == 0) return 0;
  if (list.by_index != 0) return max(0, min(tile_extent(runs, list), last + 1));
  const Run run = runs[run_with_index(runs, list, last)];
  if (last < run.index) return 0;
  return run.before + min(run.count, (last - run.index) / run.index_stride + 1);
}

// The tiles of a list that an item iterates over.
struct Walk {
  int first;   // tile
  int end;     // tile
  int extent;  // end of the needed rows, in the unit of extent_of
};
// The tiles with indices from `first` to `last`: all tiles if the list is not ascending.
template <int kRowsOfTile>
__device__ inline Walk walk_between(const Run* runs, const RowList& list, bool ordered,
                                    long long first, long long last) {
  Walk walk{0, 0, tile_extent(runs, list)};
  if (ordered) {
    const auto index = [](long long x) {
      return static_cast<int>(max(-1LL, min(kAbsent - 1LL, x)));
    };
    walk.first = extent_up_to(runs, list, index(first - 1)) / kRowsOfTile;
    walk.extent = extent_up_to(runs, list, index(last));
  }
  walk.end = max(walk.first, (walk.extent + kRowsOfTile - 1) / kRowsOfTile);
  return walk;
}
__device__ inline bool ordered(const Group& group) {
  return group.queries.ascending != 0 && group.keys.ascending != 0;
}
// The keys that any query of the item sees.
template <int kRowsOfTile>
__device__ inline Walk walk_keys(const Run* runs, const Group& group, const Item& item) {
  const bool known = limited(group) && ordered(group);
  long long first = 0;
  long long last = 0;
  if (known) {
    first = place_row(runs, group.queries, item.begin).index + static_cast<long long>(group.least);
    last = place_row(runs, group.queries, item.begin + item.rows - 1).index +
           static_cast<long long>(group.most);
  }
  return walk_between<kRowsOfTile>(runs, group.keys, known, first, last);
}
// The queries that see any key of the item.
template <int kRowsOfTile>
__device__ inline Walk walk_queries(const Run* runs, const Group& group, const Item& item) {
  const bool known = limited(group) && ordered(group);
  long long first = 0;
  long long last = 0;
  if (known) {
    first = place_row(runs, group.keys, item.begin).index - static_cast<long long>(group.most);
    last = place_row(runs, group.keys, item.begin + item.rows - 1).index -
           static_cast<long long>(group.least);
  }
  return walk_between<kRowsOfTile>(runs, group.queries, known, first, last);
}

// Whether a pair with a query from `first_query` to `last_query` may be hidden. Rows are in order,
// absent ones last.
__device__ inline bool may_hide(const Group& group, int first_query, int last_query, int first_key,
                                int last_key) {
  return last_key > last_key_of(group, first_query) || first_key < first_key_of(group, last_query);
}

// Rows of a tile in shared memory: their addresses by channel, and their indices and repeats.
template <int kRows, int kChannels>
struct TileRows {
  std::byte* at[kChannels][kRows];  // null: absent
  int index[kRows];                 // kAbsent: absent
  unsigned char repeats[kRows];

  // Finds the rows of the list from `first` on that exist and are below `end` (in the unit of
  // extent_of). Called by the threads of a block, one row each; the caller synchronises.
  template <typename... Channels>
  __device__ void fill(const DeviceTables& tables, const Group& group, const RowList& list,
                       int first, int end, const RowOwner& owner, const Channels&... channels) {
    fill(tables, group, list, list.by_index != 0, first, end, owner, channels...);
  }
  // Finds rows [first, end) of the list, for any kind of tiles.
  template <typename... Channels>
  __device__ void fill_rows(const DeviceTables& tables, const Group& group, const RowList& list,
                            int first, int end, const RowOwner& owner,
                            const Channels&... channels) {
    fill(tables, group, list, false, first, end, owner, channels...);
  }

 private:
  template <typename... Channels>
  __device__ void fill(const DeviceTables& tables, const Group& group, const RowList& list,
                       bool by_index, int first, int end, const RowOwner& owner,
                       const Channels&... channels) {
    static_assert(sizeof...(channels) == kChannels);
    for (int r = static_cast<int>(threadIdx.x); r < kRows; r += static_cast<int>(blockDim.x)) {
      int c = 0;
      PlacedRow row;
      bool present = first + r < end;
      if (present && by_index) {
        present = find_index(tables.runs, list, first + r, row);
      } else if (present) {
        row = place_row(tables.runs, list, first + r);
      }
      if (!present) {
        ((at[c++][r] = nullptr, static_cast<void>(channels)), ...);
        index[r] = kAbsent;
        repeats[r] = 0;
        continue;
      }
      ((at[c++][r] = address(channels, row, owner)), ...);
      index[r] = row.index;
      repeats[r] = static_cast<unsigned char>(
          repeats_with(tables.repeats + group.first_repeat, group.repeats, row.index));
    }
  }
};

inline constexpr float kLog2E = 1.44269504088896340736F;
inline constexpr float kLn2 = 0.69314718055994530942F;

// 2^x, within two units of the last place.
__device__ inline float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace annulus::cuda
