#pragma once

#include <climits>
#include <cstdint>

#include "kernels/cuda/launch.h"
#include "kernels/cuda/launch_traits.h"
#include "kernels/cuda/sm90_instructions.h"

// How rows of items and tiles come into shared memory for the forward kernel on Hopper; the whole
// is described in forward_sm90_kernel.cuh.
namespace annulus::cuda::sm90 {

inline constexpr int kTile = 128;
inline constexpr int kConsumers = 2;  // warp groups
inline constexpr int kConsumerWarps = 4 * kConsumers;
inline constexpr int kThreads = 128 * (kConsumers + 1);
inline constexpr int kTeam = 64;                 // threads that load together
inline constexpr int kBlockBytes = kTile * 128;  // 64 columns of a tile
inline constexpr int kSlots = 5;  // items whose rows are known: one is looked up ahead of the one
                                  // that is announced, the last one's are still written when the
                                  // next but one is announced, and values may lag by one

struct ForwardArguments {
  CUtensorMap q, k, v;
  ForwardParams params;
  LaunchTraits traits;
  float scale_log2 = 0;  // scale / log 2
  float inverse_scale = 0;
  bool map_queries = false;  // the maps are there
  bool map_keys = false;
};

// Flags of a key tile.
inline constexpr int kLast = 1;     // of the item
inline constexpr int kMasked = 2;   // not every query sees every one of its 128 keys
inline constexpr int kCompare = 4;  // by index
inline constexpr int kTable = 8;    // and indices are not evenly spaced

// What consumers know of an item.
struct Slot {
  std::byte* out;  // rows of its batch and head
  const std::byte* state;
  std::byte* lse;
  std::int32_t end;           // there are no more items
  std::int32_t token[kTile];  // < 0: no such row
  std::int32_t index[kTile];
  float old_lse[kTile];
  std::uint8_t repeats[kTile];   // that contain the row: a bit each
  std::uint8_t key_repeats[16];  // periodic: by the key's place modulo 16
};

// What consumers know of a key tile.
struct alignas(16) KeyStage {
  std::int32_t flags;
  std::int32_t rows;
  std::int32_t first;           // index of the first row less the mask's shift
  std::int32_t stride;          // of indices
  std::int32_t index[kTile];    // kTable: less the shift; INT_MAX: no such row
  std::uint8_t repeats[kTile];  // general weights
};

// Keys of a partly masked tile with values that are not finite. 0 * NaN is NaN: queries that do not
// see them must not get them, so their rows are zeroed and those who see them get a NaN.
struct alignas(16) ValueStage {
  std::uint32_t any;
  std::uint32_t keys[4];
};

// What both teams know of an item, looked up while the one before is loaded.
struct alignas(16) Plan {
  std::int32_t end;  // there are no more items
  std::int32_t group, batch, head, kv_head, unit, begin, rows;
  std::int32_t least, most;  // indices of queries
  std::int32_t bulk;         // queries come by bulk copies
  std::int32_t remainder, quotient;
  // Keys: all tiles come by bulk copies, from at most two runs.
  std::int32_t plain;
  std::int32_t compare;
  std::int32_t shift;
  std::int32_t tiles[2];  // visible ones of the second run and of the first; they are loaded in
                          // this order, the last tile of a run first
  std::int32_t run_remainder[2], run_quotient[2], run_index[2], run_step[2];
};

template <int kDim>
struct Layout {
  static constexpr int kKeyStages = kDim == 64 ? 3 : 2;
  static constexpr int kValueStages = kDim == 64 ? 5 : 3;
  static constexpr int kTileBytes = kTile * kDim * 2;
  static constexpr int kKeys = kTileBytes;  // queries are at 0
  static constexpr int kValues = kKeys + kKeyStages * kTileBytes;
  static constexpr int kControl = kValues + kValueStages * kTileBytes;

