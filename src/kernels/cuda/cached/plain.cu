// Few queries and many cached keys, by multiply-adds: fp32 rows and wide heads. A warp takes a key
// at a time for up to four query heads of one token that share the K/V head, its lanes along the
// head's elements, and warps take turns. Bound by memory, too.

#include "kernels/cuda/cached/kernels.h"
#include "kernels/cuda/rows/access.cuh"

#include <cmath>

namespace annulus::cuda {
namespace {

constexpr float kLn2 = 0.69314718055994530942F;

// Four elements of a row from column `c` on.
__device__ float4 load4(const std::byte* row, DType dtype, int c) {
  if (dtype == DType::f32) return __ldg(reinterpret_cast<const float4*>(row) + c / 4);
  const uint2 bits = __ldg(reinterpret_cast<const uint2*>(row) + c / 4);
  float2 low;
  float2 high;
  if (dtype == DType::bf16) {
    low = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&bits.x));
    high = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&bits.y));
  } else {
    low = __half22float2(*reinterpret_cast<const __half2*>(&bits.x));
    high = __half22float2(*reinterpret_cast<const __half2*>(&bits.y));
  }
  return make_float4(low.x, low.y, high.x, high.y);
}

__device__ float dot(float4 a, float4 b, float sum) {
  return fmaf(a.x, b.x, fmaf(a.y, b.y, fmaf(a.z, b.z, fmaf(a.w, b.w, sum))));
}

// kChunks times 128 elements of a row: a lane has four neighbouring ones of each.
template <int kChunks>
__global__ void __launch_bounds__(kThreads)
    plain_kernel(const __grid_constant__ AttendParams p, DType dtype) {
  constexpr int kKeys = kChunks == 1 ? 4 : kChunks == 2 ? 2 : 1;  // under way at a time
  const AttendRun& item = p.run[blockIdx.z];
  const QueryRun& run = item.run;
  const int split = static_cast<int>(blockIdx.y);
  const int kv_head = static_cast<int>(blockIdx.x) % p.kv_heads;
  const int tile = static_cast<int>(blockIdx.x) / p.kv_heads;
  const int tiles_of_token = p.token_rows / kPlainRows;
  const std::int64_t token = tile / tiles_of_token;
  const int first_head = tile % tiles_of_token * kPlainRows;  // of the K/V head's
  if (split >= item.splits || token >= run.tokens) return;
  const int rows = min(kPlainRows, p.ratio() - first_head);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;

  float4 q[kPlainRows][kChunks];
  float4 o[kPlainRows][kChunks];
  float highest[kPlainRows];
  float sum[kPlainRows];
#pragma unroll
  for (int r = 0; r < kPlainRows; ++r) {
    highest[r] = -INFINITY;
    sum[r] = 0;
    const std::byte* from = row_at(p.q, run.batch, run.row + token,
                                   kv_head * p.ratio() + first_head + min(r, rows - 1));
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      float element[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int d = c * 128 + lane * 4 + i;
        element[i] = d < p.head_dim ? load(from, dtype, d) * p.scale : 0.0F;
      }
      q[r][c] = make_float4(element[0], element[1], element[2], element[3]);
      o[r][c] = make_float4(0, 0, 0, 0);
    }
  }

  const RowInterval seen = p.keys.seen_from(run.position + token, run.length);
  const std::int64_t begin = seen.begin + split * item.split_keys;
  const std::int64_t end = min(seen.end, begin + item.split_keys);
  const std::byte* k_rows = row_at(p.keys.k, run.entry, 0, kv_head);
  const std::byte* v_rows = row_at(p.keys.v, run.entry, 0, kv_head);
  const auto row_of = [&](std::int64_t key) {
    return static_cast<unsigned>(key) % static_cast<unsigned>(p.keys.ring_rows) * p.keys.k.row_step;
  };
  for (std::int64_t key = begin + warp * kKeys; key < end; key += kWarps * kKeys) {
    float4 k[kKeys][kChunks];
    float4 v[kKeys][kChunks];
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      // Past the end: the last one again, which counts nothing.
      const std::int64_t at = row_of(min(key + i, end - 1));
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        const int d = c * 128 + lane * 4;
        const bool present = d < p.padded;
        k[i][c] = present ? load4(k_rows + at, dtype, d) : make_float4(0, 0, 0, 0);
        v[i][c] = present ? load4(v_rows + at, dtype, d) : make_float4(0, 0, 0, 0);
      }
    }
