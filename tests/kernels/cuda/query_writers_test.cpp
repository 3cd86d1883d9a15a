// Which launch of forward is the last to have a row. No GPU is needed.

#include "kernels/cuda/work/query_writers.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <tuple>
#include <vector>

#include "support/random_tables.h"

namespace annulus::cuda {
namespace {

using Key = std::tuple<int, int, std::int64_t>;  // batch, head, row

Tables forward_tables(const Plan& plan, const Computation& computation, int tile) {
  return make_tables({Stage::Kind::forward, &plan, 0, plan.steps()}, computation, Side::queries,
                     tile, false);
}

// f(row, whether a later launch has it), launch by launch.
template <typename F>
void for_each_row(const Tables& tables, const F& f) {
  ASSERT_EQ(tables.later.size(), tables.items.size());
  for (const Launch& launch : tables.launches) {
    for (std::int32_t i = launch.first_item; i < launch.first_item + launch.items; ++i) {
      const Item& item = tables.items[static_cast<std::size_t>(i)];
      const std::vector<Row> rows =
          rows_of(tables, tables.groups[static_cast<std::size_t>(item.group)].queries);
      const int head = tables.members[static_cast<std::size_t>(item.member)].head;
      const std::uint32_t word = tables.later[static_cast<std::size_t>(i)];
      for (std::int32_t r = 0; r < item.rows; ++r) {
        f(Key{item.batch, head, rows[static_cast<std::size_t>(item.begin + r)].at},
          (word >> static_cast<unsigned>(r % 32) & 1U) != 0);
      }
    }
  }
}

TEST(QueryWriters, RowsEndWithTheLastLaunchThatHasThem) {
  int cases = 0;
  int even = 0;
  int several = 0;
  for (std::uint64_t seed = 0; seed < 400; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    test::Random random(seed);
    const Case c = random_case(random);
    const int tile = static_cast<int>(random.one_of<std::int64_t>({8, 32, 128}));
    const Plan plan(plan_options(c), 0);
    const Computation computation = computation_of(c, 0);
    Tables tables = forward_tables(plan, computation, tile);
    if (random.coin()) std::reverse(tables.launches.begin(), tables.launches.end());
    ++cases;
    if (!find_later_launches(tables, computation)) {
      EXPECT_TRUE(tables.later.empty());
      continue;
    }
    ++even;
    if (tables.launches.size() > 1) ++several;
    std::map<Key, int> ended;
    for_each_row(tables, [&](const Key& key, bool later) {
      const auto [at, fresh] = ended.try_emplace(key, 0);
      EXPECT_EQ(at->second, 0) << "a launch has the row after it has ended";
      if (!later) ++at->second;
    });
    for (const auto& [key, times] : ended) EXPECT_EQ(times, 1);
  }
  EXPECT_GT(several, cases / 4);
  EXPECT_LT(even, cases);
}

TEST(QueryWriters, UsualPatternsEndRowsInTheirLaunches) {
  const std::vector<std::int64_t> segments{256, 512, 1024};
  const std::vector<std::int64_t> dilations{1, 2, 4};
  for (const Pattern& pattern :
       {longnet(4, segments, dilations), longnet(4, segments, dilations, true),
        longnet(4, segments, dilations, true, Offsets::interleaved)}) {
    const WholeSequence whole(pattern, 2048);
    Tables tables = forward_tables(whole.plan, whole.computation, 128);
    std::reverse(tables.launches.begin(), tables.launches.end());
    EXPECT_TRUE(find_later_launches(tables, whole.computation));
  }
}

}  // namespace
}  // namespace annulus::cuda
