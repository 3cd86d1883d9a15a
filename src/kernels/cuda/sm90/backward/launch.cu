#include "kernels/cuda/sm90/backward/launch.h"

#include <algorithm>

#include "kernels/cuda/sm90/backward/shared.cuh"
#include "kernels/cuda/sm90/tensor_maps.h"

namespace annulus::cuda::sm90 {
namespace {

void make_maps(BackwardArguments& arguments) {
  const BackwardParams& params = arguments.params;
  const KernelShape& shape = params.shape;
  const LaunchTraits& traits = arguments.schedule.traits;
  const auto map_queries = [&](CUtensorMap& map, const Channel& channel, const RowGrid& grid,
                               DType dtype, int rows) {
    const MappedRows mapped =
        traits.queries_received
            ? received_rows(grid, channel.row_bytes, dtype, shape.head_dim)
            : MappedRows{channel.local,      dtype,      shape.head_dim, shape.heads,
                         shape.query_tokens, shape.batch};
    return make_tensor_map(map, mapped, traits.query_stride, rows);
  };
  const int queries = backward_step(shape.head_dim);
  arguments.map_queries =
      map_queries(arguments.q, params.q, traits.queries, shape.dtype, queries) &&
      map_queries(arguments.dout, params.dout, traits.queries, shape.dtype, queries) &&
      map_queries(arguments.dq, params.dq, traits.query_gradients, DType::f32, kStagedRows);
  arguments.map_keys = make_key_map(arguments.k, params.k, shape, traits, kKeys) &&
                       make_key_map(arguments.v, params.v, shape, traits, kKeys);
}

}  // namespace

bool backward_fits(const KernelShape& shape) {
  return (shape.dtype == DType::bf16 || shape.dtype == DType::f16) &&
         (shape.head_dim == 64 || shape.head_dim == 128) && shape.aligned;
}

cudaError_t launch_backward(const BackwardParams& params, cudaStream_t stream,
                            const BackwardSchedule& schedule) {
  if (params.items == 0) return cudaSuccess;
  if (schedule.turns != nullptr && (schedule.next_item == nullptr || schedule.progress == nullptr))
    return cudaErrorInvalidValue;
  const KernelShape& shape = params.shape;
  const bool bf16 = shape.dtype == DType::bf16;
  BackwardArguments arguments{};
  arguments.params = params;
  arguments.schedule = schedule;
  arguments.score_scale = shape.scale * 1.4426950408889634F;
  arguments.delta_scale = bf16 ? shape.scale : 1.0F;
  make_maps(arguments);

  int device = 0;
  int processors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  const int blocks = std::min(processors, static_cast<int>(params.items));
  return bf16 ? start_backward_bf16(arguments, blocks, stream)
              : start_backward_f16(arguments, blocks, stream);
}

}  // namespace annulus::cuda::sm90
