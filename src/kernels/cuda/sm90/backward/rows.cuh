#pragma once

#include "kernels/cuda/rows/lists.cuh"
#include "kernels/cuda/sm90/backward/shared.cuh"

// How the loading warps of the Hopper backward kernel find and gather rows. They have 40 registers,
// so rarely needed values are read again from the tables, which are in the caches.
namespace annulus::cuda::sm90 {

__device__ __forceinline__ const std::byte* from_lane(const std::byte* pointer, int lane) {
  return reinterpret_cast<const std::byte*>(
      __shfl_sync(~0U, reinterpret_cast<unsigned long long>(pointer), lane));
}

// Gathers rows of any runs and sources into a tile of kRows, in the layout of a bulk tensor copy,
// with zeros after the last row. Called by a whole warp. They are there after finish_gathering.
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
}
__device__ __forceinline__ void finish_gathering() {
  copy16_wait();
  fence_shared_for_async();
  __syncwarp();
}

// The repeats of the group that contain the row with this index, as bits.
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

// The coordinates of a row in its map: token and head in the shard, or place in the grid of all
// parcels.
struct MapPlace {
  int row;
  int head;
};
__device__ __forceinline__ MapPlace place_in_map(const Channel& channel, const RowGrid& grid,
                                                 int row_bytes, const Run& run, int row,
                                                 const RowOwner& owner) {
  if (run.source < 0) return {static_cast<int>(position_of(run, row)), owner.head};
  const std::int64_t bytes = row_address(channel, run, row, owner) - grid.base;
  return {static_cast<int>(bytes / row_bytes),
          static_cast<int>(bytes % row_bytes) / static_cast<int>(grid.step)};
}

}  // namespace annulus::cuda::sm90
