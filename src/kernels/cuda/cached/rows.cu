// Rows of a cache besides attention: copies, and the merge of partial results, of splits and of
// ranks.

#include "kernels/cuda/cached/kernels.h"
#include "kernels/cuda/cached/launch.cuh"
#include "kernels/cuda/rows/access.cuh"
#include "kernels/cuda/rows/sink.cuh"

#include <algorithm>
#include <cmath>
#include <iterator>

namespace annulus::cuda {
namespace {

constexpr int kMergeColumns = 32;  // of O, that a block of merge_splits takes

__device__ float lane_max(float x) {
  for (int distance = 16; distance > 0; distance /= 2)
    x = fmaxf(x, __shfl_xor_sync(0xffffffffU, x, distance));
  return x;
}

__device__ float lane_sum(float x) {
  for (int distance = 16; distance > 0; distance /= 2)
    x += __shfl_xor_sync(0xffffffffU, x, distance);
  return x;
}

// By a warp: the largest log-sum-exp of `count` parts (NaN if there is one), and the sum of their
// exponentials relative to it.
struct LseSum {
  float most = -INFINITY;
  float sum = 0;

  template <typename Lse>
  __device__ LseSum(int count, const Lse& lse) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    bool poisoned = false;
    for (int i = lane; i < count; i += 32) {
      const float x = lse(i);
      poisoned = poisoned || isnan(x);
      most = fmaxf(most, x);
    }
    most = __any_sync(0xffffffffU, poisoned) != 0 ? NAN : lane_max(most);
    for (int i = lane; i < count && most != -INFINITY; i += 32) sum += expf(lse(i) - most);
    sum = lane_sum(sum);
  }
  [[nodiscard]] __device__ float lse() const { return most == -INFINITY ? most : most + logf(sum); }
  [[nodiscard]] __device__ float weight(float x) const {
    return most == -INFINITY ? 0.0F : expf(x - most) / sum;
  }
};

// A part without keys changes nothing, whatever its O.
__device__ float add_weighted(float weight, float o, float value) {
  return fmaf(weight, weight == 0.0F ? 0.0F : o, value);
}

// A block for some columns of each row and query head of a run. Warps take parts in turns, and are
// summed in their order.
__global__ void __launch_bounds__(kThreads)
    merge_splits_kernel(const __grid_constant__ AttendParams p) {
  __shared__ float weights[kMostParts];
  __shared__ float sums[kWarps][kMergeColumns];
  wait_for_earlier_kernels();
  const AttendRun& item = p.run[blockIdx.z];
  const std::int64_t at = blockIdx.x;
  if (at >= item.run.tokens * p.heads || item.splits == 1) return;
  const std::int64_t token = at / p.heads;
  const int head = static_cast<int>(at % p.heads);
  const int kv_head = head / p.ratio();
  const std::int64_t row = token * p.token_rows + head % p.ratio();
  const std::int64_t tile = row / p.tile_rows;
  const std::int64_t first =
      (item.first_part + (tile * p.kv_heads + kv_head) * item.splits) * p.tile_rows +
      row % p.tile_rows;
  const int thread = static_cast<int>(threadIdx.x);
  for (int i = thread; i < item.splits; i += kThreads)
    weights[i] = p.part_lse[first + i * p.tile_rows];
  __syncthreads();
  const LseSum all(item.splits, [&](int i) { return weights[i]; });
  __syncthreads();
  for (int i = thread; i < item.splits; i += kThreads) weights[i] = all.weight(weights[i]);
  __syncthreads();
  const int lane = thread % 32;
  const int warp = thread / 32;
  const int d = static_cast<int>(blockIdx.y) * kMergeColumns + lane;
  const float* const o = p.part_o + first * p.head_dim + min(d, p.head_dim - 1);
  const std::int64_t step = std::int64_t{p.tile_rows} * p.head_dim;
  float value = 0;
#pragma unroll 8
  for (int i = warp; i < item.splits; i += kWarps)
    value = add_weighted(weights[i], o[i * step], value);
  sums[warp][lane] = value;
  __syncthreads();
  if (warp != 0) return;
  for (int w = 1; w < kWarps; ++w) value += sums[w][lane];
  if (d < p.head_dim) item.run.o[at * p.head_dim + d] = value;
  if (blockIdx.y == 0 && lane == 0) item.run.lse[at] = all.lse();
}

// A warp for each row and query head.
template <typename Params>
__global__ void __launch_bounds__(kThreads) merge_rows_kernel(const __grid_constant__ Params p) {
  wait_for_earlier_kernels();
  const RowCopy& copy = p.copies[blockIdx.y];
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
       i < copy.count * p.heads; i += static_cast<std::int64_t>(gridDim.x) * kWarps) {
    const int head = static_cast<int>(i % p.heads);
    const std::int64_t from = (copy.from_row + i / p.heads) * p.heads + head;
    const std::int64_t row = copy.to_row + i / p.heads;
    const LseSum all(p.parts, [&](int part) { return p.part[part].lse[from]; });
    const WithSink end = with_sink(all.lse(), sink_of(p.sinks, head));
    std::byte* const out = row_at(p.o, copy.to_batch, row, head);
    for (int d = lane; d < p.head_dim; d += 32) {
      float value = 0;
      for (int part = 0; part < p.parts; ++part) {
        const PartialRows& rows = p.part[part];
        value = add_weighted(all.weight(rows.lse[from]), rows.o[from * p.head_dim + d], value);
      }
      store(out, p.dtype, d, value * end.kept);
    }
    if (lane == 0) *reinterpret_cast<float*>(row_at(p.lse, copy.to_batch, row, head)) = end.lse;
  }
}