  struct Control {
    std::uint64_t keys_full[kKeyStages];
    std::uint64_t keys_empty[kKeyStages];
    std::uint64_t values_full[kValueStages];
    std::uint64_t values_empty[kValueStages];
    std::uint64_t queries_full;
    std::uint64_t queries_empty;
    std::uint64_t values_landed;         // to be looked through first
    std::uint64_t rows_known[kSlots];    // plan and slot are there
    const std::byte* address[2][kTile];  // of rows to gather, by team
    float log2_weight[16];               // by the repeats that contain both rows
    Plan plans[kSlots];
    Slot slots[kSlots];
    KeyStage keys[kKeyStages];
    ValueStage values[kValueStages];
  };
  static constexpr int kBytes = kControl + static_cast<int>(sizeof(Control)) + 1024;  // to align
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

// As run_of in row_lists.h, by way of the read-only cache.
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

// Of the mask; indices are below 2^30, and sums must not overflow.
__device__ __forceinline__ int shift_of(const Group& group) {
  return max(-(1 << 30), min(1 << 30, group.shift));
}

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

__device__ __forceinline__ std::uint32_t repeats_with(const DeviceTables& tables,
                                                      const Group& group, int index) {
  std::uint32_t with = 0;
  for (int i = 0; i < group.repeats; ++i) {
    const Repeat* repeat = tables.repeats + group.first_repeat + i;
    if (index % __ldg(&repeat->stride) == __ldg(&repeat->phase)) with |= 1U << i;
  }
  return with;
}

// The threads of a team meet.
__device__ __forceinline__ void team_sync(int team) {
  __syncwarp();
  named_sync(team, kTeam);
}

// ---- loading ------------------------------------------------------------------------------------

// The rows of an item's operand, as a team's threads see them.
struct Operand {
  const CUtensorMap* map;
  bool mapped;
  std::int32_t stride;  // that the map is made for
  std::uint64_t policy;
  int batch, head, unit;
};

// Whether `rows` rows from `row` on can come by bulk copies.
__device__ __forceinline__ bool bulk(const Operand& operand, const Run* runs, const Span& span,
                                     int rows) {
  return operand.mapped && rows == kTile && span.single && __ldg(&runs[span.run].source) < 0 &&
         __ldg(&runs[span.run].stride) == operand.stride;
}

// By one thread; the barrier expects the bytes.
template <int kDim>
__device__ __forceinline__ void load_bulk(std::uint32_t target, std::uint32_t barrier,
                                          const Operand& operand, const Run* runs, int run,
                                          int row) {
  const auto token = static_cast<std::uint32_t>(
      __ldg(&runs[run].first) +
      static_cast<std::int64_t>(row - __ldg(&runs[run].before)) * __ldg(&runs[run].stride));
  const std::uint32_t quotient = token / static_cast<std::uint32_t>(operand.stride);
  const std::uint32_t remainder = token - quotient * static_cast<std::uint32_t>(operand.stride);
#pragma unroll
  for (int block = 0; block < kDim / 64; ++block) {
    load_box(target + block * kBlockBytes, operand.map, barrier, block * 64, operand.head,
             static_cast<int>(remainder), static_cast<int>(quotient), operand.batch,
             operand.policy);
  }
}

// By a team; afterwards all rows are there, those from `rows` on being zero, and products may read
// them once the team has met.
template <int kDim>
__device__ __forceinline__ void gather(std::uint32_t target, const std::byte** address,
                                       const Channel& channel, const Operand& operand,
                                       const Run* runs, const RowList& list, int row, int rows,
                                       int thread, int team) {
  for (int i = thread; i < kTile; i += kTeam) {
    address[i] = i < rows ? row_address(channel, runs, find_run(runs, list, row + i), row + i,
                                        operand.batch, operand.head, operand.unit)
                          : nullptr;
  }
  team_sync(team);
  constexpr int kChunks = kDim / 8;  // of 16 bytes
  const int chunk = thread % kChunks;
  const std::uint32_t block = target + (chunk / 8) * kBlockBytes;
#pragma unroll 4
  for (int i = thread / kChunks; i < kTile; i += kTeam / kChunks) {
    const std::byte* from = address[i];
    const bool present = from != nullptr;
    copy16(block + swizzled(i, chunk % 8), present ? from + chunk * 16 : channel.local.base,
           present);
  }
  copy16_wait();
  fence_shared_for_async();
}

// Whether 8 numbers have one that is not finite: its exponent is all ones, so that adding one to it
// carries into the sign's place.
template <typename T>
__device__ __forceinline__ bool not_finite(std::uint32_t address) {
  constexpr bool kBf16 = std::is_same_v<T, __nv_bfloat16>;
  constexpr std::uint32_t kExponents = kBf16 ? 0x7F807F80U : 0x7C007C00U;
  constexpr std::uint32_t kOne = kBf16 ? 0x00800080U : 0x04000400U;
  std::uint32_t x, y, z, w;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x), "=r"(y), "=r"(z), "=r"(w)
               : "r"(address));
  const std::uint32_t carries = ((x & kExponents) + kOne) | ((y & kExponents) + kOne) |
                                ((z & kExponents) + kOne) | ((w & kExponents) + kOne);
  return (carries & 0x80008000U) != 0;
}

