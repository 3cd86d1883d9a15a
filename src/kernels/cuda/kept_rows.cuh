#pragma once

#include <cstdint>

#include "kernels/cuda/portable.h"
#include "kernels/cuda/row_kernels.h"
#include "kernels/cuda/rows.cuh"

namespace annulus::cuda {

// Row of the kept outputs of a branch, or -1: see KeptRows::row, which this is on the device.
__device__ inline std::int64_t kept_row(const KeptTables& kept, int branch, std::int64_t batch,
                                        int head, std::int64_t token) {
  const KeptRows::Head of = kept.heads[branch * kept.branch_heads + head];
  if (of.first_word < 0) return -1;
  const KeptRows::Word word = kept.words[of.first_word + token / KeptRows::kWordTokens];
  const std::uint64_t bit = std::uint64_t{1} << (token % KeptRows::kWordTokens);
  if ((word.selected & bit) == 0) return -1;
  return batch * kept.batch_rows + of.first + word.before + __popcll(word.selected & (bit - 1));
}

// Lets lse, state and out (channels 1 to 3) of an item's rows point to what is kept of its branch.
// By all threads of a block; the caller synchronises before and behind.
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
