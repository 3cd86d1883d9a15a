// Which launches begin and end sums of gradients. No GPU is needed.

#include "kernels/cuda/work/key_writers.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <tuple>
#include <vector>

#include "support/random_tables.h"

namespace annulus::cuda {
namespace {

// Of the stages of backward, from the side of the keys.
std::vector<Tables> gradient_tables(const Plan& plan, const Computation& computation, int tile) {
  std::vector<Tables> tables;
  for (int step = 0; step <= plan.steps(); ++step) {
    tables.push_back(make_tables({Stage::Kind::gradients, &plan, step, step}, computation,
                                 Side::keys, tile, false));
  }
  return tables;
}

std::vector<Tables*> pointers_to(std::vector<Tables>& tables) {
  std::vector<Tables*> pointers;
  for (Tables& of_stage : tables) pointers.push_back(&of_stage);
  return pointers;
}

// Of a backward pass by one rank.
KeyWriters writers_of_whole(const Pattern& pattern, Tables& tables) {
  const WholeSequence whole(pattern, 2048);
  tables = make_tables({Stage::Kind::gradients, &whole.plan, 0, 0}, whole.computation, Side::keys,
                       128, false);
  Tables* const stages[] = {&tables};
  return find_key_writers(stages, whole.computation, false);
}

// Sums of dK, as launches make them of whatever memory holds: here, how often a row was added to.
TEST(KeyWriters, KeySumsAreWrittenBeforeTheyAreAddedToAndEndWithTheLastLaunch) {
  int ranks = 0;
  int begun = 0;
  int ended = 0;
  for (std::uint64_t seed = 0; seed < 400; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    test::Random random(seed);
    const Case c = random_case(random);
    const int tile = static_cast<int>(random.one_of<std::int64_t>({8, 32, 128}));
    for (int rank = 0; rank < c.placement.ranks(); ++rank) {
      const Plan plan(plan_options(c), rank);
      const Computation computation = computation_of(c, rank);
      std::vector<Tables> tables = gradient_tables(plan, computation, tile);
      const std::vector<Tables*> stages = pointers_to(tables);
      const bool returned = c.travel == Travel::keys && c.placement.ranks() > 1;
      const KeyWriters writers = find_key_writers(stages, computation, returned);
      ++ranks;
      begun += writers.begin ? 1 : 0;
      ended += writers.end ? 1 : 0;

      constexpr int kGarbage = 1000;
      using Key = std::tuple<int, int, std::int64_t>;  // batch, head, row
      std::map<Key, int> sums;
      std::map<Key, int> expected;
      std::set<Key> of_last;
      for (int b = 0; b < 2; ++b) {
        for (int h = 0; h < c.kv_heads; ++h) {
          for (std::int64_t t = 0; t < computation.key_tokens; ++t) {
            sums[{b, h, t}] = writers.begin ? kGarbage : 0;
            expected[{b, h, t}] = 0;
          }
        }
      }
      for (std::size_t s = 0; s < tables.size(); ++s) {
        const Tables& of_stage = tables[s];
        ASSERT_EQ(of_stage.earlier.size(), of_stage.items.size());
        for (const Launch& launch : of_stage.launches) {
          of_last.clear();
          EXPECT_LE(s, writers.last_stage);
          for (std::int32_t i = 0; i < launch.items; ++i) {
            const auto number = static_cast<std::size_t>(launch.first_item + i);
            const Item& item = of_stage.items[number];
            const std::vector<Row> keys =
                rows_of(of_stage, of_stage.groups[static_cast<std::size_t>(item.group)].keys);
            const int head = of_stage.members[static_cast<std::size_t>(item.member)].kv_head;
            for (std::int32_t r = 0; r < item.rows; ++r) {
              const Row& row = keys[static_cast<std::size_t>(item.begin + r)];
              const bool earlier = (of_stage.earlier[number] >> (r % 32) & 1) != 0;
              if (row.source >= 0) {
                EXPECT_TRUE(earlier) << "parcels are cleared by whoever returns them";
                continue;
              }
              const Key key{item.batch, head, row.at};
              sums[key] = earlier ? sums[key] + 1 : 1;
              ++expected[key];
              of_last.insert(key);
            }
          }
        }
        if (s == 0 && returned) {  // from here on, others' gradients may be added
          for (const auto& [key, sum] : sums) ASSERT_EQ(sum, expected[key]);
        }
      }
      EXPECT_EQ(sums, expected);
      if (writers.end) {
        EXPECT_FALSE(returned);
        EXPECT_EQ(of_last.size(), sums.size());
      }
    }
  }
  // Both happen, and so does their opposite.
  EXPECT_GT(begun, ranks / 4);
  EXPECT_LT(begun, ranks);
  EXPECT_GT(ended, ranks / 16);
  EXPECT_LT(ended, ranks);
}

TEST(KeyWriters, UsualPatternsNeedNoPassesOverKeyGradients) {
  const std::vector<std::int64_t> segments{256, 512, 1024};
  const std::vector<std::int64_t> dilations{1, 2, 4};
  for (const Pattern& pattern :
       {dense(4, true), longnet(4, segments, dilations), longnet(4, segments, dilations, true),
        longnet(4, segments, dilations, true, Offsets::interleaved),
        longnet(4, std::vector<std::int64_t>{2048}, std::vector<std::int64_t>{16}, true,
                Offsets::all)}) {
    Tables tables;
    const KeyWriters writers = writers_of_whole(pattern, tables);
    EXPECT_TRUE(writers.begin);
    EXPECT_TRUE(writers.end);
  }
}

// A third of the rows have been written when the dense branch comes, and not every 32nd of an
// item's alike: words of 32 bits cannot say which. Sums are cleared, and added to by everybody.
TEST(KeyWriters, RowsThatDoNotRepeatEvery32ndAreClearedBefore) {
  const std::vector<std::int64_t> segments{256, 512};
  for (const std::int64_t dilation : {2, 3}) {
    const std::vector<std::int64_t> dilations{1, dilation};
    const Pattern pattern = longnet(4, segments, dilations);
    Tables tables;
    const KeyWriters writers = writers_of_whole(pattern, tables);
    const bool repeats = 32 % dilation == 0;
    EXPECT_EQ(writers.begin, repeats);
    EXPECT_EQ(std::all_of(tables.earlier.begin(), tables.earlier.end(),
                          [](std::uint32_t earlier) { return earlier == ~0U; }),
              !repeats);
  }
}

}  // namespace
}  // namespace annulus::cuda
