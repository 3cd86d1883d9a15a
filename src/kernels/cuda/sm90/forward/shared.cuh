#pragma once

#include <climits>
#include <cstdint>

#include "kernels/cuda/launch.h"
#include "kernels/cuda/sm90/instructions.cuh"
#include "kernels/cuda/work/launch_traits.h"

// What the warps of the Hopper forward kernel exchange in shared memory, and how they find rows of
// lists. kernel.cuh describes the whole.
namespace annulus::cuda::sm90 {

inline constexpr int kTile = 128;
inline constexpr int kConsumers = 2;  // warp groups
inline constexpr int kConsumerWarps = 4 * kConsumers;
inline constexpr int kThreads = 128 * (kConsumers + 1);
inline constexpr int kTeam = 64;                 // threads that load together; barriers 1 and 2
inline constexpr int kTurnBarrier = 3;           // and 4; of the consumers
inline constexpr int kBlockBytes = kTile * 128;  // 64 columns of a tile
inline constexpr int kSlots = 5;  // items in progress: looked up, loaded, computed or written

// Whether a kernel hides any pairs.
template <Limits kLimits>
inline constexpr bool kHides = kLimits != Limits::none;

inline constexpr int kPieceColumns = 32;  // of a state: 128 bytes a row
inline constexpr int kPieceBytes = kTile * 128;

struct ForwardArguments {
  CUtensorMap q, k, v, state;
  ForwardParams params;
  LaunchTraits traits;
  float scale_log2 = 0;      // scale / log 2
  bool map_queries = false;  // the maps exist
  bool map_keys = false;
  bool map_state = false;
};

// Flags of a key tile.
inline constexpr int kLast = 1;     // of the item
inline constexpr int kMasked = 2;   // some pairs of the tile are hidden
inline constexpr int kCompare = 4;  // indices must be compared
inline constexpr int kTable = 8;    // the indices are not evenly spaced

// Facts about an item, for consumers.
struct Slot {
  std::byte* out;  // rows of its batch and head
  std::byte* state;
  std::byte* lse;
  std::int32_t end;           // there are no more items
  std::uint32_t later;        // ForwardParams::later; all ones or 0 if that is null
  std::int32_t has_state;     // some rows have a state, which consumers load
  std::int32_t pieces;        // otherwise the number of pieces in which it is loaded
  std::int32_t every_tile;    // a piece is loaded with every tile
  std::int32_t width;         // of the band: Limits::both
  float sink;                 // of its head, for rows that end here; -inf: none
  std::int32_t token[kTile];  // < 0: absent
  std::int32_t index[kTile];
  float old_lse[kTile];
  std::uint8_t repeats[kTile];   // the repeats that contain the row, as bits
  std::uint8_t key_repeats[16];  // periodic: by the key's place modulo 16
};

// Facts about a key tile, for consumers.
struct alignas(16) KeyStage {
  std::int32_t flags;
  std::int32_t rows;
  std::int32_t first;           // index of the first row minus the band's upper limit
  std::int32_t stride;          // of indices
  std::int32_t index[kTile];    // kTable: index minus that limit; INT_MAX: absent
  std::uint8_t repeats[kTile];  // general weights
};

// Keys of a partly masked tile with non-finite values. 0 * NaN is NaN, so such rows would reach
// queries that do not see them. Their rows are cleared, and queries that see them get NaN
// separately.
struct alignas(16) ValueStage {
  std::uint32_t any;
  std::uint32_t keys[4];
};

// Facts about an item for both teams, looked up while the previous item is loaded.
struct alignas(16) Plan {
  std::int32_t end;  // there are no more items
  std::uint32_t later;
  std::int32_t group, batch, head, kv_head, unit, begin, rows;
  std::int32_t least, most;  // indices of queries
  std::int32_t bulk;         // queries are loaded by bulk copies
  std::int32_t remainder, quotient, index_step;
  // Keys: all tiles are loaded by bulk copies, from at most two runs.
  std::int32_t plain;
  std::int32_t compare;
  std::int32_t band_least, band_most;
  std::int32_t tiles[2];     // visible ones of the second run and of the first; they are loaded in
                             // this order, the last tile of a run first
  std::int32_t run_rows[2];  // from the first of these tiles on; only the last run's may be ragged
  std::int32_t run_remainder[2], run_quotient[2], run_index[2], run_step[2];
  std::int32_t value_remainder[2], value_quotient[2];  // coordinates in parcels
  std::int32_t map_head, map_batch;                    // of keys and values
};

template <int kDim>
struct Layout {
  static constexpr int kKeyStages = kDim == 64 ? 3 : 2;
  static constexpr int kValueStages = kDim == 64 ? 5 : 3;
  static constexpr int kTileBytes = kTile * kDim * 2;
  static constexpr int kKeys = kTileBytes;  // queries are at 0
  static constexpr int kValues = kKeys + kKeyStages * kTileBytes;
  static constexpr int kState = kValues + kValueStages * kTileBytes;
  static constexpr int kControl = kState + (kDim == 128 ? kPieceBytes : 0);

