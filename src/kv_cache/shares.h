#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "annulus/placement.h"

namespace annulus::kv_cache {

// Neighbouring tokens of one entry.
struct TokenRun {
  std::int64_t entry = 0;
  std::int64_t token = 0;  // the first one's number within the call
  std::int64_t row = 0;    // its row in the tensors of the rank that has it
  std::int64_t count = 0;
};

// Tokens of a call that one rank has, in the order in which messages carry them.
struct Share {
  std::vector<TokenRun> runs;
  std::int64_t first = 0;  // tokens of the shares before this one
  std::int64_t count = 0;

  void add(const TokenRun& run) {
    runs.push_back(run);
    count += run.count;
  }
};

// The tokens that ranks pass by a placement: counts[e] of entry e, numbered from its first one.
[[nodiscard]] std::vector<Share> placed_shares(std::span<const std::int64_t> counts,
                                               const Placement& placement);
// All tokens, cut into as many equal shares.
[[nodiscard]] std::vector<Share> equal_shares(std::span<const std::int64_t> counts, int shares);

}  // namespace annulus::kv_cache
