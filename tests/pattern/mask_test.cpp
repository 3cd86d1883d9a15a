#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <string>

#include "annulus/error.h"
#include "annulus/mask.h"
#include "annulus/row_set.h"
#include "pattern/mask_rules.h"
#include "plan/pair_counts.h"

namespace annulus {
namespace {

class MaskRules : public ::testing::TestWithParam<Mask> {
 protected:
  std::int64_t draw(std::int64_t most) {
    return std::uniform_int_distribution<std::int64_t>(0, most)(random_);
  }
  RowSet draw_rows() { return {draw(20), 1 + draw(8), 1 + draw(4)}; }

  std::mt19937_64 random_{11};
};

TEST_P(MaskRules, CountPairsAsOneByOne) {
  for (int round = 0; round < 2000; ++round) {
    const RowSet queries = draw_rows();
    const RowSet keys = draw_rows();
    std::int64_t expected = 0;
    for (std::int64_t i = 0; i < queries.count; ++i) {
      for (std::int64_t j = 0; j < keys.count; ++j) {
        if (GetParam().allows(queries[i], keys[j])) ++expected;
      }
    }
    ASSERT_EQ(allowed_pairs(GetParam(), queries, keys), static_cast<double>(expected))
        << "queries " << queries.first << " + " << queries.stride << " x " << queries.count
        << ", keys " << keys.first << " + " << keys.stride << " x " << keys.count;
  }
}

// Stretches without gaps: the answers are exact there.
TEST_P(MaskRules, KnowStretchesThatAreHiddenOrShown) {
  for (int round = 0; round < 2000; ++round) {
    const RowSet queries{draw(20), 1 + draw(8), 1};
    const RowSet keys{draw(20), 1 + draw(8), 1};
    const Stretch q{queries.first, queries.last()};
    const Stretch k{keys.first, keys.last()};
    const double pairs = allowed_pairs(GetParam(), queries, keys);
    const auto all = static_cast<double>(queries.count * keys.count);
    ASSERT_EQ(hides_all(GetParam(), q, k), pairs == 0.0) << q.first << ", " << k.first;
    ASSERT_EQ(shows_all(GetParam(), q, k), pairs == all) << q.first << ", " << k.first;
  }
}

INSTANTIATE_TEST_SUITE_P(Known, MaskRules,
                         ::testing::Values(Mask{Mask::full, 0}, Mask{Mask::causal, 0},
                                           Mask{Mask::causal, 5}, Mask{Mask::causal, -3}),
                         [](const auto& info) {
                           const std::int64_t shift = info.param.shift;
                           return std::string(info.param.kind == Mask::full ? "full" : "causal") +
                                  (shift < 0   ? "_earlier"
                                   : shift > 0 ? "_later"
                                               : "");
                         });

// A kind that is added to Mask and not taught to planning.
TEST(MaskRule, RefusesAKindThatItDoesNotKnow) {
  const Mask strange{static_cast<Mask::Kind>(7), 0};
  const RowSet rows{0, 4, 1};
  EXPECT_THROW((void)allowed_pairs(strange, rows, rows), ConfigError);
  EXPECT_THROW((void)hides_all(strange, {0, 3}, {0, 3}), ConfigError);
  EXPECT_THROW((void)shows_all(strange, {0, 3}, {0, 3}), ConfigError);
}

}  // namespace
}  // namespace annulus