// By a team that has met: finds the rows of a tile in shared memory that are not all finite, zeroes
// them and says so in `stage`.
template <typename T, int kDim>
__device__ __forceinline__ void confine(std::uint32_t tile, ValueStage& stage, int thread,
                                        int team) {
  constexpr int kChunks = kDim / 8;
  const int chunk = thread % kChunks;
  const std::uint32_t block = tile + (chunk / 8) * kBlockBytes;
  if (thread < 4) stage.keys[thread] = 0;
  bool found = false;
#pragma unroll 4
  for (int i = thread / kChunks; i < kTile; i += kTeam / kChunks)
    found |= not_finite<T>(block + swizzled(i, chunk % 8));
  team_sync(team);
  if (found) {
    stage.any = 1;
    for (int i = thread / kChunks; i < kTile; i += kTeam / kChunks) {
      if (not_finite<T>(block + swizzled(i, chunk % 8)))
        atomicOr(&stage.keys[i / 32], 1U << (i % 32));
    }
  }
  team_sync(team);
  if (stage.any != 0) {
    for (int i = thread / kChunks; i < kTile; i += kTeam / kChunks) {
      if ((stage.keys[i / 32] >> (i % 32) & 1U) == 0) continue;
      asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(block + swizzled(i, chunk % 8)),
                   "r"(0U)
                   : "memory");
    }
    fence_shared_for_async();
  }
}

// The key tiles that an item's queries see something of, last first: a place in the list for all of
// a team's threads. Teams must agree on every tile.
template <bool kCausal>
struct KeyTiles {
  const Run* runs;
  RowList keys;
  int limit;  // queries see indices up to it
  Span span;  // of the tile that was found last

  __device__ __forceinline__ int rows(int tile) const {
    return min(kTile, keys.rows - tile * kTile);
  }
  // The first visible one from `tile` on downwards; < 0: none.
  __device__ __forceinline__ int visible(int tile) {
    while (tile >= 0) {
      span = look_up(runs, keys, tile * kTile, rows(tile));
      if (!kCausal || span.least <= limit) break;
      // None of this run from here on: to its last visible row, or to the run before.
      const int index = __ldg(&runs[span.run].index);
      const int seen =
          limit < index ? 0 : (limit - index) / __ldg(&runs[span.run].index_stride) + 1;
      tile = min(tile - 1, (__ldg(&runs[span.run].before) + seen - 1) >> 7);
    }
    return tile;
  }
  // There is always one, so that every item goes the same way; queries may see nothing of it.
  __device__ __forceinline__ int first() {
    const int last = max(0, (keys.rows - 1) / kTile);
    const int tile = visible(last);
    if (tile >= 0) return tile;
    span = look_up(runs, keys, 0, rows(0));
    return 0;
  }
};

template <bool kCausal>
__device__ __forceinline__ KeyTiles<kCausal> key_tiles(const Run* runs, const Group& group,
                                                       int most_query) {
  const bool causal = kCausal && group.causal != 0;
  return {runs, group.keys, causal ? most_query + shift_of(group) : INT_MAX, {}};
}

// ---- looking up items ---------------------------------------------------------------------------

