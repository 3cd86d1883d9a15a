#pragma once

#include <cstdint>

#include "annulus/pattern.h"
#include "annulus/placement.h"
#include "annulus/ring_attention.h"
#include "support/problem.h"
#include "support/ring_fixture.h"

// A ring for tests of calls, options and errors: two branches, GQA, shards of different lengths.
namespace annulus::test {

inline constexpr int kRanks = 3;
inline constexpr std::int64_t kTokens = 22;  // 8, 7 and 7 of them

inline Problem small_problem(MixGradient mix = MixGradient::full) {
  return make_problem("small", longnet(4, List{8, 16}, List{1, 2}, true), 2, kTokens, 16, 2, mix);
}

inline RingOptions small_options(MixGradient mix = MixGradient::full) {
  return ring_options(small_problem(mix), Placement::contiguous(kTokens, kRanks));
}

}  // namespace annulus::test
