#pragma once

#include <cstdint>

#include "kernels/cuda/portable/kernels.h"
#include "kernels/cuda/portable/rows.cuh"
#include "kernels/cuda/rows/kept.cuh"

namespace annulus::cuda {

// Points lse, state and out (channels 1 to 3) of an item's rows to the kept outputs of its branch.
// Called by all threads of a block; the caller synchronises before and after it.
template <typename Rows>
__device__ void point_to_kept(Rows& rows, const PortableForwardParams& p, const Group& group,
                              const Item& item, int head) {
  for (int r = static_cast<int>(threadIdx.x); r < item.rows; r += static_cast<int>(blockDim.x)) {
    const PlacedRow row = place_row(p.tables.runs, group.queries, item.begin + r);
    const std::int64_t at = kept_row(p.kept.tables, group.branch, item.batch, head, row.row);
    rows.at[1][r] = reinterpret_cast<std::byte*>(p.kept.lse + at);
    rows.at[2][r] = rows.at[3][r] = reinterpret_cast<std::byte*>(p.kept.o + at * p.shape.head_dim);
  }
}

}  // namespace annulus::cuda