// By one thread: the first item with rows from `at` on. Returns where to go on.
template <bool kCausal, PairWeights kWeights>
__device__ __forceinline__ int look_up_item(const ForwardArguments& a, int at, Plan& plan) {
  const ForwardParams& p = a.params;
  const DeviceTables& tables = p.tables;
  const Item* item = nullptr;
  int rows = 0;
  for (; at < p.items && rows == 0; at += gridDim.x) {
    item = tables.items + p.first_item + at;
    rows = __ldg(&item->rows);
  }
  plan.end = rows == 0 ? 1 : 0;
  if (rows == 0) return at;
  const int begin = __ldg(&item->begin);
  const int group_at = __ldg(&item->group);
  const Member* member = tables.members + __ldg(&item->member);
  const Group* group = tables.groups + group_at;
  plan.group = group_at;
  plan.batch = __ldg(&item->batch);
  plan.head = __ldg(&member->head);
  plan.kv_head = __ldg(&member->kv_head);
  plan.unit = __ldg(&member->unit);
  plan.begin = begin;
  plan.rows = rows;
  const Run* runs = tables.runs;
  const Span span = look_up(runs, group->queries, begin, rows);
  plan.least = span.least;
  plan.most = span.most;
  const auto stride = static_cast<std::uint32_t>(a.traits.query_stride);
  plan.bulk = 0;
  if (a.map_queries && rows == kTile && span.single && __ldg(&runs[span.run].source) < 0 &&
      __ldg(&runs[span.run].stride) == a.traits.query_stride) {
    const std::uint32_t token =
        static_cast<std::uint32_t>(__ldg(&runs[span.run].first)) +
        static_cast<std::uint32_t>(begin - __ldg(&runs[span.run].before)) * stride;
    plan.bulk = 1;
    plan.quotient = static_cast<std::int32_t>(token / stride);
    plan.remainder = static_cast<std::int32_t>(token % stride);
  }

  const int shift = kCausal ? shift_of(*group) : 0;
  const bool compare = kCausal && group->causal != 0;
  plan.shift = shift;
  plan.compare = compare ? 1 : 0;
  const int key_runs = group->keys.runs;
  bool plain = kWeights != PairWeights::general && a.map_keys && group->keys.rows > 0 &&
               key_runs <= 2 && (key_runs == 1 || group->keys.ascending != 0);
  if (plain) {
    const auto key_stride = static_cast<std::uint32_t>(a.traits.key_stride);
    int sum = 0;
#pragma unroll
    for (int j = 0; j < 2; ++j) {  // the last run first
      const int from = 1 - j;
      plan.tiles[j] = 0;
      if (from >= key_runs) continue;
      const Run* run = runs + group->keys.begin + from;
      const int count = __ldg(&run->count);
      const int index = __ldg(&run->index);
      const int step = __ldg(&run->index_stride);
      const auto first = static_cast<std::uint32_t>(__ldg(&run->first));
      plain = plain && count % kTile == 0 && __ldg(&run->source) < 0 &&
              __ldg(&run->stride) == a.traits.key_stride;
      int tiles = count / kTile;
      if (compare) {
        const int limit = span.most + shift;
        tiles = limit < index ? 0 : min(tiles, (limit - index) / step / kTile + 1);
      }
      plan.tiles[j] = tiles;
      sum += tiles;
      plan.run_quotient[j] = static_cast<std::int32_t>(first / key_stride);
      plan.run_remainder[j] = static_cast<std::int32_t>(first % key_stride);
      plan.run_index[j] = index;
      plan.run_step[j] = step;
    }
    if (sum == 0) plan.tiles[1] = 1;  // as every item has one
  }
  plan.plain = plain ? 1 : 0;
  return at;
}

