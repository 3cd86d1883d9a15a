// Who computes which pair, against the definition: over all pairs of a sequence, what the branches
// compute adds up to what the pattern allows.

#include "pattern/shared_pairs.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "support/random_plans.h"

namespace annulus {
namespace {

using List = std::vector<std::int64_t>;

std::int32_t index_in(const Branch& branch, int head, std::int64_t position) {
  return static_cast<std::int32_t>(
      (position % branch.segment_length - branch.offset[static_cast<std::size_t>(head)]) /
      branch.dilation);
}

struct Count {
  std::int64_t scored = 0;   // pairs that some branch computes
  std::int64_t allowed = 0;  // pairs that some branch allows, as often as branches allow it
};

// Checks every pair of one head.
Count check(const Pattern& pattern, std::int64_t tokens, int head) {
  const std::vector<PairSharing> sharing = share_pairs(pattern, {tokens}, head);
  EXPECT_EQ(sharing.size(), pattern.branches.size());
  Count total;
  for (std::int64_t query = 0; query < tokens; ++query) {
    for (std::int64_t key = 0; key < tokens; ++key) {
      int allowed = 0;
      int weight = 0;
      for (std::size_t b = 0; b < pattern.branches.size(); ++b) {
        const Branch& branch = pattern.branches[b];
        if (!pattern.allows(branch, head, query, key)) continue;
        ++allowed;
        const std::int32_t q = index_in(branch, head, query);
        const std::int32_t k = index_in(branch, head, key);
        const PairSharing& s = sharing[b];
        if (s.host >= 0 && q / s.host_rows == k / s.host_rows) continue;
        ++total.scored;
        weight += 1;
        for (const Repeat& r : s.repeats) weight += r.contains(q) && r.contains(k) ? 1 : 0;
      }
      total.allowed += allowed;
      EXPECT_EQ(weight, allowed) << "query " << query << ", key " << key;
      if (weight != allowed) return total;
    }
  }
  return total;
}

TEST(SharedPairs, EveryPairCountsAsOftenAsBranchesAllowIt) {
  std::int64_t shared = 0;
  for (int seed = 0; seed < 600; ++seed) {
    test::Random random(static_cast<std::uint64_t>(seed));
    const std::int64_t tokens = random.between(1, 220);
    const bool causal = random.coin();
    Pattern pattern;
    if (seed % 3 == 0) {
      pattern = test::random_branches(random, tokens, 2, causal);
    } else {  // likely to overlap, in any order
      const int branches = static_cast<int>(random.between(1, 7));
      List segments;
      List dilations;
      for (int b = 0; b < branches; ++b) {
        const std::int64_t r = random.one_of<std::int64_t>({1, 1, 2, 3, 4, 6, 8});
        dilations.push_back(r);
        segments.push_back(random.one_of<std::int64_t>({32, 48, 64, 96, 128, 192, 256}));
      }
      pattern = longnet(4, segments, dilations, causal,
                        random.coin() ? Offsets::blocked : Offsets::interleaved);
    }
    for (int head = 0; head < pattern.heads; ++head) {
      SCOPED_TRACE("seed " + std::to_string(seed) + ", head " + std::to_string(head));
      const Count count = check(pattern, tokens, head);
      shared += count.scored < count.allowed ? 1 : 0;
      if (HasFailure()) return;
    }
  }
  EXPECT_GT(shared, 300) << "hardly any of these patterns shared pairs: the test shows nothing";
}

// The figure in the header's comment.
TEST(SharedPairs, LongNetSavesAFifth) {
  const Pattern pattern = longnet(8, List{2048, 4096, 8192, 16384, 32768}, List{1, 2, 4, 8, 16});
  double pairs = 0;
  double saved = 0;
  for (int head = 0; head < 8; ++head) {
    const std::vector<PairSharing> sharing = share_pairs(pattern, {131072}, head);
    for (std::size_t b = 0; b < sharing.size(); ++b) {
      const double rows = 131072.0 / static_cast<double>(pattern.branches[b].dilation);
      pairs += rows * 2048;
      saved += rows * static_cast<double>(sharing[b].host_rows);
    }
  }
  EXPECT_NEAR(saved / pairs, 0.21, 0.01);
}

TEST(SharedPairs, BranchWithinABranchOfTheSameSegmentsComputesNothing) {
  const Pattern pattern = longnet(1, List{64, 64}, List{1, 2});
  const std::vector<PairSharing> sharing = share_pairs(pattern, {640}, 0);
  EXPECT_EQ(sharing[1].host, 0);
  EXPECT_EQ(sharing[1].host_rows, 32);
  EXPECT_EQ(sharing[0].repeats, (std::vector<Repeat>{{2, 0}}));
}

TEST(SharedPairs, DifferentSidesShareNothing) {
  const Pattern pattern = longnet(1, List{64, 64}, List{1, 2});
  const std::vector<PairSharing> nothing(2);
  EXPECT_NE(share_pairs(pattern, {640, true}, 0), nothing);
  EXPECT_EQ(share_pairs(pattern, {640, false}, 0), nothing);
}

TEST(SharedPairs, OtherOffsetsShareNothing) {
  Pattern pattern = longnet(1, List{64, 256}, List{2, 4});
  pattern.branches[1].offset = {1};
  const std::vector<PairSharing> sharing = share_pairs(pattern, {1024}, 0);
  EXPECT_EQ(sharing[0], PairSharing{});
  EXPECT_EQ(sharing[1], PairSharing{});
}

}  // namespace
}  // namespace annulus
