#pragma once

#include "kernels/cuda/sm90/forward/items.cuh"
#include "kernels/cuda/sm90/forward/shared.cuh"
#include "kernels/cuda/sm90/forward/state.cuh"

// Loads rows of items and tiles into shared memory for the Hopper forward kernel.
namespace annulus::cuda::sm90 {

// The rows of an operand of an item, for the threads of a team.
struct Operand {
  int batch, head, unit;
};

// Whether `rows` rows of keys or values can be loaded by bulk copies.
__device__ __forceinline__ bool bulk(const ForwardArguments& a, const Span& span, int rows) {
  return rows == kTile && span.single && keys_mapped(a, a.params.tables.runs + span.run);
}

// Called by a team. Loads all rows, with zeros from `rows` on. Products may read them after the
// team's barrier.
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

// Whether any of 8 numbers is not finite: its exponent is all ones, so adding one to it carries
// into the sign bit.
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

// Called by a team after its barrier: finds the rows of a tile in shared memory with non-finite
// values, clears them and records them in `stage`.
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

// By a team: zeroes the rows of a tile from `rows` on, which a bulk copy has brought from behind
// the list. Nobody sees these keys, but 0 * NaN is NaN.
template <int kDim>
__device__ __forceinline__ void clear_rows(std::uint32_t tile, int rows, int thread) {
  constexpr int kChunks = kDim / 8;
  for (int i = rows * kChunks + thread; i < kTile * kChunks; i += kTeam) {
    const int chunk = i % kChunks;
    asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(tile + (chunk / 8) * kBlockBytes +
                                                                  swizzled(i / kChunks, chunk % 8)),
                 "r"(0U)
                 : "memory");
  }
  fence_shared_for_async();
}