// By a warp, for the team of queries and keys: the next item and its rows.
template <bool kCausal, PairWeights kWeights, int kDim>
__device__ __forceinline__ int look_up_rows(const ForwardArguments& a, int at, Plan& plan,
                                            Slot& slot, std::uint32_t known, int lane) {
  const ForwardParams& p = a.params;
  const DeviceTables& tables = p.tables;
  if (lane == 0) at = look_up_item<kCausal, kWeights>(a, at, plan);
  at = __shfl_sync(~0U, at, 0);
  __syncwarp();
  if (lane == 0) slot.end = plan.end;
  if (plan.end != 0) {
    if (lane == 0) barrier_arrive(known);
    return at;
  }
  const Group& group = tables.groups[plan.group];
  const int batch = plan.batch;
  const int head = plan.head;
  const bool single = plan.bulk != 0;
  std::byte* const state = p.state.base + batch * p.state.batch_step + head * p.state.head_step;
  std::byte* const lses = p.lse.base + batch * p.lse.batch_step + head * p.lse.head_step;
  const int step = single ? (plan.most - plan.least) / (kTile - 1) : 0;
  // All rows are asked for before any of them is waited for.
  constexpr int kRows = kTile / 32;
  int token[kRows];
  int index[kRows];
  float lse[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int r = lane + 32 * i;
    token[i] = -1;
    index[i] = 0;
    lse[i] = -INFINITY;
    if (r >= plan.rows) continue;
    if (single) {
      token[i] = (plan.quotient + r) * a.traits.query_stride + plan.remainder;
      index[i] = plan.least + r * step;
    } else {
      const int run = find_run(tables.runs, group.queries, plan.begin + r);
      const int place = plan.begin + r - __ldg(&tables.runs[run].before);
      token[i] = static_cast<int>(__ldg(&tables.runs[run].first)) +
                 place * __ldg(&tables.runs[run].stride);
      index[i] = __ldg(&tables.runs[run].index) + place * __ldg(&tables.runs[run].index_stride);
    }
  }
  if (p.load_state) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (token[i] >= 0)
        lse[i] = __ldcg(reinterpret_cast<const float*>(lses + token[i] * p.lse.row_step));
    }
  }
  std::uint32_t periodic = 0;  // by place modulo 16
  if constexpr (kWeights == PairWeights::periodic) {
    periodic = repeats_with(tables, group, lane & 15);
    if (lane < 16) slot.key_repeats[lane] = static_cast<std::uint8_t>(periodic);
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int r = lane + 32 * i;
    slot.token[r] = token[i];
    slot.index[r] = index[i];
    slot.old_lse[r] = lse[i];
    if constexpr (kWeights == PairWeights::periodic) {
      slot.repeats[r] = static_cast<std::uint8_t>(__shfl_sync(~0U, periodic, index[i] & 15));
    } else if constexpr (kWeights == PairWeights::general) {
      slot.repeats[r] = static_cast<std::uint8_t>(repeats_with(tables, group, index[i]));
    }
  }
  if (lane == 0) {
    slot.out = p.out.base + batch * p.out.batch_step + head * p.out.head_step;
    slot.state = state;
    slot.lse = lses;
  }
  __syncwarp();
  if (lane == 0) barrier_arrive(known);
  // Consumers will read the state as they take up the item.
  if (p.load_state) {
    for (int r = lane; r < kTile; r += 32) {
      if (slot.old_lse[r] != -INFINITY)
        prefetch_to_l2(state + slot.token[r] * p.state.row_step, kDim * 4);
    }
  }
  return at;
}

__device__ __forceinline__ void advance(int& stage, int& parity, int tiles, int stages) {
  const int sum = stage + tiles;
  parity ^= (sum / stages) & 1;
  stage = sum % stages;
}

template <int kDim>
__device__ __forceinline__ void load_tile(std::uint32_t target, const CUtensorMap* map,
                                          std::uint32_t barrier, int head, int remainder,
                                          int quotient, int batch, std::uint64_t policy) {
#pragma unroll
  for (int block = 0; block < kDim / 64; ++block) {
    load_box(target + block * kBlockBytes, map, barrier, block * 64, head, remainder, quotient,
             batch, policy);
  }
}

