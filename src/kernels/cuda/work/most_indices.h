#pragma once

#include <algorithm>
#include <cstdint>

#include "annulus/pattern.h"

namespace annulus::cuda {

// An upper bound of row indices (Run::index) in a sequence of `tokens`, on all ranks of the ring.
[[nodiscard]] inline std::int64_t most_indices(const Pattern& pattern, std::int64_t tokens) {
  if (!pattern.documents.empty()) tokens = 0;
  for (const Document& document : pattern.documents) tokens = std::max(tokens, document.length());
  std::int64_t most = 0;
  for (const Branch& branch : pattern.branches) {
    const std::int64_t length = std::min(branch.segment_length, tokens);
    most = std::max(most, (length + branch.dilation - 1) / branch.dilation);
  }
  return most;
}

}  // namespace annulus::cuda
