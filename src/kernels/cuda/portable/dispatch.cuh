#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstddef>
#include <type_traits>

#include "kernels/cuda/launch.h"
#include "kernels/cuda/portable/tiles.h"

namespace annulus::cuda {

// Calls use(std::integral_constant<int, kDim>) with the smallest padded head dim that holds
// head_dim.
template <typename Use>
cudaError_t with_dim(int head_dim, const Use& use) {
  switch (padded_dim(head_dim)) {
    case 64:
      return use(std::integral_constant<int, 64>());
    case 128:
      return use(std::integral_constant<int, 128>());
    default:
      return use(std::integral_constant<int, 256>());
  }
}

// Calls use(T()) with the 16-bit type.
template <typename Use>
cudaError_t with_half(DType dtype, const Use& use) {
  return dtype == DType::bf16 ? use(__nv_bfloat16()) : use(__half());
}

// The buffers of the rows that a block iterates over.
template <int kRowsOfTile, int kTiles>
struct TileBuffers {
  static constexpr int kRows = kRowsOfTile;
  static constexpr int kStages = kTiles;
};

// Shared memory that a block may have here: from 99 KiB (sm_86, sm_89) to 227 KiB (sm_90).
inline cudaError_t block_shared_bytes(std::size_t& bytes) {
  static const std::size_t allowed = allowed_shared_bytes();
  int device = 0;
  int most = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  bytes = std::min(allowed, static_cast<std::size_t>(most));
  return error;
}

// Calls use(TileBuffers<...>) with the largest buffers that fit a block's shared memory on this
// device. A wider tile would not fit 99 KiB.
template <template <typename, int, typename> typename Shared, typename T, int kDim, typename Use>
cudaError_t with_buffers(const Use& use) {
  std::size_t most = 0;
  if (const cudaError_t error = block_shared_bytes(most); error != cudaSuccess) return error;
  const auto fits = [&](std::size_t bytes) { return bytes <= most; };
  using Two = TileBuffers<64, 2>;
  using One = TileBuffers<64, 1>;
  if constexpr (kDim == 64) {
    return use(Two());
  } else if constexpr (kDim == 128) {
    return fits(sizeof(Shared<T, kDim, Two>)) ? use(Two()) : use(One());
  } else {
    return fits(sizeof(Shared<T, kDim, Two>)) ? use(Two()) : use(TileBuffers<16, 1>());
  }
}

// Launches with dynamic shared memory, which may exceed 48 KiB.
template <typename Params>
cudaError_t launch(void (*kernel)(Params), dim3 grid, int threads, std::size_t shared,
                   const Params& params, cudaStream_t stream) {
  cudaError_t error =
      cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                           cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared));
  if (error != cudaSuccess) return error;
  Params copy = params;
  void* arguments[] = {&copy};
  return cudaLaunchKernel(reinterpret_cast<const void*>(kernel), grid,
                          dim3(static_cast<unsigned>(threads)), arguments, shared, stream);
}

}  // namespace annulus::cuda
