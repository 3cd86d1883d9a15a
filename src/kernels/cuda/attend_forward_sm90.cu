#include <cuda.h>
#include <cudaTypedefs.h>

#include <algorithm>
#include <array>
#include <cstdint>

#include "kernels/cuda/forward_sm90.h"
#include "kernels/cuda/forward_sm90_kernel.cuh"

namespace annulus::cuda {
namespace {

// From the driver that is there: nothing links against it.
PFN_cuTensorMapEncodeTiled_v12000 map_encoder() {
  static const auto encoder = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found{};
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry,
                                                               12000, cudaEnableDefault, &found);
    return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? entry : nullptr;
  }();
  return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(encoder);
}

// {dim, head, token mod stride, token div stride, batch}, in boxes of 128 rows and 64 columns.
// Returns false where bulk copies cannot have it: rows are gathered then.
bool make_map(CUtensorMap& map, const TensorRows& rows, const KernelShape& shape, int heads,
              std::int64_t tokens, std::int64_t stride) {
  const auto encode = map_encoder();
  if (encode == nullptr || rows.base == nullptr || tokens / stride < sm90::kTile) return false;
  const std::array<cuuint64_t, 5> extent = {
      static_cast<cuuint64_t>(shape.head_dim), static_cast<cuuint64_t>(heads),
      static_cast<cuuint64_t>(stride), static_cast<cuuint64_t>((tokens + stride - 1) / stride),
      static_cast<cuuint64_t>(shape.batch)};
  const std::array<std::int64_t, 4> step = {rows.head_step, rows.row_step, stride * rows.row_step,
                                            rows.batch_step};
  std::array<cuuint64_t, 4> steps{};
  for (std::size_t i = 0; i < steps.size(); ++i) {
    const std::int64_t bytes = extent[i + 1] == 1 ? 2 * shape.head_dim : step[i];  // unused there
    if (bytes <= 0 || bytes % 16 != 0 || bytes >= std::int64_t{1} << 40) return false;
    steps[i] = static_cast<cuuint64_t>(bytes);
  }
  const std::array<cuuint32_t, 5> box = {64, 1, 1, sm90::kTile, 1};
  const std::array<cuuint32_t, 5> all = {1, 1, 1, 1, 1};
  return encode(&map,
                shape.dtype == DType::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                           : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                5, rows.base, extent.data(), steps.data(), box.data(), all.data(),
                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace

bool forward_sm90_fits(const KernelShape& shape) {
  constexpr std::int64_t kMostTokens = std::int64_t{1} << 30;
  return (shape.dtype == DType::bf16 || shape.dtype == DType::f16) &&
         (shape.head_dim == 64 || shape.head_dim == 128) && shape.aligned && shape.scale > 1e-20F &&
         shape.scale < 1e20F &&  // the largest score has the largest product
         shape.query_tokens < kMostTokens && shape.key_tokens < kMostTokens;
}

cudaError_t launch_forward_sm90(const ForwardParams& params, const LaunchTraits& traits,
                                cudaStream_t stream) {
  if (params.items == 0) return cudaSuccess;
  const KernelShape& shape = params.shape;
  sm90::ForwardArguments arguments{};
  arguments.params = params;
  arguments.traits = traits;
  arguments.scale_log2 = shape.scale * 1.4426950408889634F;
  arguments.inverse_scale = 1.0F / shape.scale;
  arguments.map_queries = make_map(arguments.q, params.q.local, shape, shape.heads,
                                   shape.query_tokens, traits.query_stride);
  arguments.map_keys = make_map(arguments.k, params.k.local, shape, shape.kv_heads,
                                shape.key_tokens, traits.key_stride) &&
                       make_map(arguments.v, params.v.local, shape, shape.kv_heads,
                                shape.key_tokens, traits.key_stride);

  const bool bf16 = shape.dtype == DType::bf16;
  const auto choose = shape.head_dim == 64
                          ? (bf16 ? sm90::forward_bf16_d64 : sm90::forward_f16_d64)
                          : (bf16 ? sm90::forward_bf16_d128 : sm90::forward_f16_d128);
  const sm90::ForwardKernel kernel = choose(traits.causal, traits.weights);
  const int bytes = shape.head_dim == 64 ? sm90::Layout<64>::kBytes : sm90::Layout<128>::kBytes;

  int device = 0;
  int blocks = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&blocks, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess)
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;

  // The next launch may be put on SMs that are free before this one ends; it waits there.
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(std::min(blocks, params.items)));
  config.blockDim = dim3(sm90::kThreads);
  config.dynamicSmemBytes = static_cast<std::size_t>(bytes);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, arguments);
}

}  // namespace annulus::cuda
