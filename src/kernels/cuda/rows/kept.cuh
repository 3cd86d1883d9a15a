#pragma once

#include <cstdint>

#include "kernels/cuda/rows/kernels.h"

namespace annulus::cuda {

// KeptRows::row on the device: the row of a token in the kept outputs of a branch, or -1.
__device__ inline std::int64_t kept_row(const KeptTables& kept, int branch, std::int64_t batch,
                                        int head, std::int64_t token) {
  const KeptRows::Head of =
      kept.heads[batch * kept.entry_heads + branch * kept.branch_heads + head];
  if (of.first_word < 0) return -1;
  const KeptRows::Word word = kept.words[of.first_word + token / KeptRows::kWordTokens];
  const std::uint64_t bit = std::uint64_t{1} << (token % KeptRows::kWordTokens);
  if ((word.selected & bit) == 0) return -1;
  return batch * kept.batch_rows + of.first + word.before + __popcll(word.selected & (bit - 1));
}

}  // namespace annulus::cuda
