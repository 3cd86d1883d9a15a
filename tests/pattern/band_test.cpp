#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <limits>
#include <random>
#include <string>

#include "annulus/band.h"
#include "annulus/error.h"
#include "annulus/pattern.h"
#include "annulus/row_set.h"
#include "pattern/band_pairs.h"
#include "plan/pair_counts.h"

namespace annulus {
namespace {

constexpr std::int64_t kNone = Band::kUnlimited;

class BandRules : public ::testing::TestWithParam<Band> {
 protected:
  std::int64_t draw(std::int64_t most) {
    return std::uniform_int_distribution<std::int64_t>(0, most)(random_);
  }
  RowSet draw_rows() { return {draw(20), 1 + draw(8), 1 + draw(4)}; }
  static double count(const Band& band, const RowSet& queries, const RowSet& keys) {
    double pairs = 0;
    for (std::int64_t i = 0; i < queries.count; ++i) {
      for (std::int64_t j = 0; j < keys.count; ++j) {
        if (band.allows(queries[i], keys[j])) ++pairs;
      }
    }
    return pairs;
  }

  std::mt19937_64 random_{11};
};

TEST_P(BandRules, CountPairsAsOneByOne) {
  for (int round = 0; round < 2000; ++round) {
    const RowSet queries = draw_rows();
    const RowSet keys = draw_rows();
    ASSERT_EQ(allowed_pairs(GetParam(), queries, keys), count(GetParam(), queries, keys))
        << "queries " << queries.first << " + " << queries.stride << " x " << queries.count
        << ", keys " << keys.first << " + " << keys.stride << " x " << keys.count;
  }
  for (int round = 0; round < 2000; ++round) {
    const RowSet queries{draw(20), draw(8), 1};
    const RowSet keys{draw(20), draw(8), 1};
    ASSERT_EQ(band_pairs(GetParam(), {queries.first, queries.last()}, {keys.first, keys.last()}),
              count(GetParam(), queries, keys))
        << queries.first << " + " << queries.count << ", " << keys.first << " + " << keys.count;
  }
}

// Stretches without gaps: the answers are exact there.
TEST_P(BandRules, KnowStretchesThatAreHiddenOrShown) {
  for (int round = 0; round < 2000; ++round) {
    const RowSet queries{draw(20), 1 + draw(8), 1};
    const RowSet keys{draw(20), 1 + draw(8), 1};
    const Stretch q{queries.first, queries.last()};
    const Stretch k{keys.first, keys.last()};
    const double pairs = allowed_pairs(GetParam(), queries, keys);
    const auto all = static_cast<double>(queries.count * keys.count);
    ASSERT_EQ(GetParam().hides_all(q, k), pairs == 0.0) << q.first << ", " << k.first;
    ASSERT_EQ(GetParam().shows_all(q, k), pairs == all) << q.first << ", " << k.first;
  }
}

TEST_P(BandRules, AreTheSameInStepsOfADilation) {
  for (const std::int64_t dilation : {1, 2, 3, 7}) {
    const Band steps = GetParam().divided_by(dilation);
    for (std::int64_t query = 0; query < 12; ++query) {
      for (std::int64_t key = 0; key < 12; ++key) {
        ASSERT_EQ(steps.allows(query, key), GetParam().allows(query * dilation, key * dilation))
            << dilation << ": " << query << ", " << key;
      }
    }
  }
}

TEST_P(BandRules, MoveWithTheKeys) {
  for (const std::int64_t distance : {-7, 0, 3}) {
    for (std::int64_t query = 0; query < 12; ++query) {
      for (std::int64_t key = 0; key < 12; ++key) {
        ASSERT_EQ(GetParam().shifted_by(distance).allows(query, key + distance),
                  GetParam().allows(query, key));
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Known, BandRules,
                         ::testing::Values(Band{}, Band::causal(), Band{-kNone, 5},
                                           Band{-kNone, -3}, Band{-4, 0}, Band{-4, 2}, Band{0, 0},
                                           Band{-3, kNone}, Band{2, 6}, Band{-9, -5}),
                         [](const auto& info) {
                           const auto text = [](std::int64_t limit) {
                             if (limit == kNone || limit == -kNone) return std::string("any");
                             return (limit < 0 ? "minus" : "") + std::to_string(std::abs(limit));
                           };
                           return text(info.param.least) + "_to_" + text(info.param.most);
                         });

TEST(Window, IsIntersectedWithCausal) {
  Pattern pattern = dense(1);
  EXPECT_TRUE(pattern.band().full());
  pattern.window = {3, 2};
  EXPECT_EQ(pattern.band(), (Band{-3, 2}));
  pattern.causal = true;
  EXPECT_EQ(pattern.band(), (Band{-3, 0}));
  pattern.window = {-1, 2};
  EXPECT_EQ(pattern.band(), Band::causal());
  pattern.window.before = std::numeric_limits<std::int64_t>::max();
  EXPECT_EQ(pattern.band(), Band::causal());
}

TEST(Window, BelowMinusOneIsRefused) {
  Pattern pattern = dense(1);
  pattern.window.after = -2;
  EXPECT_THROW(pattern.validate(), ConfigError);
}

TEST(Window, OfACausalPatternShowsNoLaterKey) {
  Pattern pattern = dense(1, /*causal=*/true);
  for (const std::int64_t after : {-1, 0}) {
    pattern.window = {3, after};
    EXPECT_NO_THROW(pattern.validate());
  }
  pattern.window = {3, 1};
  EXPECT_THROW(pattern.validate(), ConfigError);
}

}  // namespace
}  // namespace annulus
