#pragma once

#include "kernels/cuda/sm90/backward/rows.cuh"

// The warp of the Hopper backward kernel that loads queries.
namespace annulus::cuda::sm90 {

// Loads queries: the steps of one tile after the other. One warp.
template <int kDim, bool kWindow>
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
    // Blocks without an item, and keys that no query sees, have one step in which all pairs are
    // hidden.
    bool nothing = drawn >= p.items;
    const bool no_more = nothing;
    if (nothing) drawn = 0;
    const Item item = p.tables.items[p.first_item + drawn];
    const Group& group = p.tables.groups[item.group];
    const RowList queries = group.queries;
    const bool limited = group.most != kNoMost || (kWindow && group.least != kNoLeast);
    const auto [least, most] = limits_of(group);
    const RowBlock keys = row_block(runs, group.keys, item.begin, item.rows);
    int blocks = (queries.rows + kQueries - 1) / kQueries;
    // The first block at or after `block` whose row in this place has at least this index. For
    // ascending lists.
    const auto first_with = [&](int block, int place, int index) {
      int end = blocks;
      while (block < end) {
        const int middle = (block + end) / 2;
        const int row = min(queries.rows - 1, middle * kQueries + place);
        if (index_of(runs[run_of(runs, queries, row)], row) >= index) {
          end = middle;
        } else {
          block = middle + 1;
        }
      }
      return block;
    };
    // The first block at or after `block` that sees any key of the tile.
    const auto seeing = [&](int block) {
      if (!limited) return block;
      if (queries.ascending != 0) return first_with(block, kQueries - 1, keys.low - most);
      for (; block < blocks; ++block) {
        const int begin = block * kQueries;
        const RowBlock rows = row_block(runs, queries, begin, min(kQueries, queries.rows - begin));
        if (rows.high + most >= keys.low && (!kWindow || rows.low + least <= keys.high)) break;
      }
      return block;
    };
    const auto last_seeing = [&](int high) {
      return kWindow ? min(high, keys.high - least) : high;
    };
    // All blocks from the first one that sees the tile on see it.
    const bool all_after = !limited || queries.ascending != 0;
    int members = item.members;
    int first_block = seeing(0);
    int end_block = blocks;
    if (kWindow && queries.ascending != 0 && group.least != kNoLeast)
      end_block = first_with(first_block, 0, keys.high - least + 1);
    if (nothing || first_block >= end_block) {
      nothing = true;
      members = 1;
      first_block = blocks - 1;
    } else {
      blocks = end_block;
    }
    // The same as in bring_tiles.
    bool periodic = group.repeats > 0 && keys.whole && runs[keys.run].index_stride == 1;
    for (int i = 0; i < group.repeats; ++i)
      periodic &= (16 % p.tables.repeats[group.first_repeat + i].stride) == 0;
    const int phase = runs[queries.begin].index;

