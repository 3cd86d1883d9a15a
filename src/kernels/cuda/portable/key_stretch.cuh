#pragma once

#include "kernels/cuda/portable/mma.cuh"
#include "kernels/cuda/portable/rows.cuh"

namespace annulus::cuda {

// Tiles of keys for the 16-bit forward. The addresses of a tile's rows are found one tile before
// they are loaded, so that no thread waits for them, and only if the tile does not continue the
// previous one. Evenly spaced rows, nearly all, are loaded without looking up each.
template <int kKeys>
struct KeyStretch {
  std::byte* at[2][kKeys];  // of K and of V; null: absent. Only of row 0 if even
  std::int64_t step[2];     // if even: bytes from row to row
  int index[kKeys];         // of the first tile; kAbsent: absent
  int highest;              // index; kAbsent: rows are missing, or of several runs
  int first_tile;
  int index_step;                // from tile to tile
  bool even;                     // all rows are present, aligned and evenly spaced
  unsigned char repeats[kKeys];  // if the group has any

  // Describes `tile` and the following tiles that continue it, up to `end` (in the unit of
  // extent_of), and returns the first tile that does not. Called by all threads of a block, one
  // half for K and one for V; the caller synchronises.
  __device__ int fill(const DeviceTables& tables, const Group& group, int tile, int end,
                      const RowOwner& owner, const Channel& k, const Channel& v, bool aligned) {
    static_assert(kKeys % 32 == 0, "warps are for K or for V");
    const RowList& list = group.keys;
    const bool by_index = list.by_index != 0;
    const int first = tile * kKeys;
    const Run run = tables.runs[by_index ? run_with_index(tables.runs, list, first)
                                         : run_of(tables.runs, list, first)];
    const int before = first - (by_index ? run.index : run.before);  // rows of the run
    const int left = min(run.count - before, end - first);
    const bool all = before >= 0 && left >= kKeys && (!by_index || run.index_stride == 1);
    // Repeats are looked up row by row.
    const int tiles = all && aligned && group.repeats == 0 ? left / kKeys : 1;
    const int thread = static_cast<int>(threadIdx.x);
    if (thread >= 2 * kKeys) return tile + tiles;
    const bool values = thread >= kKeys;
    const int r = thread % kKeys;
    PlacedRow row{run.source, run.index + (before + r) * run.index_stride,
                  run.first + static_cast<std::int64_t>(before + r) * run.stride};
    bool present = all;
    if (!all) {
      present = first + r < end;
      if (present && by_index) {
        present = find_index(tables.runs, list, first + r, row);
      } else if (present) {
        row = place_row(tables.runs, list, first + r);
      }
    }
    if (!all || !aligned || r == 0) {
      std::byte* from = nullptr;
      if (present) from = values ? address(v, row, owner) : address(k, row, owner);
      at[values ? 1 : 0][r] = from;
    }
    if (values) {
      if (r == 0) step[1] = row_step(v, run);
      return tile + tiles;
    }
    index[r] = present ? row.index : kAbsent;
    if (group.repeats > 0) {
      repeats[r] = static_cast<unsigned char>(repeats_with(tables.repeats + group.first_repeat,
                                                           group.repeats, present ? row.index : 0));
    }
    if (r == 0) {
      step[0] = row_step(k, run);
      first_tile = tile;
      index_step = all ? kKeys * run.index_stride : 0;
      even = all && aligned;
    }
    if (r == kKeys - 1) highest = all ? row.index : kAbsent;
    return tile + tiles;
  }

  // The offset of the indices of one of the tiles.
  __device__ int index_offset(int tile) const { return (tile - first_tile) * index_step; }

  // Loads K (channel 0) or V (1) of one of the tiles. Called by all threads of a block.
  template <int kThreads, typename T, int kDim>
  __device__ void load(SharedTile<T, kKeys, kDim>& to, int channel, int tile, int head_dim,
                       bool aligned, const void* somewhere) const {
    constexpr int kChunks = kDim / 8;
    constexpr int kRowsAtOnce = kThreads / kChunks;
    const int row = static_cast<int>(threadIdx.x) / kChunks;
    const int chunk = static_cast<int>(threadIdx.x) % kChunks;
    const bool present = chunk * 8 < head_dim;
    if (!even) {
#pragma unroll 1
      for (int r = row; r < kKeys; r += kRowsAtOnce) {
        const std::byte* start = at[channel][r];
        const bool there = present && start != nullptr;
        to.load_chunk(r, chunk,
                      there ? start + chunk * 16 : static_cast<const std::byte*>(somewhere), there,
                      head_dim, aligned);
      }
      return;
    }
    const std::int64_t distance = present ? step[channel] : 0;
    const std::byte* from =
        present ? at[channel][0] + chunk * 16 + (row + (tile - first_tile) * kKeys) * distance
                : static_cast<const std::byte*>(somewhere);
#pragma unroll
    for (int i = 0; i < kKeys / kRowsAtOnce; ++i) {
      copy_async(to.chunk(row + i * kRowsAtOnce, chunk), from, present);
      from += kRowsAtOnce * distance;
    }
  }
};

}  // namespace annulus::cuda
