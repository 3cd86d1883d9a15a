#pragma once

#include <algorithm>
#include <cstdint>

#include "annulus/pattern.h"

namespace annulus::cuda {

// More than any index that rows of a list have (Run::index) in a sequence of `tokens`, wherever
// these are: a ring's may be many more than a rank's.
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
