#include "kernels/cuda/sm90/tensor_maps.h"

#include <cudaTypedefs.h>

#include <array>
#include <cstddef>

#include "kernels/cuda/device/driver_function.h"

namespace annulus::cuda::sm90 {
namespace {

// Null if the driver is too old.
PFN_cuTensorMapEncodeTiled_v12000 map_encoder() {
  static const auto encoder =
      driver_function<PFN_cuTensorMapEncodeTiled_v12000>("cuTensorMapEncodeTiled", 12000);
  return encoder;
}

CUtensorMapDataType map_type(DType dtype) {
  switch (dtype) {
    case DType::bf16:
      return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    case DType::f16:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    case DType::f32:
      break;
  }
  return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
}

}  // namespace

MappedRows received_rows(const RowGrid& grid, std::int64_t row_bytes, DType dtype, int head_dim) {
  const auto heads = static_cast<int>(row_bytes / grid.step);
  return {{grid.base, 0, grid.step, row_bytes}, dtype, head_dim, heads, grid.rows, 1};
}

bool make_tensor_map(CUtensorMap& map, const MappedRows& mapped, std::int32_t stride,
                     int box_rows) {
  const auto encode = map_encoder();
  const TensorRows& rows = mapped.rows;
  // Coordinates have 32 bits.
  constexpr std::int64_t kMostTokens = std::int64_t{1} << 31;
  if (encode == nullptr || rows.base == nullptr || stride <= 0 || mapped.tokens <= 0 ||
      mapped.tokens >= kMostTokens)
    return false;
  const bool fp32 = mapped.dtype == DType::f32;
  const int number_bytes = fp32 ? 4 : 2;
  const std::array<std::int64_t, 5> extent = {mapped.head_dim, mapped.heads, stride,
                                              (mapped.tokens + stride - 1) / stride, mapped.batch};
  const std::array<std::int64_t, 4> step = {rows.head_step, rows.row_step, stride * rows.row_step,
                                            rows.batch_step};
  std::array<cuuint64_t, 5> extents{};
  std::array<cuuint64_t, 4> steps{};
  for (std::size_t i = 0; i < extents.size(); ++i) extents[i] = static_cast<cuuint64_t>(extent[i]);
  for (std::size_t i = 0; i < steps.size(); ++i) {
    // Strides of an extent of 1 are not used, but must be valid.
    const std::int64_t bytes = extent[i + 1] == 1 ? mapped.head_dim * number_bytes : step[i];
    if (bytes <= 0 || bytes % kMapStep != 0 || bytes >= std::int64_t{1} << 40) return false;
    steps[i] = static_cast<cuuint64_t>(bytes);
  }
  const std::array<cuuint32_t, 5> box = {static_cast<cuuint32_t>(128 / number_bytes), 1, 1,
                                         static_cast<cuuint32_t>(box_rows), 1};
  const std::array<cuuint32_t, 5> every = {1, 1, 1, 1, 1};
  // Rows of fp32 are added to in L2 or read once, so prefetching gains nothing.
  return encode(&map, map_type(mapped.dtype), 5, rows.base, extents.data(), steps.data(),
                box.data(), every.data(), CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                fp32 ? CU_TENSOR_MAP_L2_PROMOTION_NONE : CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

bool make_key_map(CUtensorMap& map, const Channel& channel, const KernelShape& shape,
                  const LaunchTraits& traits, int box_rows) {
  const MappedRows mapped =
      traits.keys_received
          ? received_rows(traits.keys, channel.row_bytes, shape.dtype, shape.head_dim)
          : MappedRows{channel.local,  shape.dtype,      shape.head_dim,
                       shape.kv_heads, shape.key_tokens, shape.batch};
  return make_tensor_map(map, mapped, traits.key_stride, box_rows);
}

}  // namespace annulus::cuda::sm90