// Q and K. While one thread loads an item's tiles, the other warp looks up the next item.
template <typename T, int kDim, bool kCausal, PairWeights kWeights>
__device__ __forceinline__ void load_queries_and_keys(const ForwardArguments& a,
                                                      std::uint32_t tiles,
                                                      typename Layout<kDim>::Control& control,
                                                      int thread) {
  using L = Layout<kDim>;
  constexpr int kTeamBarrier = 1;
  const ForwardParams& p = a.params;
  const DeviceTables& tables = p.tables;
  const std::uint64_t keep = policy_keep();
  const std::uint32_t queries_full = shared_address(&control.queries_full);
  const bool ahead = thread >= 32;  // looks up items
  int stage = 0;
  int parity = 0;
  int slot_at = 0;
  int query_parity = 0;
  int at = blockIdx.x;
  if (ahead) {
    at = look_up_rows<kCausal, kWeights, kDim>(a, at, control.plans[0], control.slots[0],
                                               shared_address(&control.rows_known[0]), thread - 32);
  }
  team_sync(kTeamBarrier);
  while (true) {
    const Plan& plan = control.plans[slot_at];
    slot_at = slot_at + 1 == kSlots ? 0 : slot_at + 1;
    Plan& next_plan = control.plans[slot_at];
    Slot& next_slot = control.slots[slot_at];
    if (thread == 0) {
      const bool bulk_copies = plan.end == 0 && plan.bulk != 0;
      barrier_wait(shared_address(&control.queries_empty), query_parity ^ 1);
      if (bulk_copies) {
        barrier_arrive_expecting(queries_full, L::kTileBytes);
        load_tile<kDim>(tiles, &a.q, queries_full, plan.head, plan.remainder, plan.quotient,
                        plan.batch, policy_stream());
      } else if (plan.end != 0) {
        barrier_arrive(queries_full);
      }
    }
    query_parity ^= 1;
    if (plan.end != 0) break;
    team_sync(kTeamBarrier);  // Q of the item before has been taken: a slot is free
    const Group& group = tables.groups[plan.group];
    if (plan.bulk == 0) {
      const Operand queries{&a.q, false, 0, 0, plan.batch, plan.head, plan.unit};
      gather<kDim>(tiles, control.address[0], p.q, queries, tables.runs, group.queries, plan.begin,
                   plan.rows, thread, kTeamBarrier);
      team_sync(kTeamBarrier);
      if (thread == 0) barrier_arrive(queries_full);
    }

    if (plan.plain != 0) {
      const int count = plan.tiles[0] + plan.tiles[1];
      if (thread == 0) {
        const int everyone = plan.least + plan.shift;  // every query sees indices up to it
        int s = stage;
        int phase = parity;
        int left = count;
#pragma unroll 1
        for (int j = 0; j < 2; ++j) {
          const int head = plan.kv_head;
          const int batch = plan.batch;
          const int remainder = plan.run_remainder[j];
          const int quotient = plan.run_quotient[j];
          const int step = plan.run_step[j];
          const int index = plan.run_index[j];
#pragma unroll 1
          for (int t = plan.tiles[j] - 1; t >= 0; --t) {
            --left;
            int4 info;
            info.x = left == 0 ? kLast : 0;
            info.y = kTile;
            info.z = index + t * kTile * step;
            info.w = step;
            if (kCausal && plan.compare != 0 && info.z + (kTile - 1) * step > everyone)
              info.x |= kMasked | kCompare;
            if (kCausal) info.z -= plan.shift;
            const std::uint32_t full = shared_address(&control.keys_full[0]) + 8 * s;
            const std::uint32_t target = tiles + L::kKeys + s * L::kTileBytes;
            barrier_wait(shared_address(&control.keys_empty[0]) + 8 * s, phase ^ 1);
            load_tile<kDim>(target, &a.k, full, head, remainder, quotient + t * kTile, batch, keep);
            *reinterpret_cast<int4*>(&control.keys[s]) = info;
            barrier_arrive_expecting(full, L::kTileBytes);
            if (++s == L::kKeyStages) {
              s = 0;
              phase ^= 1;
            }
          }
        }
      }
      advance(stage, parity, count, L::kKeyStages);
    } else {
      const Operand keys{&a.k,         a.map_keys, a.traits.key_stride, keep, plan.batch,
                         plan.kv_head, plan.unit};
      auto walk = key_tiles<kCausal>(tables.runs, group, plan.most);
      int tile = walk.first();
      const int shift = plan.shift;
      const bool compare = kCausal && plan.compare != 0;
      const int everyone = plan.least + shift;
      while (tile >= 0) {
        const Span span = walk.span;
        const int count = walk.rows(tile);
        const int next = walk.visible(tile - 1);
        int flags = next < 0 ? kLast : 0;
        if (count < kTile) flags |= kMasked;
        if (compare && span.most > everyone)
          flags |= kMasked | kCompare | (span.single ? 0 : kTable);

        const std::uint32_t full = shared_address(&control.keys_full[stage]);
        if (thread == 0) barrier_wait(shared_address(&control.keys_empty[stage]), parity ^ 1);
        team_sync(kTeamBarrier);
        KeyStage& info = control.keys[stage];
        if (thread == 0) {
          info.flags = flags;
          info.rows = count;
          info.first = span.least - shift;  // of a single run, the first row's
          info.stride = __ldg(&tables.runs[span.run].index_stride);
        }
        if ((kCausal && (flags & kTable) != 0) || kWeights == PairWeights::general) {
          for (int r = thread; r < kTile; r += kTeam) {
            int index = INT_MAX;
            if (r < count) {
              const int run = find_run(tables.runs, group.keys, tile * kTile + r);
              index = __ldg(&tables.runs[run].index) +
                      (tile * kTile + r - __ldg(&tables.runs[run].before)) *
                          __ldg(&tables.runs[run].index_stride);
            }
            if constexpr (kWeights == PairWeights::general) {
              info.repeats[r] = static_cast<std::uint8_t>(
                  index == INT_MAX ? 0U : repeats_with(tables, group, index));
            }
            info.index[r] = index == INT_MAX ? INT_MAX : index - shift;
          }
        }
        const std::uint32_t target = tiles + L::kKeys + stage * L::kTileBytes;
        if (bulk(keys, tables.runs, span, count)) {
          if ((kCausal && (flags & kTable) != 0) || kWeights == PairWeights::general)
            team_sync(kTeamBarrier);
          if (thread == 0) {
            barrier_arrive_expecting(full, L::kTileBytes);
            load_bulk<kDim>(target, full, keys, tables.runs, span.run, tile * kTile);
          }
        } else {
          gather<kDim>(target, control.address[0], p.k, keys, tables.runs, group.keys, tile * kTile,
                       count, thread, kTeamBarrier);
          team_sync(kTeamBarrier);
          if (thread == 0) barrier_arrive(full);
        }
        if (++stage == L::kKeyStages) {
          stage = 0;
          parity ^= 1;
        }
        tile = next;
      }
    }
    if (ahead) {
      at = look_up_rows<kCausal, kWeights, kDim>(
          a, at, next_plan, next_slot, shared_address(&control.rows_known[slot_at]), thread - 32);
    }
    team_sync(kTeamBarrier);
  }
}