  struct Control {
    std::uint64_t keys_full[kKeyStages];
    std::uint64_t keys_empty[kKeyStages];
    std::uint64_t values_full[kValueStages];
    std::uint64_t values_empty[kValueStages];
    std::uint64_t queries_full;
    std::uint64_t queries_empty;
    std::uint64_t values_landed;       // before the search for non-finite values
    std::uint64_t rows_known[kSlots];  // plan and slot are written
    std::uint64_t slots_free[kSlots];  // slots may be overwritten
    std::uint64_t state_full;          // a piece has arrived
    std::uint64_t state_empty;
    const std::byte* address[2][kTile];  // of rows to gather, per team
    float log2_weight[16];               // by the repeats that contain both rows
    Plan plans[kSlots];
    Slot slots[kSlots];
    KeyStage keys[kKeyStages];
    ValueStage values[kValueStages];
  };
  static constexpr int kBytes =
      kControl + static_cast<int>(sizeof(Control)) + 1024;  // for alignment
  static_assert(kBytes <= 232448, "a block has 227 KiB");
};

// ---- rows of lists ------------------------------------------------------------------------------

// Rows [row, row + rows) of a list.
struct Span {
  int run;      // of the first row
  bool single;  // of all rows
  int least;    // index
  int most;
};

// As run_of in rows/lists.cuh, through the read-only cache.
__device__ __forceinline__ int find_run(const Run* runs, const RowList& list, int row) {
  int low = list.begin;
  int high = list.begin + list.runs - 1;
  while (low < high) {
    const int middle = (low + high + 1) >> 1;
    if (__ldg(&runs[middle].before) <= row) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// Indices ascend within a run. rows > 0.
__device__ __forceinline__ Span look_up(const Run* runs, const RowList& list, int row, int rows) {
  Span span;
  int at = find_run(runs, list, row);
  span.run = at;
  const int end = row + rows;
  int begin = row;
  span.least = INT_MAX;
  span.most = INT_MIN;
  while (true) {
    const int before = __ldg(&runs[at].before);
    const int index = __ldg(&runs[at].index);
    const int stride = __ldg(&runs[at].index_stride);
    const int stop = min(end, before + __ldg(&runs[at].count));
    span.least = min(span.least, index + (begin - before) * stride);
    span.most = max(span.most, index + (stop - 1 - before) * stride);
    if (stop >= end || ++at >= list.begin + list.runs) break;
    begin = stop;
  }
  span.single = at == span.run;
  return span;
}

// A limit of a band; indices are below 2^30, and sums must not overflow.
__device__ __forceinline__ int limit_of(int limit) { return max(-(1 << 30), min(1 << 30, limit)); }

__device__ __forceinline__ const std::byte* row_address(const Channel& channel, const Run* runs,
                                                        int run, int row, int batch, int head,
                                                        int unit) {
  const std::int64_t at =
      __ldg(&runs[run].first) +
      static_cast<std::int64_t>(row - __ldg(&runs[run].before)) * __ldg(&runs[run].stride);
  const int source = __ldg(&runs[run].source);
  if (source < 0) {
    return channel.local.base + batch * channel.local.batch_step + head * channel.local.head_step +
           at * channel.local.row_step;
  }
  const Source& parcel = channel.sources[source];
  return parcel.base +
         ((batch * parcel.units + unit) * channel.bytes_all + channel.bytes_before) * parcel.rows +
         at * channel.row_bytes + channel.row_offset;
}

// Whether the rows of a run are covered by the maps of keys and values.
__device__ __forceinline__ bool keys_mapped(const ForwardArguments& a, const Run* run) {
  return a.map_keys && (__ldg(&run->source) >= 0) == a.traits.keys_received &&
         __ldg(&run->stride) == a.traits.key_stride;
}

// The row of keys or values in its map: the token in the shard, or the place in the grid of all
// parcels.
template <int kDim>
__device__ __forceinline__ std::uint32_t mapped_row(const ForwardArguments& a,
                                                    const Channel& channel, int run, int row,
                                                    int batch, int unit) {
  const Run* const runs = a.params.tables.runs;
  if (a.traits.keys_received) {
    return static_cast<std::uint32_t>(
        (row_address(channel, runs, run, row, batch, 0, unit) - a.traits.keys.base) / (kDim * 2));
  }
  return static_cast<std::uint32_t>(__ldg(&runs[run].first)) +
         static_cast<std::uint32_t>(row - __ldg(&runs[run].before)) *
             static_cast<std::uint32_t>(a.traits.key_stride);
}

__device__ __forceinline__ std::uint32_t repeats_with(const DeviceTables& tables,
                                                      const Group& group, int index) {
  std::uint32_t with = 0;
  for (int i = 0; i < group.repeats; ++i) {
    const Repeat* repeat = tables.repeats + group.first_repeat + i;
    if (index % __ldg(&repeat->stride) == __ldg(&repeat->phase)) with |= 1U << i;
  }
  return with;
}

// Barrier of the threads of a team.
__device__ __forceinline__ void team_sync(int team) {
  __syncwarp();
  named_sync(team, kTeam);
}

}  // namespace annulus::cuda::sm90