// Indices that all queries of an item see.
struct Everyone {
  int from, until;
  // Whether any query does not see any index from `least` to `most`.
  template <Limits kLimits>
  __device__ __forceinline__ bool hides(int least, int most) const {
    return most > until || (kLimits == Limits::both && least < from);
  }
};
__device__ __forceinline__ Everyone seen_by_everyone(const Plan& plan) {
  return {plan.most + plan.band_least, plan.least + plan.band_most};
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

// Loads rows of K or V from `row` on. Called by one thread; the barrier expects the bytes.
template <int kDim>
__device__ __forceinline__ void load_bulk(std::uint32_t target, std::uint32_t barrier,
                                          const ForwardArguments& a, const CUtensorMap* map,
                                          const Channel& channel, const Plan& plan, int run,
                                          int row, std::uint64_t policy) {
  const std::uint32_t at = mapped_row<kDim>(a, channel, run, row, plan.batch, plan.unit);
  const auto stride = static_cast<std::uint32_t>(a.traits.key_stride);
  load_tile<kDim>(target, map, barrier, plan.map_head, static_cast<int>(at % stride),
                  static_cast<int>(at / stride), plan.map_batch, policy);
}

// Q and K. One thread loads the tiles of items. The other warp looks up items ahead, as many as
// there are slots, because short items complete faster than they are looked up. Items with gathered
// rows take both warps.
template <typename T, int kDim, Limits kLimits, PairWeights kWeights, bool kInPieces>
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
  int slot_parity = 0;
  int query_parity = 0;
  int at = blockIdx.x;
  while (true) {
    const std::uint32_t known = shared_address(&control.rows_known[0]) + 8 * slot_at;
    const std::uint32_t free = shared_address(&control.slots_free[0]) + 8 * slot_at;
    if (ahead) {
      barrier_wait(free, slot_parity ^ 1);
      at = look_up_rows<kLimits, kWeights, kDim, kInPieces>(
          a, at, control.plans[slot_at], control.slots[slot_at], known, thread - 32);
    } else {
      barrier_wait(known, slot_parity);
    }
    const Plan& plan = control.plans[slot_at];
    if (++slot_at == kSlots) {
      slot_at = 0;
      slot_parity ^= 1;
    }
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
    const bool together = plan.bulk == 0 || plan.plain == 0;
    if (together) team_sync(kTeamBarrier);  // Q of the previous item has been read
    const Group& group = tables.groups[plan.group];
    if (plan.bulk == 0) {
      const Operand queries{plan.batch, plan.head, plan.unit};
      gather<kDim>(tiles, control.address[0], p.q, queries, tables.runs, group.queries, plan.begin,
                   plan.rows, thread, kTeamBarrier);
      team_sync(kTeamBarrier);
      if (thread == 0) barrier_arrive(queries_full);
    }

    if (plan.plain != 0) {
      const int count = plan.tiles[0] + plan.tiles[1];
      if (thread == 0) {
        const Everyone everyone = seen_by_everyone(plan);
        int s = stage;
        int phase = parity;
        int left = count;
#pragma unroll 1
        for (int j = 0; j < 2; ++j) {
          const int head = plan.map_head;
          const int batch = plan.map_batch;
          const int remainder = plan.run_remainder[j];
          const int quotient = plan.run_quotient[j];
          const int step = plan.run_step[j];
          const int index = plan.run_index[j];
          int rows = min(kTile, plan.run_rows[j] - (plan.tiles[j] - 1) * kTile);
#pragma unroll 1
          for (int t = plan.tiles[j] - 1; t >= 0; --t) {
            --left;
            int4 info;
            info.x = left == 0 ? kLast : 0;
            info.y = rows;
            info.z = index + t * kTile * step;
            info.w = step;
            if (rows < kTile) info.x |= kMasked;
            rows = kTile;
            if (kHides<kLimits> && plan.compare != 0 &&
                everyone.hides<kLimits>(info.z, info.z + (kTile - 1) * step))
              info.x |= kMasked | kCompare;
            if (kHides<kLimits>) info.z -= plan.band_most;
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
      const Operand keys{plan.batch, plan.kv_head, plan.unit};
      auto walk = key_tiles<kLimits>(tables.runs, group, plan);
      int tile = walk.first();
      const int shift = plan.band_most;
      const bool compare = kHides<kLimits> && plan.compare != 0;
      const Everyone everyone = seen_by_everyone(plan);
      while (tile >= 0) {
        const Span span = walk.span;
        const int count = walk.rows(tile);
        const int next = walk.visible(tile - 1);
        int flags = next < 0 ? kLast : 0;
        if (count < kTile) flags |= kMasked;
        if (compare && everyone.hides<kLimits>(span.least, span.most))
          flags |= kMasked | kCompare | (span.single ? 0 : kTable);

        const std::uint32_t full = shared_address(&control.keys_full[stage]);
        if (thread == 0) barrier_wait(shared_address(&control.keys_empty[stage]), parity ^ 1);
        team_sync(kTeamBarrier);
        KeyStage& info = control.keys[stage];
        if (thread == 0) {
          info.flags = flags;
          info.rows = count;
          info.first = span.least - shift;  // for a single run: of the first row
          info.stride = __ldg(&tables.runs[span.run].index_stride);
        }
        if ((kHides<kLimits> && (flags & kTable) != 0) || kWeights == PairWeights::general) {
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
        if (bulk(a, span, count)) {
          if ((kHides<kLimits> && (flags & kTable) != 0) || kWeights == PairWeights::general)
            team_sync(kTeamBarrier);
          if (thread == 0) {
            barrier_arrive_expecting(full, L::kTileBytes);
            load_bulk<kDim>(target, full, a, &a.k, p.k, plan, span.run, tile * kTile, keep);
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
    if (together) team_sync(kTeamBarrier);
    __syncwarp();  // the other lanes do not spin while one thread loads
    if (thread == 0) barrier_arrive(free);
  }
}

// V, and pieces of the state.
template <typename T, int kDim, Limits kLimits, PairWeights kWeights, bool kInPieces>
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
  int state_parity = 0;
  while (true) {
    barrier_wait(shared_address(&control.rows_known[0]) + 8 * slot_at, slot_parity);
    const Plan& plan = control.plans[slot_at];
    const Slot& slot = control.slots[slot_at];
    const std::uint32_t free = shared_address(&control.slots_free[0]) + 8 * slot_at;
    if (plan.end != 0) break;
    if (++slot_at == kSlots) {
      slot_at = 0;
      slot_parity ^= 1;
    }
    const Everyone everyone = seen_by_everyone(plan);
    if (plan.plain != 0) {
      int left = plan.tiles[0] + plan.tiles[1];
      int j = plan.tiles[0] > 0 ? 0 : 1;
      int t = plan.tiles[j] - 1;
      int rows = min(kTile, plan.run_rows[j] - t * kTile);  // of the tile; later ones are full
      // A masked or a ragged tile: the team looks through it.
      const auto look_through = [&] {
        const std::uint32_t target = tiles + L::kValues + stage * L::kTileBytes;
        ValueStage& info = control.values[stage];
        if (thread == 0) {
          barrier_wait(shared_address(&control.values_empty[stage]), parity ^ 1);
          barrier_arrive_expecting(landed, L::kTileBytes);
          load_tile<kDim>(target, &a.v, landed, plan.map_head, plan.value_remainder[j],
                          plan.value_quotient[j] + t * kTile, plan.map_batch, keep);
          info.any = 0;
        }
        team_sync(kTeamBarrier);
        barrier_wait(landed, landed_parity);
        landed_parity ^= 1;
        if (rows < kTile) {
          clear_rows<kDim>(target, rows, thread);
          if (kHides<kLimits>) team_sync(kTeamBarrier);
          rows = kTile;
        }
        if constexpr (kHides<kLimits>) confine<T, kDim>(target, info, thread, kTeamBarrier);
        team_sync(kTeamBarrier);
        if (thread == 0) barrier_arrive(shared_address(&control.values_full[stage]));
        advance(stage, parity, 1, L::kValueStages);
        --left;
        if (--t < 0) {
          j = 1;
          t = plan.tiles[1] - 1;
        }
      };
      int masked = 0;  // at the end
      if (rows < kTile) look_through();
      if constexpr (kHides<kLimits>) {
        // Tiles that cross the upper limit come first, those that cross the lower limit last.
        const auto hides = [&] {
          const int least = plan.run_index[j] + t * kTile * plan.run_step[j];
          return everyone.hides<kLimits>(least, least + (kTile - 1) * plan.run_step[j]);
        };
        while (plan.compare != 0 && left > 0 && hides()) look_through();
        if (kLimits == Limits::both && plan.compare != 0) {
          for (int run = 0; run < 2; ++run) {
            const int below = everyone.from - plan.run_index[run];
            if (plan.tiles[run] > 0 && below > 0)
              masked += min(plan.tiles[run], (below - 1) / (kTile * plan.run_step[run]) + 1);
          }
          masked = min(masked, left);
          left -= masked;
        }
      }
      if (thread == 0) {
        int s = stage;
        int phase = parity;
#pragma unroll 1
        for (int more = left; more > 0;) {
          const int head = plan.map_head;
          const int batch = plan.map_batch;
          const int remainder = plan.value_remainder[j];
          const int quotient = plan.value_quotient[j];
#pragma unroll 1
          for (; t >= 0 && (kLimits != Limits::both || more > 0); --t, --more) {
            const std::uint32_t full = shared_address(&control.values_full[0]) + 8 * s;
            const std::uint32_t target = tiles + L::kValues + s * L::kTileBytes;
            barrier_wait(shared_address(&control.values_empty[0]) + 8 * s, phase ^ 1);
            load_tile<kDim>(target, &a.v, full, head, remainder, quotient + t * kTile, batch, keep);
            if (kHides<kLimits>) control.values[s].any = 0;
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
      if (kInPieces && thread == 32) load_state<kDim>(a, tiles, control, plan, slot, state_parity);
      advance(stage, parity, left, L::kValueStages);
      if (kLimits == Limits::both && masked > 0) {
        j = masked > plan.tiles[1] ? 0 : 1;
        t = masked - 1 - (j == 0 ? plan.tiles[1] : 0);
        for (left = masked; left > 0;) look_through();
      }
    } else {
      const Group& group = tables.groups[plan.group];
      const Operand values{plan.batch, plan.kv_head, plan.unit};
      auto walk = key_tiles<kLimits>(tables.runs, group, plan);
      int tile = walk.first();
      while (tile >= 0) {
        const Span span = walk.span;
        const int count = walk.rows(tile);
        const int next = walk.visible(tile - 1);
        const bool look =
            kHides<kLimits> && plan.compare != 0 && everyone.hides<kLimits>(span.least, span.most);
        const std::uint32_t full = shared_address(&control.values_full[stage]);
        if (thread == 0) barrier_wait(shared_address(&control.values_empty[stage]), parity ^ 1);
        team_sync(kTeamBarrier);
        const std::uint32_t target = tiles + L::kValues + stage * L::kTileBytes;
        ValueStage& info = control.values[stage];
        if (kHides<kLimits> && thread == 0) info.any = 0;
        if (bulk(a, span, count)) {
          if (thread == 0) {
            const std::uint32_t barrier = look ? landed : full;
            barrier_arrive_expecting(barrier, L::kTileBytes);
            load_bulk<kDim>(target, barrier, a, &a.v, p.v, plan, span.run, tile * kTile, keep);
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
    if (thread == 0) barrier_arrive(free);
  }
}

}  // namespace annulus::cuda::sm90