template <typename T, int kDim, bool kCausal, PairWeights kWeights>
__device__ __forceinline__ void load_values(const ForwardArguments& a, std::uint32_t tiles,
                                            typename Layout<kDim>::Control& control, int thread) {
  using L = Layout<kDim>;
  constexpr int kTeamBarrier = 2;
  const ForwardParams& p = a.params;
  const DeviceTables& tables = p.tables;
  const std::uint64_t keep = policy_keep();
  const std::uint32_t landed = shared_address(&control.values_landed);
  int stage = 0;
  int parity = 0;
  int landed_parity = 0;
  int slot_at = 0;
  int slot_parity = 0;
  while (true) {
    barrier_wait(shared_address(&control.rows_known[0]) + 8 * slot_at, slot_parity);
    const Plan& plan = control.plans[slot_at];
    if (plan.end != 0) break;
    if (++slot_at == kSlots) {
      slot_at = 0;
      slot_parity ^= 1;
    }
    const int everyone = plan.least + plan.shift;
    if (plan.plain != 0) {
      int left = plan.tiles[0] + plan.tiles[1];
      int j = plan.tiles[0] > 0 ? 0 : 1;
      int t = plan.tiles[j] - 1;
      if constexpr (kCausal) {
        // Those that are masked come first: the team looks through them.
        while (plan.compare != 0 && left > 0 &&
               plan.run_index[j] + (t * kTile + kTile - 1) * plan.run_step[j] > everyone) {
          const std::uint32_t target = tiles + L::kValues + stage * L::kTileBytes;
          ValueStage& info = control.values[stage];
          if (thread == 0) {
            barrier_wait(shared_address(&control.values_empty[stage]), parity ^ 1);
            barrier_arrive_expecting(landed, L::kTileBytes);
            load_tile<kDim>(target, &a.v, landed, plan.kv_head, plan.run_remainder[j],
                            plan.run_quotient[j] + t * kTile, plan.batch, keep);
            info.any = 0;
          }
          team_sync(kTeamBarrier);
          barrier_wait(landed, landed_parity);
          landed_parity ^= 1;
          confine<T, kDim>(target, info, thread, kTeamBarrier);
          team_sync(kTeamBarrier);
          if (thread == 0) barrier_arrive(shared_address(&control.values_full[stage]));
          advance(stage, parity, 1, L::kValueStages);
          --left;
          if (--t < 0) {
            j = 1;
            t = plan.tiles[1] - 1;
          }
        }
      }
      if (thread == 0) {
        int s = stage;
        int phase = parity;
#pragma unroll 1
        for (int more = left; more > 0;) {
          const int head = plan.kv_head;
          const int batch = plan.batch;
          const int remainder = plan.run_remainder[j];
          const int quotient = plan.run_quotient[j];
#pragma unroll 1
          for (; t >= 0; --t, --more) {
            const std::uint32_t full = shared_address(&control.values_full[0]) + 8 * s;
            const std::uint32_t target = tiles + L::kValues + s * L::kTileBytes;
            barrier_wait(shared_address(&control.values_empty[0]) + 8 * s, phase ^ 1);
            load_tile<kDim>(target, &a.v, full, head, remainder, quotient + t * kTile, batch, keep);
            if (kCausal) control.values[s].any = 0;
            barrier_arrive_expecting(full, L::kTileBytes);
            if (++s == L::kValueStages) {
              s = 0;
              phase ^= 1;
            }
          }
          j = 1;
          t = plan.tiles[1] - 1;
        }
      }
      advance(stage, parity, left, L::kValueStages);
    } else {
      const Group& group = tables.groups[plan.group];
      const Operand values{&a.v,         a.map_keys, a.traits.key_stride, keep, plan.batch,
                           plan.kv_head, plan.unit};
      auto walk = key_tiles<kCausal>(tables.runs, group, plan.most);
      int tile = walk.first();
      while (tile >= 0) {
        const Span span = walk.span;
        const int count = walk.rows(tile);
        const int next = walk.visible(tile - 1);
        const bool look = kCausal && plan.compare != 0 && span.most > everyone;
        const std::uint32_t full = shared_address(&control.values_full[stage]);
        if (thread == 0) barrier_wait(shared_address(&control.values_empty[stage]), parity ^ 1);
        team_sync(kTeamBarrier);
        const std::uint32_t target = tiles + L::kValues + stage * L::kTileBytes;
        ValueStage& info = control.values[stage];
        if (kCausal && thread == 0) info.any = 0;
        if (bulk(values, tables.runs, span, count)) {
          if (thread == 0) {
            const std::uint32_t barrier = look ? landed : full;
            barrier_arrive_expecting(barrier, L::kTileBytes);
            load_bulk<kDim>(target, barrier, values, tables.runs, span.run, tile * kTile);
          }
          if (look) {
            barrier_wait(landed, landed_parity);
            landed_parity ^= 1;
          }
        } else {
          gather<kDim>(target, control.address[1], p.v, values, tables.runs, group.keys,
                       tile * kTile, count, thread, kTeamBarrier);
          team_sync(kTeamBarrier);
          if (!look && thread == 0) barrier_arrive(full);
        }
        if (look) {
          confine<T, kDim>(target, info, thread, kTeamBarrier);
          team_sync(kTeamBarrier);
          if (thread == 0) barrier_arrive(full);
        }
        if (++stage == L::kValueStages) {
          stage = 0;
          parity ^= 1;
        }
        tile = next;
      }
    }
    team_sync(kTeamBarrier);
  }
}

}  // namespace annulus::cuda::sm90