template <typename Unit>
__global__ void copy_rows_kernel(const __grid_constant__ CopyRowsParams p) {
  const RowCopy& copy = p.copies[blockIdx.y];
  const std::int64_t units = p.row_bytes / static_cast<std::int64_t>(sizeof(Unit));
  const std::int64_t count = copy.count * p.heads * units;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += static_cast<std::int64_t>(gridDim.x) * kThreads) {
    const std::int64_t unit = i % units;
    const int head = static_cast<int>(i / units % p.heads);
    const std::int64_t row = i / units / p.heads;
    const auto* from =
        reinterpret_cast<const Unit*>(row_at(p.from, copy.from_batch, copy.from_row + row, head));
    auto* to = reinterpret_cast<Unit*>(row_at(p.to, copy.to_batch, copy.to_row + row, head));
    to[unit] = from[unit];
  }
}

template <typename Params>
std::int64_t most_rows(const Params& params) {
  std::int64_t most = 0;
  for (int i = 0; i < params.count; ++i) most = std::max(most, params.copies[i].count);
  return most;
}

unsigned blocks_for(std::int64_t items, std::int64_t items_of_block) {
  const std::int64_t blocks = (items + items_of_block - 1) / items_of_block;
  return static_cast<unsigned>(std::clamp<std::int64_t>(blocks, 1, 4096));
}

}  // namespace

bool kernels_wait() {
  cudaFuncAttributes attributes{};
  return cudaFuncGetAttributes(&attributes, merge_splits_kernel) == cudaSuccess &&
         attributes.ptxVersion >= 90;
}

cudaError_t merge_splits(const AttendParams& params, std::int64_t most_tokens,
                         cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(most_tokens * params.heads),
                  static_cast<unsigned>((params.head_dim + kMergeColumns - 1) / kMergeColumns),
                  static_cast<unsigned>(params.runs));
  return launch_early(merge_splits_kernel, grid, kThreads, 0, params, stream);
}

cudaError_t merge_rows(const MergeRowsParams& params, cudaStream_t stream) {
  const dim3 grid(blocks_for(most_rows(params) * params.heads, kWarps),
                  static_cast<unsigned>(params.count));
  // As few parameters as a usual call needs: starting a kernel with 26 KB of them takes long.
  using Few = MergeRowsTable<8, 32>;
  Few few;
  if (params.parts > std::ssize(few.part) || params.count > std::ssize(few.copies))
    return launch_early(merge_rows_kernel<MergeRowsParams>, grid, kThreads, 0, params, stream);
  static_cast<MergeRowsHeader&>(few) = params;
  std::copy_n(params.part, params.parts, few.part);
  std::copy_n(params.copies, params.count, few.copies);
  return launch_early(merge_rows_kernel<Few>, grid, kThreads, 0, few, stream);
}

cudaError_t copy_rows(const CopyRowsParams& params, cudaStream_t stream) {
  const auto aligned_to = [&](std::int64_t bytes) {
    std::uint64_t all = static_cast<std::uint64_t>(params.row_bytes);
    for (const TensorRows* rows : {&params.from, &params.to}) {
      all |= static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(rows->base)) |
             static_cast<std::uint64_t>(rows->batch_step) |
             static_cast<std::uint64_t>(rows->head_step) |
             static_cast<std::uint64_t>(rows->row_step);
    }
    return all % static_cast<std::uint64_t>(bytes) == 0;
  };
  const std::int64_t unit = aligned_to(16) ? 16 : aligned_to(4) ? 4 : 2;
  const dim3 grid(blocks_for(most_rows(params) * params.heads * params.row_bytes / unit, kThreads),
                  static_cast<unsigned>(params.count));
  if (unit == 16) {
    copy_rows_kernel<uint4><<<grid, kThreads, 0, stream>>>(params);
  } else if (unit == 4) {
    copy_rows_kernel<std::uint32_t><<<grid, kThreads, 0, stream>>>(params);
  } else {
    copy_rows_kernel<std::uint16_t><<<grid, kThreads, 0, stream>>>(params);
  }
  return cudaGetLastError();
}

}  // namespace annulus::cuda
