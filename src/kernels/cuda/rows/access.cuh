#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstdint>

#include "kernels/cuda/rows/kernels.h"

// Iteration over rows of any layout and dtype, for kernels that treat all rows alike.
namespace annulus::cuda {

inline constexpr int kThreads = 256;
inline constexpr int kWarps = kThreads / 32;

__device__ inline std::byte* row_at(const TensorRows& rows, std::int64_t batch, std::int64_t token,
                                    int head) {
  return rows.base + batch * rows.batch_step + head * rows.head_step + token * rows.row_step;
}

__device__ inline float load(const std::byte* row, DType dtype, int column) {
  switch (dtype) {
    case DType::f32:
      return reinterpret_cast<const float*>(row)[column];
    case DType::bf16:
      return __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(row)[column]);
    case DType::f16:
      return __half2float(reinterpret_cast<const __half*>(row)[column]);
  }
  return 0;
}

__device__ inline void store(std::byte* row, DType dtype, int column, float value) {
  switch (dtype) {
    case DType::f32:
      reinterpret_cast<float*>(row)[column] = value;
      break;
    case DType::bf16:
      reinterpret_cast<__nv_bfloat16*>(row)[column] = __float2bfloat16_rn(value);
      break;
    case DType::f16:
      reinterpret_cast<__half*>(row)[column] = __float2half_rn(value);
      break;
  }
}

// Calls use(batch, token, head, lane) for each row, with a warp per row.
template <typename Use>
__device__ void for_each_row(const RowSpace& space, const Use& use) {
  const std::int64_t rows = space.batch * space.tokens * space.heads;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
       row < rows; row += static_cast<std::int64_t>(gridDim.x) * kWarps) {
    const int head = static_cast<int>(row % space.heads);
    const std::int64_t token = row / space.heads % space.tokens;
    use(row / space.heads / space.tokens, token, head, lane);
  }
}

inline unsigned blocks_for(std::int64_t rows) {
  constexpr std::int64_t kMost = 132 * 16;
  return static_cast<unsigned>(std::clamp<std::int64_t>((rows + kWarps - 1) / kWarps, 1, kMost));
}

}  // namespace annulus::cuda
