#pragma once

#include <cuda.h>

#include <cstdint>

#include "kernels/cuda/launch.h"
#include "kernels/cuda/work/launch_traits.h"

// Maps for bulk tensor copies (Hopper), with the swizzle of 128 bytes.
namespace annulus::cuda::sm90 {

// Rows of the shard, or of received parcels.
struct MappedRows {
  TensorRows rows;
  DType dtype = DType::bf16;
  int head_dim = 0;
  int heads = 0;
  std::int64_t tokens = 0;
  std::int64_t batch = 0;
};

// A grid of parcels as rows of one batch entry. Rows that begin between two rows of the grid are
// rows of other "heads", which are the grid's step apart.
[[nodiscard]] MappedRows received_rows(const RowGrid& grid, std::int64_t row_bytes, DType dtype,
                                       int head_dim);

// A map of {column, head, token % stride, token / stride, batch}: tokens that are `stride` apart
// are neighbours, wherever they begin. A box is `box_rows` such tokens and 128 bytes of each. False
// if there can be no such map; rows must be gathered then.
[[nodiscard]] bool make_tensor_map(CUtensorMap& map, const MappedRows& mapped, std::int32_t stride,
                                   int box_rows);

// The same for K or V of a launch, in the shard or in parcels as its traits say.
[[nodiscard]] bool make_key_map(CUtensorMap& map, const Channel& channel, const KernelShape& shape,
                                const LaunchTraits& traits, int box_rows);

}  // namespace annulus::cuda::sm90
