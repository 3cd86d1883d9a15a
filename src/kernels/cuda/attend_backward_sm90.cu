#include "kernels/cuda/attend_backward_sm90.h"

#include <algorithm>
#include <string>

#include "annulus/error.h"
#include "kernels/cuda/attend_backward_sm90_shared.h"

namespace annulus::cuda {
namespace {

void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess)
    throw DeviceError(std::string("attention backward on Hopper: ") + what + ": " +
                      cudaGetErrorString(status));
}

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

// From the driver at run time: the library is not linked to it.
EncodeTiled encode_tiled() {
  static const EncodeTiled function = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result{};
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000,
                                           cudaEnableDefault, &result),
          "cuTensorMapEncodeTiled");
    if (found == nullptr || result != cudaDriverEntryPointSuccess)
      throw DeviceError("attention backward on Hopper: the driver has no cuTensorMapEncodeTiled");
    return reinterpret_cast<EncodeTiled>(found);
  }();
  return function;
}

struct Box {
  CUtensorMapDataType type;
  int columns;  // 128 bytes of them
  int rows;
};

// Tokens as {columns, heads, token % stride, token / stride, batch}.
CUtensorMap make_map(const TensorRows& rows, int head_dim, int heads, std::int64_t tokens,
                     std::int64_t batch, std::int32_t stride, const Box& box) {
  const auto extent = [](std::int64_t value) { return static_cast<cuuint64_t>(value); };
  // Steps over an extent of 1 mean nothing, but must be multiples of 16.
  const auto step = [](std::int64_t bytes, std::int64_t over) {
    return static_cast<cuuint64_t>(over > 1 ? bytes : 16);
  };
  const std::int64_t high = (tokens + stride - 1) / stride;
  const cuuint64_t extents[] = {extent(head_dim), extent(heads), extent(stride), extent(high),
                                extent(batch)};
  const cuuint64_t steps[] = {step(rows.head_step, heads), step(rows.row_step, stride),
                              step(stride * rows.row_step, high), step(rows.batch_step, batch)};
  const cuuint32_t boxed[] = {static_cast<cuuint32_t>(box.columns), 1, 1,
                              static_cast<cuuint32_t>(box.rows), 1};
  const cuuint32_t every[] = {1, 1, 1, 1, 1};
  CUtensorMap map{};
  const CUresult result = encode_tiled()(&map, box.type, 5, rows.base, extents, steps, boxed, every,
                                         CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                         box.type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                                             ? CU_TENSOR_MAP_L2_PROMOTION_NONE
                                             : CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                         CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS)
    throw DeviceError("attention backward on Hopper: cuTensorMapEncodeTiled: error " +
                      std::to_string(static_cast<int>(result)));
  return map;
}

}  // namespace

bool backward_sm90_fits(const KernelShape& shape) {
  return (shape.dtype == DType::bf16 || shape.dtype == DType::f16) &&
         (shape.head_dim == 64 || shape.head_dim == 128) && shape.aligned;
}

void launch_backward_sm90(const BackwardParams& params, cudaStream_t stream,
                          const BackwardSchedule& schedule) {
  if (params.items == 0) return;
  const KernelShape& shape = params.shape;
  const bool bf16 = shape.dtype == DType::bf16;
  sm90::BackwardArguments arguments{};
  arguments.params = params;
  arguments.schedule = schedule;
  arguments.score_scale = shape.scale * 1.4426950408889634F;
  arguments.delta_scale = bf16 ? shape.scale : 1.0F;
  if (schedule.row_stride > 0) {
    const CUtensorMapDataType type =
        bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    const auto of_queries = [&](const Channel& channel, const Box& box) {
      return make_map(channel.local, shape.head_dim, shape.heads, shape.query_tokens, shape.batch,
                      schedule.row_stride, box);
    };
    const auto of_keys = [&](const Channel& channel, const Box& box) {
      return make_map(channel.local, shape.head_dim, shape.kv_heads, shape.key_tokens, shape.batch,
                      schedule.row_stride, box);
    };
    const int queries = sm90::queries_of(shape.head_dim);
    arguments.q = of_queries(params.q, {type, 64, queries});
    arguments.dout = of_queries(params.dout, {type, 64, queries});
    arguments.dq = of_queries(params.dq, {CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 32, 64});
    arguments.k = of_keys(params.k, {type, 64, sm90::kKeys});
    arguments.v = of_keys(params.v, {type, 64, sm90::kKeys});
  }
  int device = 0;
  int processors = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device),
        "cudaDeviceGetAttribute");
  const int blocks = std::min(processors, static_cast<int>(params.items));
  if (bf16) {
    sm90::start_backward_bf16(arguments, blocks, stream);
  } else {
    sm90::start_backward_fp16(arguments, blocks, stream);
  }
  check(cudaGetLastError(), "launch");
}

}  // namespace annulus::cuda
