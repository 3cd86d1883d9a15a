#include <algorithm>
#include <cstdint>

#include "kernels/cuda/sm90/forward/kernel.cuh"
#include "kernels/cuda/sm90/forward/launch.h"
#include "kernels/cuda/sm90/tensor_maps.h"

namespace annulus::cuda::sm90 {

bool forward_fits(const KernelShape& shape) {
  constexpr std::int64_t kMostTokens = std::int64_t{1} << 30;
  return (shape.dtype == DType::bf16 || shape.dtype == DType::f16) &&
         (shape.head_dim == 64 || shape.head_dim == 128) && shape.aligned && shape.scale > 1e-20F &&
         shape.scale < 1e20F &&  // the largest score belongs to the largest product
         shape.query_tokens < kMostTokens && shape.key_tokens < kMostTokens;
}

cudaError_t launch_forward(const ForwardParams& params, const LaunchTraits& traits,
                           cudaStream_t stream) {
  if (params.items == 0) return cudaSuccess;
  const KernelShape& shape = params.shape;
  ForwardArguments arguments{};
  arguments.params = params;
  arguments.traits = traits;
  arguments.scale_log2 = shape.scale * 1.4426950408889634F;
  const auto map_queries = [&](CUtensorMap& map, const Channel& channel) {
    return make_tensor_map(
        map,
        {channel.local, shape.dtype, shape.head_dim, shape.heads, shape.query_tokens, shape.batch},
        traits.query_stride, kTile);
  };
  arguments.map_queries = map_queries(arguments.q, params.q);
  arguments.map_keys = make_key_map(arguments.k, params.k, shape, traits, kTile) &&
                       make_key_map(arguments.v, params.v, shape, traits, kTile);
  arguments.map_state =
      params.load_state && make_tensor_map(arguments.state,
                                           {params.state, DType::f32, shape.head_dim, shape.heads,
                                            shape.query_tokens, shape.batch},
                                           traits.query_stride, kTile);

  const bool bf16 = shape.dtype == DType::bf16;
  const auto choose = shape.head_dim == 64 ? (bf16 ? forward_bf16_d64 : forward_f16_d64)
                                           : (bf16 ? forward_bf16_d128 : forward_f16_d128);
  const ForwardKernel kernel = choose(traits.limits, traits.weights, params.load_state);
  const int bytes = shape.head_dim == 64 ? Layout<64>::kBytes : Layout<128>::kBytes;

  int device = 0;
  int blocks = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&blocks, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess)
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;

  // The next launch may start on free SMs before this one ends; it waits there.
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(std::min(blocks, params.items)));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = static_cast<std::size_t>(bytes);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, arguments);
}

}  // namespace annulus::cuda::sm90
