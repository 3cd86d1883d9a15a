#pragma once

#include "kernels/cuda/attend_backward_sm90_shared.h"
#include "kernels/cuda/attend_backward_sm90_turn.h"
#include "kernels/cuda/row_lists.h"

// The warps of the Hopper backward kernel that move rows: two bring tiles, two take dQ away. They
// have 40 registers: what is rarely needed is read again from the tables, which the caches hold.
namespace annulus::cuda::sm90 {

__device__ __forceinline__ const std::byte* from_lane(const std::byte* pointer, int lane) {
  return reinterpret_cast<const std::byte*>(
      __shfl_sync(~0U, reinterpret_cast<unsigned long long>(pointer), lane));
}

// Rows of any runs and sources into a tile of kRows, as a bulk tensor copy would lay them; zeros
// after the last. By a whole warp.
template <int kDim, int kRows>
__device__ __forceinline__ void gather(const BackwardArguments& a, const Channel& channel,
                                       const RowList& list, int begin, int rows, RowOwner owner,
                                       std::uint32_t tile) {
  constexpr int kChunks = kDim / 8;  // of 16 bytes in a row; one for each lane
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int chunk = lane % kChunks;
  tile += (chunk / 8) * kRows * 128;
  for (int base = 0; base < kRows; base += 32) {
    const std::byte* mine = channel.local.base;
    if (base + lane < rows) {
      const int row = begin + base + lane;
      const Run& run = a.params.tables.runs[run_of(a.params.tables.runs, list, row)];
      mine = row_address(channel, run, row, owner);
    }
#pragma unroll 4
    for (int i = 0; i < 32; i += 32 / kChunks) {
      const int row = i + lane / kChunks;
      copy16(tile + swizzled(base + row, chunk % 8), from_lane(mine, row) + chunk * 16,
             base + row < rows);
    }
  }
  copy16_wait();
  fence_shared_for_async();
  __syncwarp();
}

// Which of the group's repeats have the row of this index.
__device__ __forceinline__ int repeat_bits(const Repeat* repeats, int count, int index) {
  int bits = 0;
  for (int i = 0; i < count; ++i) {
    const int stride = repeats[i].stride;
    if (static_cast<unsigned>(index) % static_cast<unsigned>(stride) ==
        static_cast<unsigned>(repeats[i].phase))
      bits |= 1 << i;
  }
  return bits;
}

__device__ __forceinline__ bool keys_by_box(const BackwardArguments& a, const Run& run) {
  const LaunchTraits& traits = a.schedule.traits;
  return a.map_keys && (run.source >= 0) == traits.keys_received && run.stride == traits.key_stride;
}
__device__ __forceinline__ bool queries_by_box(const BackwardArguments& a, const Run& run) {
  const LaunchTraits& traits = a.schedule.traits;
  return a.map_queries && (run.source >= 0) == traits.queries_received &&
         run.stride == traits.query_stride;
}

// Which row of its map a row is: the shard's token, or its place in the grid of all parcels.
__device__ __forceinline__ int mapped_row(const Channel& channel, const RowGrid& grid,
                                          int row_bytes, const Run& run, int row,
                                          const RowOwner& owner) {
  if (run.source < 0) return static_cast<int>(position_of(run, row));
  return static_cast<int>((row_address(channel, run, row, owner) - grid.base) / row_bytes);
}

// Brings K and V of one tile after the other, and draws the items. One warp.
template <int kDim>
__device__ __forceinline__ void bring_tiles(const BackwardArguments& a, std::uint32_t shared) {
  using Memory = Shared<kDim>;
  const BackwardParams& p = a.params;
  const Run* const runs = p.tables.runs;
  const int lane = static_cast<int>(threadIdx.x) & 31;
  int drawn = static_cast<int>(blockIdx.x);
  for (int tile = 0;; ++tile) {
    if (tile > 0) barrier_wait(shared + Memory::draw(), (tile - 1) & 1);
    if (a.schedule.next_item != nullptr) {
      if (lane == 0) drawn = atomicAdd(a.schedule.next_item, 1);
      drawn = __shfl_sync(~0U, drawn, 0);
    }
    // Before waiting for room: the steps of the tile before must know whether they are the last.
    if (lane == 0) {
      store_word(shared + Memory::kDrawn + (tile & 3) * 4, drawn);
      barrier_arrive(shared + Memory::drawn(tile & 1));
    }
    if (drawn >= p.items && tile > 0) return;
    const int number = p.first_item + (drawn < p.items ? drawn : 0);
    const Item item = p.tables.items[number];
    const Group& group = p.tables.groups[item.group];
    const Member& member = p.tables.members[item.member];
    const RowOwner owner{item.batch, member.kv_head, member.unit};
    const int first_run = run_of(runs, group.keys, item.begin);
    const Run& run = runs[first_run];
    const bool whole = run.before + run.count >= item.begin + item.rows;
    const bool boxed = whole && item.rows == kKeys && keys_by_box(a, run);
    const int buffer = tile & 1;
    barrier_wait(shared + Memory::k_empty(buffer), ((tile >> 1) & 1) ^ 1);
    if (lane == 0) {
      const std::uint32_t note =
          shared + Memory::kTileNotes + buffer * static_cast<int>(sizeof(TileNote));
      store_longs2(note, reinterpret_cast<std::int64_t>(row_address(p.dk, run, item.begin, owner)),
                   reinterpret_cast<std::int64_t>(row_address(p.dv, run, item.begin, owner)));
      store_longs2(note + 16, row_step(p.dk, run), row_step(p.dv, run));
      store_words4(note + 32, whole ? -1 : number, item.rows, 0, 0);
    }
#pragma unroll 1
    for (int which = 0; which < 2; ++which) {
      const std::uint32_t full =
          which == 0 ? shared + Memory::k_full(buffer) : shared + Memory::v_full();
      const std::uint32_t target =
          shared + (which == 0 ? Memory::kK + buffer * Memory::kKeyTile : Memory::kV);
      if (which == 1) {
        barrier_wait(shared + Memory::v_empty(), (tile & 1) ^ 1);
        const Repeat* const repeats = p.tables.repeats + group.first_repeat;
        const int count = group.repeats;
        bool periodic = count > 0 && whole && run.index_stride == 1;
        for (int i = 0; i < count; ++i) periodic &= (16 % repeats[i].stride) == 0;
        for (int i = lane; i < kKeys; i += 32) {
          int word = kAbsentKey;
          if (i < item.rows) {
            const int row = item.begin + i;
            const int index = index_of(whole ? run : runs[run_of(runs, group.keys, row)], row);
            word = index * 16 | repeat_bits(repeats, count, index);
          }
          store_word(shared + Memory::kKeyWords + i * 4, word);
        }
        if (count > 0 && lane < 16)
          store_float(shared + Memory::kWeights + lane * 4,
                      static_cast<float>(1 + __popc(static_cast<unsigned>(lane))));
        if (periodic) {
          // Lanes 0-15 hold the repeats of 16 keys, 16-31 those of 16 queries. Fragments want
          // queries 2c, 2c + 1, 2c + 8, 2c + 9 side by side.
          const int index =
              (lane < 16 ? index_of(run, item.begin) : runs[group.queries.begin].index & 15) +
              (lane & 15);
          const int bits = repeat_bits(repeats, count, index);
          const int c = lane & 3;
          for (int key = lane >> 2; key < 16; key += 8) {
            const int of_key = __shfl_sync(~0U, bits, key);
            int weights[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              const int of_query = __shfl_sync(~0U, bits, 16 + 2 * c + (i & 1) + 8 * (i >> 1));
              weights[i] = __half_as_ushort(
                  __int2half_rn(1 + __popc(static_cast<unsigned>(of_key & of_query))));
            }
            store_word(shared + Memory::kPeriod + key * 32 + c * 8, weights[0] | weights[1] << 16);
            store_word(shared + Memory::kPeriod + key * 32 + c * 8 + 4,
                       weights[2] | weights[3] << 16);
          }
        }
        __syncwarp();
      }
      if (boxed) {
        if (lane == 0) {
          barrier_arrive_expecting(full, Memory::kKeyTile);
          const int position = mapped_row(which == 0 ? p.k : p.v, a.schedule.traits.keys, kDim * 2,
                                          run, item.begin, owner);
          const bool received = run.source >= 0;
          for (int h = 0; h < kDim / 64; ++h)
            load_box(target + h * Memory::kKeyBlock, which == 0 ? &a.k : &a.v, full, h * 64,
                     received ? 0 : owner.head, position % run.stride, position / run.stride,
                     received ? 0 : owner.batch, policy_stream());
        }
      } else {
        gather<kDim, kKeys>(a, which == 0 ? p.k : p.v, group.keys, item.begin, item.rows, owner,
                            target);
        if (lane == 0) barrier_arrive(full);
      }
    }
    // The sums that the tile's end will read.
    if (whole) {
      for (int i = lane; i < item.rows; i += 32) {
        prefetch_to_l2(row_address(p.dv, run, item.begin + i, owner), kDim * 4);
        prefetch_to_l2(row_address(p.dk, run, item.begin + i, owner), kDim * 4);
      }
    }
    drawn += static_cast<int>(gridDim.x);
  }
}

// Brings queries: the steps of one tile after the other. One warp.
template <int kDim>
__device__ __forceinline__ void bring_steps(const BackwardArguments& a, std::uint32_t shared) {
  using Memory = Shared<kDim>;
  constexpr int kQueries = Memory::kQueries;
  constexpr int kPerLane = kQueries / 32;
  const BackwardParams& p = a.params;
  const Run* const runs = p.tables.runs;
  const int lane = static_cast<int>(threadIdx.x) & 31;
  int step = 0;
  int flags = 0;
  for (int tile = 0; (flags & kLastOfAll) == 0; ++tile) {
    const auto drawn_item = [&](int tile) {
      barrier_wait(shared + Memory::drawn(tile & 1), (tile >> 1) & 1);
      return load_word(shared + Memory::kDrawn + (tile & 3) * 4);
    };
    int drawn = drawn_item(tile);
    // Blocks without an item, and keys that no query sees: one step of which nothing counts.
    bool nothing = drawn >= p.items;
    const bool no_more = nothing;
    if (nothing) drawn = 0;
    const Item item = p.tables.items[p.first_item + drawn];
    const Group& group = p.tables.groups[item.group];
    const RowList queries = group.queries;
    const bool causal = group.causal != 0;
    const int shift = group.shift;
    const RowBlock keys = row_block(runs, group.keys, item.begin, item.rows);
    const int blocks = (queries.rows + kQueries - 1) / kQueries;
    // The first block at or after `block` that sees some key of the tile.
    const auto seeing = [&](int block) {
      if (!causal) return block;
      if (queries.ascending != 0) {
        int end = blocks;
        while (block < end) {
          const int middle = (block + end) / 2;
          const int last = min(queries.rows, (middle + 1) * kQueries) - 1;
          if (index_of(runs[run_of(runs, queries, last)], last) + shift >= keys.low) {
            end = middle;
          } else {
            block = middle + 1;
          }
        }
        return block;
      }
      for (; block < blocks; ++block) {
        const int begin = block * kQueries;
        if (row_block(runs, queries, begin, min(kQueries, queries.rows - begin)).high + shift >=
            keys.low)
          break;
      }
      return block;
    };
    const bool all_after = !causal || queries.ascending != 0;  // see it, after the first that does
    int members = item.members;
    int first_block = seeing(0);
    if (nothing || first_block >= blocks) {
      nothing = true;
      members = 1;
      first_block = blocks - 1;
    }
    // As bring_tiles has it.
    bool periodic = group.repeats > 0 && keys.whole && runs[keys.run].index_stride == 1;
    for (int i = 0; i < group.repeats; ++i)
      periodic &= (16 % p.tables.repeats[group.first_repeat + i].stride) == 0;
    const int phase = runs[queries.begin].index;

    bool asked = false;  // for the next item
    const auto ask_near_end = [&](int member, int block, bool last) {
      if (asked || !(last || (member + 1 == members && block + 1 + kDrawAhead >= blocks))) return;
      asked = true;
      if (lane == 0) barrier_arrive(shared + Memory::draw());
    };
    for (int member = 0; member < members; ++member) {
      const Member of = p.tables.members[item.member + member];
      const RowOwner owner{item.batch, of.head, of.unit};
      for (int block = first_block; block < blocks;) {
        const int begin = block * kQueries;
        const int rows = min(kQueries, queries.rows - begin);
        const Run run = runs[run_of(runs, queries, begin)];
        const int left = run.before + run.count - begin;  // rows of the run
        const bool whole = rows <= left;
        // A stretch of full blocks of one run goes quickly; any other block is one of its own.
        const bool boxed = all_after && left >= kQueries && queries_by_box(a, run);
        const int stretch = boxed ? block + min(left / kQueries, blocks - block) : block + 1;
        // Of the box: of Q in lane 0, which brings it, of dO in lane 1, and in lane 2, which writes
        // the note, of dQ.
        int remainder = 0;
        int row = 0;
        if (boxed) {
          const LaunchTraits& traits = a.schedule.traits;
          const int at = lane == 2
                             ? mapped_row(p.dq, traits.query_gradients, kDim * 4, run, begin, owner)
                             : mapped_row(lane == 0 ? p.q : p.dout, traits.queries, kDim * 2, run,
                                          begin, owner);
          remainder = at % run.stride;
          row = at / run.stride;
        }
        const int map_head = run.source < 0 ? owner.head : 0;
        const int map_batch = run.source < 0 ? owner.batch : 0;
        int low = index_of(run, begin);
        int next_block = block + 1;
        int high = low + (rows - 1) * run.index_stride;
        if (!boxed) {
          const RowBlock here = row_block(runs, queries, begin, rows);
          low = here.low;
          high = here.high;
          if (!all_after) next_block = seeing(next_block);
        }
        if (boxed && !nothing) {
          int flags_of = kBox;
          if (keys.rows < kKeys) flags_of |= kMasked;
          if (group.repeats > 0)
            flags_of |= periodic && run.index_stride == 1 && ((low - phase) & 15) == 0 ? kPeriodic
                                                                                       : kWeighted;
          const int masked_below = causal ? keys.high - shift : -0x7FFFFFFF;
          // Of the tile: the block that ends it, if it is in this stretch.
          const int last_block = member + 1 == members ? blocks - 1 : -1;
          const float* lse_row =
              reinterpret_cast<const float*>(row_address(p.lse, run, begin + lane, owner));
          const float* delta_row =
              reinterpret_cast<const float*>(row_address(p.delta, run, begin + lane, owner));
          const std::int64_t lse_step = row_step(p.lse, run) / 4 * 32;
          const std::int64_t delta_step = row_step(p.delta, run) / 4 * 32;
          const int low_step = kQueries * run.index_stride;
          const std::uint64_t policy = policy_keep();
#pragma unroll 1
          for (; block < stretch; ++block) {
            float lse[kPerLane];
            float delta[kPerLane];
#pragma unroll
            for (int i = 0; i < kPerLane; ++i) {
              lse[i] = __ldg(lse_row);
              delta[i] = __ldg(delta_row);
              lse_row += lse_step;
              delta_row += delta_step;
            }
            flags = flags_of;
            if (low < masked_below) flags |= kMasked;
            ask_near_end(member, block, false);
            if (block + 1 == blocks) flags |= kLastOfMember;
            if (block == last_block) {
              flags |= kLastOfTile;
              if (drawn_item(tile + 1) >= p.items) flags |= kLastOfAll;
            }
            const int stage = step & 1;
            barrier_wait(shared + Memory::q_empty(stage), ((step >> 1) & 1) ^ 1);
            if (lane == 0) {
              const std::uint32_t q_full = shared + Memory::q_full(stage);
              const std::uint32_t q_tile = shared + Memory::kQ + stage * Memory::kQueryTile;
              barrier_arrive_expecting(q_full, Memory::kQueryTile);
#pragma unroll
              for (int h = 0; h < kDim / 64; ++h)
                load_box(q_tile + h * Memory::kQueryBlock, &a.q, q_full, h * 64, map_head,
                         remainder, row, map_batch, policy);
            } else if (lane == 1) {
              const std::uint32_t dout_full = shared + Memory::dout_full(stage);
              const std::uint32_t dout_tile = shared + Memory::kDout + stage * Memory::kQueryTile;
              barrier_arrive_expecting(dout_full, Memory::kQueryTile);
#pragma unroll
              for (int h = 0; h < kDim / 64; ++h)
                load_box(dout_tile + h * Memory::kQueryBlock, &a.dout, dout_full, h * 64, map_head,
                         remainder, row, map_batch, policy);
            } else if (lane == 2) {
              const std::uint32_t note = shared + Memory::kStepNotes + (step & 3) * kStepNote;
              store_words4(note, flags | member << kMemberShift, map_head, remainder, row);
              store_words4(note + 16, map_batch, owner.unit, p.first_item + drawn,
                           queries.ascending != 0 ? low + low_step - run.index_stride
                                                  : (block + 1) * kQueries - 1);
            }
            const std::uint32_t of_lane = shared + (stage * kQueries + lane) * 4;
#pragma unroll
            for (int i = 0; i < kPerLane; ++i) {
              const float negated = lse[i] == -INFINITY ? lse[i] : lse[i] * -1.4426950408889634F;
              store_float(of_lane + Memory::kLse + i * 128, negated);
              store_float(of_lane + Memory::kDelta + i * 128, -delta[i] * a.delta_scale);
            }
            if ((flags & (kMasked | kWeighted)) != 0) {
#pragma unroll 1
              for (int i = 0; i < kPerLane; ++i) {
                const int index = low + (lane + 32 * i) * run.index_stride;
                int word = (causal ? max(-1, min(kLastIndex, index + shift)) : kLastIndex) * 16;
                if ((flags & kWeighted) != 0)
                  word |= repeat_bits(p.tables.repeats + group.first_repeat, group.repeats, index);
                store_word(of_lane + Memory::kQueryWords + i * 128, word);
              }
            }
            __syncwarp();
            if (lane == 0) barrier_arrive(shared + Memory::q_full(stage));
            ++step;
            row += kQueries;
            low += low_step;
          }
          continue;
        }
        int always = nothing ? kNothing | kMasked : 0;
        if (rows < kQueries || keys.rows < kKeys) always |= kMasked;
        if (group.repeats > 0)
          always |= periodic && whole && run.index_stride == 1 && ((low - phase) & 15) == 0
                        ? kPeriodic
                        : kWeighted;
        const std::byte* lse_row = row_address(p.lse, run, begin + lane, owner);
        const std::byte* delta_row = row_address(p.delta, run, begin + lane, owner);
#pragma unroll 1
        for (; block < stretch; block = next_block, next_block = block + 1) {
          flags = always;
          if (causal && low + shift < keys.high) flags |= kMasked;
          ask_near_end(member, block, next_block >= blocks && member + 1 == members);
          if (next_block >= blocks) flags |= kLastOfMember;
          if (next_block >= blocks && member + 1 == members) {
            flags |= kLastOfTile;
            if (no_more || drawn_item(tile + 1) >= p.items) flags |= kLastOfAll;
          }
          // Statistics and words of rows `lane`, `lane + 32`, ...: fetched before there is room.
          float lse[kPerLane];
          float delta[kPerLane];
          int word[kPerLane];
#pragma unroll
          for (int i = 0; i < kPerLane; ++i) {
            lse[i] = -INFINITY;
            delta[i] = 0;
            word[i] = kAbsentQuery;
            if (lane + 32 * i < rows) {
              const int in_list = block * kQueries + lane + 32 * i;
              if (whole) {
                lse[i] =
                    __ldg(reinterpret_cast<const float*>(lse_row + 32 * i * row_step(p.lse, run)));
                delta[i] = __ldg(
                    reinterpret_cast<const float*>(delta_row + 32 * i * row_step(p.delta, run)));
              } else {
                const Run& its = runs[run_of(runs, queries, in_list)];
                lse[i] =
                    __ldg(reinterpret_cast<const float*>(row_address(p.lse, its, in_list, owner)));
                delta[i] = __ldg(
                    reinterpret_cast<const float*>(row_address(p.delta, its, in_list, owner)));
              }
              if ((flags & (kMasked | kWeighted)) != 0) {
                const int index =
                    index_of(whole ? run : runs[run_of(runs, queries, in_list)], in_list);
                word[i] = (causal ? max(-1, min(kLastIndex, index + shift)) : kLastIndex) * 16;
                if ((flags & kWeighted) != 0)
                  word[i] |=
                      repeat_bits(p.tables.repeats + group.first_repeat, group.repeats, index);
                if (nothing) word[i] = kAbsentQuery;
              }
            }
          }

          const int stage = step & 1;
          barrier_wait(shared + Memory::q_empty(stage), ((step >> 1) & 1) ^ 1);
          if (lane == 0) {  // no box, unless nothing is added
            const std::uint32_t note = shared + Memory::kStepNotes + (step & 3) * kStepNote;
            store_words4(note, flags | member << kMemberShift, owner.head, 0, begin);
            store_words4(note + 16, owner.batch, owner.unit, no_more ? -1 : p.first_item + drawn,
                         queries.ascending != 0 ? high : block * kQueries + rows - 1);
          }
#pragma unroll 1
          for (int which = 0; which < 2; ++which) {
            const std::uint32_t full =
                shared + (which == 0 ? Memory::q_full(stage) : Memory::dout_full(stage));
            const std::uint32_t target =
                shared + (which == 0 ? Memory::kQ : Memory::kDout) + stage * Memory::kQueryTile;
            if (boxed) {
              if (lane == which) {
                barrier_arrive_expecting(full, Memory::kQueryTile);
#pragma unroll
                for (int h = 0; h < kDim / 64; ++h)
                  load_box(target + h * Memory::kQueryBlock, which == 0 ? &a.q : &a.dout, full,
                           h * 64, map_head, remainder, row, map_batch, policy_keep());
              }
            } else {
              gather<kDim, kQueries>(a, which == 0 ? p.q : p.dout, group.queries, block * kQueries,
                                     rows, owner, target);
              if (lane == 0) barrier_arrive(full);
            }
          }
          const std::uint32_t of_lane = shared + (stage * kQueries + lane) * 4;
#pragma unroll
          for (int i = 0; i < kPerLane; ++i) {
            // An infinite L of either sign: exp2(-inf) is the P of no attention.
            const float negated = lse[i] == -INFINITY ? lse[i] : lse[i] * -1.4426950408889634F;
            store_float(of_lane + Memory::kLse + i * 128, negated);
            store_float(of_lane + Memory::kDelta + i * 128, -delta[i] * a.delta_scale);
            store_word(of_lane + Memory::kQueryWords + i * 128, word[i]);
          }
          __syncwarp();
          if (lane == 0) barrier_arrive(shared + Memory::q_full(stage));
          ++step;
          row += kQueries;
          low += kQueries * run.index_stride;
          high += kQueries * run.index_stride;
          lse_row += kQueries * row_step(p.lse, run);
          delta_row += kQueries * row_step(p.delta, run);
        }
      }
    }
  }
}

// Adds staged dQ to global memory. One warp for each half, which one consumer group computes:
// consumers that add by themselves wait for these adds at every proxy fence.
// In order, where the schedule says so: once what the item before has added is there.
template <int kDim>
__device__ __forceinline__ void add_query_gradients(const BackwardArguments& a,
                                                    std::uint32_t shared, int half) {
  using Memory = Shared<kDim>;
  constexpr int kColumns = Memory::kColumns;
  constexpr int kLanes = kColumns / 4;  // for a row
  const BackwardParams& p = a.params;
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int first_row = Memory::kByRows ? half * kStagedRows : 0;
  const int first_column = Memory::kByRows ? 0 : half * kColumns;
  const std::uint32_t staging = shared + Memory::kStaging + half * Memory::kStagingOfGroup;
  const bool ordered = a.schedule.turns != nullptr;
  Turn turn;
  for (int step = 0;; ++step) {
    barrier_wait(shared + Memory::staged(half, step & 1), (step >> 1) & 1);
    const std::uint32_t note = shared + Memory::kStepNotes + (step & 3) * kStepNote;
    const int4 first = load_words4(note);
    const int4 second = load_words4(note + 16);
    if (ordered && step == 0) turn.read(a.schedule, note, half);
    __syncwarp();  // all lanes have read it: it may be overwritten once the staging is empty
    if (ordered) {
      turn.wait();
      fence_global_for_async();
      __syncwarp();
    }
    if ((first.x & kBox) != 0) {
      if (lane == 0) {
#pragma unroll
        for (int i = 0; i < kColumns / 32; ++i)
          add_box(&a.dq, staging + i * Memory::kStagingBox, first_column + i * 32, first.y, first.z,
                  first.w + first_row, second.x);
        bulk_commit();
        bulk_wait_read<0>();
      }
    } else if ((first.x & kNothing) == 0) {
      const RowList& list = p.tables.groups[p.tables.items[second.z].group].queries;
      const int begin = first.w + first_row;
      const int rows = min(kStagedRows, list.rows - begin);
      const int column = lane % kLanes * 4;
      for (int base = 0; base < rows; base += 32) {
        const std::byte* mine = nullptr;
        if (base + lane < rows) {
          const int row = begin + base + lane;
          mine = row_address(p.dq, p.tables.runs[run_of(p.tables.runs, list, row)], row,
                             {second.x, first.y, second.y});
        }
        for (int i = 0; i < 32; i += 32 / kLanes) {
          const int row = i + lane / kLanes;
          auto* const target =
              reinterpret_cast<float*>(const_cast<std::byte*>(from_lane(mine, row)));
          if (target != nullptr) {
            add_to_global(target + first_column + column,
                          load_floats4(staging + column / 32 * Memory::kStagingBox +
                                       swizzled(base + row, column % 32 / 4)));
          }
        }
      }
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(shared + Memory::staging_empty(half));
    if (ordered && turn.item >= 0) {
      if ((first.x & (kBox | kNothing)) == 0) {
        fence_gpu();  // every lane has added
        __syncwarp();
      }
      // At once: the next in the chain is not far behind. A step late, when there is nothing to
      // wait for, took up to twice as long in all.
      if (lane == 0) {
        bulk_wait<0>();
        fence_global_for_async();
        store_release(turn.progress, turn.reached);
      }
    }
    if ((first.x & kLastOfAll) != 0) break;
    // The note of the next step is there: dQ is announced two steps late.
    if (ordered)
      turn.read(a.schedule, shared + Memory::kStepNotes + ((step + 1) & 3) * kStepNote, half);
  }
  if (lane == 0) bulk_wait<0>();
}

}  // namespace annulus::cuda::sm90
