// Placements that share out the allowed pairs of a pattern.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "annulus/pattern.h"
#include "annulus/placement.h"
#include "annulus/plan.h"
#include "support/random_plans.h"

namespace annulus {
namespace {

using List = std::vector<std::int64_t>;

std::vector<std::vector<RowSet>> ranges_of(const Placement& placement) {
  std::vector<std::vector<RowSet>> ranges;
  for (int rank = 0; rank < placement.ranks(); ++rank)
    ranges.emplace_back(placement.ranges(rank).begin(), placement.ranges(rank).end());
  return ranges;
}

double balance_of(const Pattern& pattern, const Placement& placement) {
  double most = 0;
  double all = 0;
  for (const RankTotals& rank :
       Plan({pattern, placement, placement, pattern.heads, Schedule::ring, Travel::keys}, 0)
           .rank_totals()) {
    most = std::max(most, rank.query_pairs);
    all += rank.query_pairs;
  }
  return most == 0 ? 1 : all / placement.ranks() / most;
}

TEST(BalancedPlacement, IsContiguousOrZigzagWherePairsAreEven) {
  for (const int ranks : {1, 2, 5, 8}) {
    EXPECT_EQ(ranges_of(Placement::balanced(dense(2), 4096, ranks)),
              ranges_of(Placement::contiguous(4096, ranks)));
    EXPECT_EQ(ranges_of(Placement::balanced(dense(2, true), 4096, ranks)),
              ranges_of(Placement::zigzag(4096, ranks)));
  }
}

TEST(BalancedPlacement, SharesOutThePairsOfDocuments) {
  constexpr std::int64_t kTokens = 16'384;
  for (std::uint64_t seed = 0; seed < 100; ++seed) {
    test::Random random(seed);
    const int ranks = static_cast<int>(random.between(2, 16));
    Pattern pattern =
        random.coin() ? dense(2, true) : longnet(4, List{256, 2048}, List{1, 4}, true);
    std::vector<std::vector<Document>> entries;
    for (std::int64_t entry = random.between(1, 3); entry > 0; --entry) {
      List boundaries{0, random.coin() ? kTokens : kTokens / 2};  // the rest is padding
      for (std::int64_t i = random.between(0, 20); i > 0; --i)
        boundaries.push_back(random.between(0, boundaries[1]));
      std::sort(boundaries.begin(), boundaries.end());
      entries.push_back(packed_documents(boundaries));
    }
    pattern.documents = entries.size() == 1 ? entries[0] : documents_of_entries(entries);
    const Placement placement = Placement::balanced(pattern, kTokens, ranks);
    SCOPED_TRACE("seed " + std::to_string(seed) + ", " + std::to_string(ranks) + " ranks");
    EXPECT_GE(balance_of(pattern, placement), 0.93);
    for (int rank = 0; rank < ranks; ++rank) {
      EXPECT_LE(placement.ranges(rank).size(), 16U);
      EXPECT_NEAR(static_cast<double>(placement.local_tokens(rank)),
                  static_cast<double>(kTokens) / ranks, 16.0);
    }
  }
}

TEST(BalancedPlacement, TakesAnyNumberOfTokens) {
  for (const std::int64_t tokens : {1, 3, 7, 20}) {
    const Placement placement = Placement::balanced(dense(1, true), tokens, 4);
    EXPECT_EQ(placement.tokens(), tokens);
  }
}

}  // namespace
}  // namespace annulus
