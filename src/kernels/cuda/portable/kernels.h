#pragma once

#include "kernels/cuda/launch.h"
#include "kernels/cuda/rows/kernels.h"

// Kernels for every GPU from sm_80 on: all dtypes, head dims and layouts. 16-bit rows are
// multiplied by mma.sync, fp32 ones by real fp32 multiply-adds.
// Always the same bits: no atomics.
namespace annulus::cuda {

// Most rows of an item.
[[nodiscard]] int portable_forward_tile(const KernelShape& shape);
inline constexpr int kPortableGradientTile = 64;

// The running state with detached mixing (tables.branches > 0), per branch: fp32 rows at the
// indices of KeptRows, instead of ForwardParams::lse, state and out.
struct ForwardKept {
  KeptTables tables;
  float* o = nullptr;
  float* lse = nullptr;
};
[[nodiscard]] cudaError_t portable_forward(const ForwardParams& params, cudaStream_t stream,
                                           const ForwardKept& kept = {});
// Items own query rows: dQ.
[[nodiscard]] cudaError_t portable_query_gradient(const BackwardParams& params,
                                                  cudaStream_t stream);
// Items own key rows: dK and dV.
[[nodiscard]] cudaError_t portable_key_gradient(const BackwardParams& params, cudaStream_t stream);

// The fp32 kernels (fp32.cu).
struct PortableForwardParams : ForwardParams {
  ForwardKept kept;
};
[[nodiscard]] cudaError_t forward_fp32(const PortableForwardParams& params, cudaStream_t stream);
[[nodiscard]] cudaError_t query_gradient_fp32(const BackwardParams& params, cudaStream_t stream);
[[nodiscard]] cudaError_t key_gradient_fp32(const BackwardParams& params, cudaStream_t stream);

// The kernels for head dims above kMostTiledDim (16-bit rows in wide_half.cu, fp32 rows in
// wide.cu).
[[nodiscard]] cudaError_t forward_wide_half(const PortableForwardParams& params,
                                            cudaStream_t stream);
[[nodiscard]] cudaError_t query_gradient_wide_half(const BackwardParams& params,
                                                   cudaStream_t stream);
[[nodiscard]] cudaError_t key_gradient_wide_half(const BackwardParams& params, cudaStream_t stream);
[[nodiscard]] cudaError_t forward_wide_fp32(const PortableForwardParams& params,
                                            cudaStream_t stream);
[[nodiscard]] cudaError_t query_gradient_wide_fp32(const BackwardParams& params,
                                                   cudaStream_t stream);
[[nodiscard]] cudaError_t key_gradient_wide_fp32(const BackwardParams& params, cudaStream_t stream);

}  // namespace annulus::cuda