#pragma unroll
    for (int r = 0; r < kPlainRows; ++r) {
      float scores[kKeys];
      float most = highest[r];
#pragma unroll
      for (int i = 0; i < kKeys; ++i) {
        float score = 0;
#pragma unroll
        for (int c = 0; c < kChunks; ++c) score = dot(q[r][c], k[i][c], score);
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2)
          score += __shfl_xor_sync(0xffffffffU, score, distance);
        scores[i] = score;
        if (key + i < end) most = fmaxf(most, score);
      }
      const float reference = most == -INFINITY ? 0.0F : most;
      const float factor = highest[r] == reference ? 1.0F : exp2f(highest[r] - reference);
      highest[r] = most;
      sum[r] *= factor;
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        o[r][c].x *= factor;
        o[r][c].y *= factor;
        o[r][c].z *= factor;
        o[r][c].w *= factor;
      }
#pragma unroll
      for (int i = 0; i < kKeys; ++i) {
        if (key + i >= end) continue;
        const float weight = exp2f(scores[i] - reference);
        sum[r] += weight;
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
          o[r][c].x = fmaf(weight, v[i][c].x, o[r][c].x);
          o[r][c].y = fmaf(weight, v[i][c].y, o[r][c].y);
          o[r][c].z = fmaf(weight, v[i][c].z, o[r][c].z);
          o[r][c].w = fmaf(weight, v[i][c].w, o[r][c].w);
        }
      }
    }
  }

  // Warps are merged row by row.
  __shared__ float4 ends[kWarps][kChunks * 32];
  __shared__ float ends_highest[kWarps][kPlainRows];
  __shared__ float ends_sum[kWarps][kPlainRows];
  if (lane == 0) {
#pragma unroll
    for (int r = 0; r < kPlainRows; ++r) {
      ends_highest[warp][r] = highest[r];
      ends_sum[warp][r] = sum[r];
    }
  }
#pragma unroll
  for (int r = 0; r < kPlainRows; ++r) {
    __syncthreads();
#pragma unroll
    for (int c = 0; c < kChunks; ++c) ends[warp][c * 32 + lane] = o[r][c];
    __syncthreads();
    if (r >= rows) continue;
    float most = -INFINITY;
    for (int w = 0; w < kWarps; ++w) most = fmaxf(most, ends_highest[w][r]);
    const float reference = most == -INFINITY ? 0.0F : most;
    float total = 0;
    for (int w = 0; w < kWarps; ++w)
      total += ends_sum[w][r] * exp2f(ends_highest[w][r] - reference);
    const float factor = total == 0 ? 0.0F : 1.0F / total;
    const ResultRow to(p, item, tile, kv_head, split, r);
    if (threadIdx.x == 0) *to.lse = total == 0 ? -INFINITY : (reference + log2f(total)) * kLn2;
    for (int d = static_cast<int>(threadIdx.x); d < p.head_dim; d += kThreads) {
      float all = 0;
      for (int w = 0; w < kWarps; ++w) {
        all = fmaf(reinterpret_cast<const float*>(ends[w])[d],
                   exp2f(ends_highest[w][r] - reference), all);
      }
      to.o[d] = all * factor;
    }
  }
}

template <int kChunks>
int blocks() {
  int count = 0;
  const cudaError_t error =
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(&count, &plain_kernel<kChunks>, kThreads, 0);
  return error == cudaSuccess && count > 0 ? count : 1;
}

}  // namespace

int plain_blocks(int head_dim) {
  return head_dim <= 128 ? blocks<1>() : head_dim <= 256 ? blocks<2>() : blocks<4>();
}

cudaError_t attend_plain(const AttendParams& params, DType dtype, int most_splits, int most_tiles,
                         cudaStream_t stream) {
  // Tiles of long chunks are more than the 65,535 that the other directions of a grid may have.
  const dim3 grid(static_cast<unsigned>(most_tiles * params.kv_heads),
                  static_cast<unsigned>(most_splits), static_cast<unsigned>(params.runs));
  if (params.padded <= 128) {
    plain_kernel<1><<<grid, kThreads, 0, stream>>>(params, dtype);
  } else if (params.padded <= 256) {
    plain_kernel<2><<<grid, kThreads, 0, stream>>>(params, dtype);
  } else {
    plain_kernel<4><<<grid, kThreads, 0, stream>>>(params, dtype);
  }
  return cudaGetLastError();
}

}  // namespace annulus::cuda
