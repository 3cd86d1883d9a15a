#pragma once

#include "kernels/cuda/sm90/backward/rows.cuh"

// The warp of the Hopper backward kernel that loads tiles of keys.
namespace annulus::cuda::sm90 {

// Takes the items, and loads K and V of one tile after the other. One warp.
template <int kDim, bool kWindow>
__device__ __forceinline__ void bring_tiles(const BackwardArguments& a, std::uint32_t shared) {
  using Memory = Shared<kDim>;
  const BackwardParams& p = a.params;
  const Run* const runs = p.tables.runs;
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const auto earlier_of = [&](int number) {
    return p.key_sums.earlier == nullptr ? ~0U : __ldg(p.key_sums.earlier + number);
  };
  int drawn = static_cast<int>(blockIdx.x);
  for (int tile = 0;; ++tile) {
    if (tile > 0) barrier_wait(shared + Memory::draw(), (tile - 1) & 1);
    if (a.schedule.next_item != nullptr) {
      if (lane == 0) drawn = atomicAdd(a.schedule.next_item, 1);
      drawn = __shfl_sync(~0U, drawn, 0);
    }
    // Before waiting for room, because the steps of the previous tile must know whether they are
    // the last.
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
      const BandLimits band = kWindow ? limits_of(group) : BandLimits{};
      // A block without an item gets one without rows.
      store_words4(note + 32, whole ? -1 : number, drawn < p.items ? item.rows : 0,
                   static_cast<std::int32_t>(earlier_of(number)), (band.most - band.least) * 16);
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
          // Lanes 0-15 have the repeats of 16 keys, 16-31 those of 16 queries. Fragments need
          // queries 2c, 2c + 1, 2c + 8, 2c + 9 next to each other.
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
        barrier_arrive(full);
      }
      if (boxed) {
        if (lane == 0) {
          barrier_arrive_expecting(full, Memory::kKeyTile);
          const MapPlace at = place_in_map(which == 0 ? p.k : p.v, a.schedule.traits.keys, kDim * 2,
                                           run, item.begin, owner);
          for (int h = 0; h < kDim / 64; ++h)
            load_box(target + h * Memory::kKeyBlock, which == 0 ? &a.k : &a.v, full, h * 64,
                     at.head, at.row % run.stride, at.row / run.stride,
                     run.source < 0 ? owner.batch : 0, policy_stream());
        }
      } else {
        gather<kDim, kKeys>(a, which == 0 ? p.k : p.v, group.keys, item.begin, item.rows, owner,
                            target);
        finish_gathering();
        if (lane == 0) barrier_arrive(full);
      }
    }
    // Prefetches the sums that the end of the tile reads.
    if (whole && (earlier_of(number) >> lane & 1) != 0) {
      for (int i = lane; i < item.rows; i += 32) {
        prefetch_to_l2(row_address(p.dv, run, item.begin + i, owner), kDim * 4);
        prefetch_to_l2(row_address(p.dk, run, item.begin + i, owner), kDim * 4);
      }
    }
    drawn += static_cast<int>(gridDim.x);
  }
}

}  // namespace annulus::cuda::sm90