    bool asked = false;  // whether the next item was taken
    const auto ask_near_end = [&](int member, int block, bool last) {
      if (asked || !(last || (member + 1 == members && block + 1 + kDrawAhead >= blocks))) return;
      asked = true;
      if (lane == 0) barrier_arrive(shared + Memory::draw());
    };
    for (int member = 0; member < members; ++member) {
      const Member of = p.tables.members[item.member + member];
      const RowOwner owner{item.batch, of.head, of.unit};
      for (int block = first_block; block < blocks;) {
        int begin = block * kQueries;
        const int rows = min(kQueries, queries.rows - begin);
        const Run run = runs[run_of(runs, queries, begin)];
        const int left = run.before + run.count - begin;  // remaining rows of the run
        const bool whole = rows <= left;
        // A stretch of full blocks of one run is processed together; any other block is a stretch
        // of its own. The last block of a list may have fewer rows. It then begins with rows of the
        // block before it, which are hidden, so that it is a box, too: gathering its rows took
        // twice as long as a step.
        const int again = whole && begin - run.before >= kQueries - rows ? kQueries - rows : 0;
        const bool boxed = all_after && left + again >= kQueries && queries_by_box(a, run);
        const int stretch =
            boxed ? block + max(1, min(left / kQueries, blocks - block)) : block + 1;
        if (boxed) begin -= again;
        // Coordinates of the box: of Q in lane 0 and of dO in lane 1, which load them, and of dQ in
        // lane 2, which writes the note.
        int remainder = 0;
        int row = 0;
        int map_head = 0;
        if (boxed) {
          const LaunchTraits& traits = a.schedule.traits;
          const MapPlace at =
              lane == 2 ? place_in_map(p.dq, traits.query_gradients, kDim * 4, run, begin, owner)
                        : place_in_map(lane == 0 ? p.q : p.dout, traits.queries, kDim * 2, run,
                                       begin, owner);
          remainder = at.row % run.stride;
          row = at.row / run.stride;
          map_head = at.head;
        }
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
          if (keys.rows < kKeys || again > 0) flags_of |= kMasked;
          if (group.repeats > 0)
            flags_of |= periodic && run.index_stride == 1 && ((low - phase) & 15) == 0 ? kPeriodic
                                                                                       : kWeighted;
          const int masked_below = keys.high - most;
          const int lower_above = keys.low - least;
          // The last block of the tile, if it is in this stretch.
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
            if (kWindow && low + low_step - run.index_stride > lower_above) flags |= kLower;
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
                           queries.ascending != 0 ? last_seeing(low + low_step - run.index_stride)
                                                  : block * kQueries + rows - 1);
            }
            const std::uint32_t of_lane = shared + (stage * kQueries + lane) * 4;
#pragma unroll
            for (int i = 0; i < kPerLane; ++i) {
              const float negated = lse[i] == -INFINITY ? lse[i] : lse[i] * -1.4426950408889634F;
              store_float(of_lane + Memory::kLse + i * 128, negated);
              store_float(of_lane + Memory::kDelta + i * 128, -delta[i] * a.delta_scale);
            }
            if ((flags & kWords) != 0) {
#pragma unroll 1
              for (int i = 0; i < kPerLane; ++i) {
                const int index = low + (lane + 32 * i) * run.index_stride;
                int word = max(-1, min(kLastIndex, index + most)) * 16;
                if ((flags & kWeighted) != 0)
                  word |= repeat_bits(p.tables.repeats + group.first_repeat, group.repeats, index);
                if (lane + 32 * i < again) word = kAbsentQuery;
                store_word(of_lane + Memory::kQueryWords + i * 128, word);
              }
            }
            barrier_arrive(shared + Memory::q_full(stage));
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
          if (low + most < keys.high) flags |= kMasked;
          if (kWindow && high + least > keys.low) flags |= kLower;
          ask_near_end(member, block, next_block >= blocks && member + 1 == members);
          if (next_block >= blocks) flags |= kLastOfMember;
          if (next_block >= blocks && member + 1 == members) {
            flags |= kLastOfTile;
            if (no_more || drawn_item(tile + 1) >= p.items) flags |= kLastOfAll;
          }
          // Statistics and words of rows `lane`, `lane + 32`, ...: loaded before there is room for
          // them.
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
              if ((flags & kWords) != 0) {
                const int index =
                    index_of(whole ? run : runs[run_of(runs, queries, in_list)], in_list);
                word[i] = max(-1, min(kLastIndex, index + most)) * 16;
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
                         queries.ascending != 0 ? last_seeing(high) : block * kQueries + rows - 1);
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
            }
          }
          if (!boxed) {  // one wait for both
            finish_gathering();
            if (lane < 2)
              barrier_arrive(shared +
                             (lane == 0 ? Memory::q_full(stage) : Memory::dout_full(stage)));
          }
          const std::uint32_t of_lane = shared + (stage * kQueries + lane) * 4;
#pragma unroll
          for (int i = 0; i < kPerLane; ++i) {
            // For an infinite L of either sign, exp2(-inf) makes all P of the row 0.
            const float negated = lse[i] == -INFINITY ? lse[i] : lse[i] * -1.4426950408889634F;
            store_float(of_lane + Memory::kLse + i * 128, negated);
            store_float(of_lane + Memory::kDelta + i * 128, -delta[i] * a.delta_scale);
            store_word(of_lane + Memory::kQueryWords + i * 128, word[i]);
          }
          barrier_arrive(shared + Memory::q_full(stage));
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

}  // namespace annulus::cuda::sm90
