#pragma once

#include "kernels/cuda/rows/sink.cuh"
#include "kernels/cuda/sm90/forward/shared.cuh"
#include "kernels/cuda/sm90/forward/state.cuh"

// Which keys an item of the Hopper forward kernel sees, and the lookup of the next item while the
// current one is loaded.
namespace annulus::cuda::sm90 {

// Iterates over the key tiles of which an item's queries see any key, last first. All threads of a
// team have the same state. Both teams must visit the same tiles.
template <Limits kLimits>
struct KeyTiles {
  const Run* runs;
  RowList keys;
  int from;   // first index that queries see (Limits::both)
  int limit;  // end of the indices that queries see
  Span span;  // of the tile found last

  __device__ __forceinline__ int rows(int tile) const {
    return min(kTile, keys.rows - tile * kTile);
  }
  // The last visible tile at or before `tile`; < 0: none.
  __device__ __forceinline__ int visible(int tile) {
    while (tile >= 0) {
      span = look_up(runs, keys, tile * kTile, rows(tile));
      const bool below = kLimits == Limits::both && span.most < from;
      if (!kHides<kLimits> || (span.least <= limit && !below)) break;
      if (below) {  // and so is the rest of the run
        if (keys.ascending != 0) return -1;
        tile = min(tile - 1, (__ldg(&runs[span.run].before) - 1) >> 7);
        continue;
      }
      // No visible row of this run from here on: continues at its last visible row, or in the
      // previous run.
      const int index = __ldg(&runs[span.run].index);
      const int seen =
          limit < index ? 0 : (limit - index) / __ldg(&runs[span.run].index_stride) + 1;
      tile = min(tile - 1, (__ldg(&runs[span.run].before) + seen - 1) >> 7);
    }
    return tile;
  }
  // There always is one, so that all items follow the same path; its keys may all be hidden.
  __device__ __forceinline__ int first() {
    const int last = max(0, (keys.rows - 1) / kTile);
    const int tile = visible(last);
    if (tile >= 0) return tile;
    span = look_up(runs, keys, 0, rows(0));
    return 0;
  }
};

template <Limits kLimits>
__device__ __forceinline__ KeyTiles<kLimits> key_tiles(const Run* runs, const Group& group,
                                                       const Plan& plan) {
  const bool compare = kHides<kLimits> && plan.compare != 0;
  return {runs,
          group.keys,
          kLimits == Limits::both && compare ? plan.least + plan.band_least : INT_MIN,
          compare ? plan.most + plan.band_most : INT_MAX,
          {}};
}

// Called by one thread: the first item with rows from `at` on. Returns where to continue.
template <Limits kLimits, PairWeights kWeights, int kDim>
__device__ __forceinline__ int look_up_item(const ForwardArguments& a, int at, Plan& plan) {
  const ForwardParams& p = a.params;
  const DeviceTables& tables = p.tables;
  const Item* item = nullptr;
  int rows = 0;
  int number = 0;
  for (; at < p.items && rows == 0; at += gridDim.x) {
    number = p.first_item + at;
    item = tables.items + number;
    rows = __ldg(&item->rows);
  }
  plan.end = rows == 0 ? 1 : 0;
  if (rows == 0) return at;
  const int begin = __ldg(&item->begin);
  const int group_at = __ldg(&item->group);
  const Member* member = tables.members + __ldg(&item->member);
  const Group* group = tables.groups + group_at;
  plan.group = group_at;
  plan.later = p.later != nullptr ? __ldg(p.later + number) : (p.for_good ? 0U : ~0U);
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
  // A box has 128 rows: those behind the item's are somebody else's or zeros, and end nowhere.
  if (a.map_queries && span.single && __ldg(&runs[span.run].source) < 0 &&
      __ldg(&runs[span.run].stride) == a.traits.query_stride) {
    const std::uint32_t token =
        static_cast<std::uint32_t>(__ldg(&runs[span.run].first)) +
        static_cast<std::uint32_t>(begin - __ldg(&runs[span.run].before)) * stride;
    plan.bulk = 1;
    plan.quotient = static_cast<std::int32_t>(token / stride);
    plan.remainder = static_cast<std::int32_t>(token % stride);
    plan.index_step = __ldg(&runs[span.run].index_stride);
  }

  const int band_least = kLimits == Limits::both ? limit_of(group->least) : 0;
  const int band_most = kHides<kLimits> ? limit_of(group->most) : 0;
  const bool compare = kHides<kLimits> && (group->most != kNoMost ||
                                           (kLimits == Limits::both && group->least != kNoLeast));
  plan.band_least = band_least;
  plan.band_most = band_most;
  plan.compare = compare ? 1 : 0;
  const int key_runs = group->keys.runs;
  const bool received = a.traits.keys_received;
  plan.map_head = received ? 0 : plan.kv_head;
  plan.map_batch = received ? 0 : plan.batch;
  bool plain = kWeights != PairWeights::general && a.map_keys && group->keys.rows > 0 &&
               key_runs <= 2 && (key_runs == 1 || group->keys.ascending != 0);
  if (plain) {
    const auto key_stride = static_cast<std::uint32_t>(a.traits.key_stride);
    int sum = 0;
#pragma unroll
    for (int j = 0; j < 2; ++j) {  // last run first
      const int from = 1 - j;
      plan.tiles[j] = 0;
      if (from >= key_runs) continue;
      const int at_run = group->keys.begin + from;
      const Run* run = runs + at_run;
      const int count = __ldg(&run->count);
      const int index = __ldg(&run->index);
      const int step = __ldg(&run->index_stride);
      plain = plain && (count % kTile == 0 || from == key_runs - 1) && keys_mapped(a, run);
      if (!plain) break;
      int tiles = (count + kTile - 1) / kTile;
      int skipped = 0;
      if (compare) {
        const int limit = span.most + band_most;
        tiles = limit < index ? 0 : min(tiles, (limit - index) / step / kTile + 1);
        if constexpr (kLimits == Limits::both) {
          const int from = span.least + band_least;
          skipped = from <= index ? 0 : ((from - index - 1) / step + 1) / kTile;
          if (skipped >= tiles) skipped = tiles = 0;
          tiles -= skipped;
        }
      }
      plan.tiles[j] = tiles;
      sum += tiles;
      const int before = __ldg(&run->before) + skipped * kTile;
      std::uint32_t first = mapped_row<kDim>(a, p.k, at_run, before, plan.batch, plan.unit);
      plan.run_quotient[j] = static_cast<std::int32_t>(first / key_stride);
      plan.run_remainder[j] = static_cast<std::int32_t>(first % key_stride);
      if (received) first = mapped_row<kDim>(a, p.v, at_run, before, plan.batch, plan.unit);
      plan.value_quotient[j] = static_cast<std::int32_t>(first / key_stride);
      plan.value_remainder[j] = static_cast<std::int32_t>(first % key_stride);
      plan.run_rows[j] = count - skipped * kTile;
      plan.run_index[j] = index + skipped * kTile * step;
      plan.run_step[j] = step;
    }
    if (sum == 0) plan.tiles[1] = 1;  // as every item has one
  }
  plan.plain = plain ? 1 : 0;
  return at;
}

// Called by a warp of the team of queries and keys: looks up the next item and its rows.
template <Limits kLimits, PairWeights kWeights, int kDim, bool kInPieces>
__device__ __forceinline__ int look_up_rows(const ForwardArguments& a, int at, Plan& plan,
                                            Slot& slot, std::uint32_t known, int lane) {
  const ForwardParams& p = a.params;
  const DeviceTables& tables = p.tables;
  if (lane == 0) at = look_up_item<kLimits, kWeights, kDim>(a, at, plan);
  at = __shfl_sync(~0U, at, 0);
  __syncwarp();
  if (lane == 0) slot.end = plan.end;
  if (plan.end != 0) {
    barrier_arrive(known);
    return at;
  }
  const Group& group = tables.groups[plan.group];
  const int batch = plan.batch;
  const int head = plan.head;
  const bool single = plan.bulk != 0;
  std::byte* const state = p.state.base + batch * p.state.batch_step + head * p.state.head_step;
  std::byte* const lses = p.lse.base + batch * p.lse.batch_step + head * p.lse.head_step;
  // Issues the loads of all rows before it waits for any.
  constexpr int kRows = kTile / 32;
  int token[kRows];
  int index[kRows];
  float lse[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int r = lane + 32 * i;
    token[i] = -1;
    index[i] = plan.most;  // it sees something: rows that have not are computed twice
    lse[i] = -INFINITY;
    if (r >= plan.rows) continue;
    if (single) {
      token[i] = (plan.quotient + r) * a.traits.query_stride + plan.remainder;
      index[i] = plan.least + r * plan.index_step;
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
  bool any = false;            // row has a state
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
    any = any || lse[i] != -INFINITY;
    if constexpr (kWeights == PairWeights::periodic) {
      slot.repeats[r] = static_cast<std::uint8_t>(__shfl_sync(~0U, periodic, index[i] & 15));
    } else if constexpr (kWeights == PairWeights::general) {
      slot.repeats[r] = static_cast<std::uint8_t>(repeats_with(tables, group, index[i]));
    }
  }
  bool prefetch = p.load_state;
  if constexpr (kInPieces) {
    any = __any_sync(~0U, any);
    const bool by_pieces = any && state_by_pieces<kDim>(a, plan);
    prefetch = any && !by_pieces;
    if (lane == 0) {
      slot.has_state = prefetch ? 1 : 0;
      slot.pieces = by_pieces ? kPieces<kDim> : 0;
      slot.every_tile = by_pieces && piece_every_tile<kDim>(plan) ? 1 : 0;
    }
  }
  if (lane == 0) {
    slot.later = plan.later;
    if constexpr (kLimits == Limits::both) slot.width = plan.band_most - plan.band_least;
    slot.out = p.out.base + batch * p.out.batch_step + head * p.out.head_step;
    slot.state = state;
    slot.lse = lses;
    slot.sink = sink_of(p.sinks, head);
  }
  barrier_arrive(known);
  // Consumers read the state when they begin the item.
  if (prefetch) {
    for (int r = lane; r < kTile; r += 32) {
      if (slot.old_lse[r] != -INFINITY)
        prefetch_to_l2(state + slot.token[r] * p.state.row_step, kDim * 4);
    }
  }
  return at;
}

}  // namespace annulus::cuda::sm90
