// What the stages of an executor become for CUDA kernels: tables, walked here as the kernels walk
// them. No GPU is needed.

#include "kernels/cuda/work/tables.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <map>
#include <set>
#include <tuple>
#include <vector>

#include "kernels/cuda/work/launch_traits.h"
#include "kernels/cuda/work/lists.h"
#include "kernels/cuda/work/most_indices.h"
#include "support/random_tables.h"

namespace annulus::cuda {
namespace {

int weight_of(const Tables& tables, const Group& group, const Row& query, const Row& key) {
  if (!group.band().allows(query.index, key.index)) return 0;
  int weight = 1;
  for (std::int32_t r = 0; r < group.repeats; ++r) {
    const Repeat& repeat = tables.repeats[static_cast<std::size_t>(group.first_repeat + r)];
    weight += repeat.contains(query.index) && repeat.contains(key.index) ? 1 : 0;
  }
  return weight;
}

// Where a row of a plan is globally.
class Positions {
 public:
  explicit Positions(const Plan& plan) : plan_(plan) {}
  [[nodiscard]] std::int64_t of(const Row& row) const {
    if (row.source < 0) return plan_.query_placement().position(plan_.rank(), row.at);
    std::int64_t left = row.at;
    for (const RowSet& rows : plan_.parcels()[static_cast<std::size_t>(row.source)].rows) {
      if (left < rows.count) return rows.first + left * rows.stride;
      left -= rows.count;
    }
    ADD_FAILURE() << "row " << row.at << " is not in parcel " << row.source;
    return -1;
  }

 private:
  const Plan& plan_;
};

TEST(CudaTables, HaveEveryAllowedPairAsOftenAsBranchesAllowIt) {
  for (std::uint64_t seed = 0; seed < 150; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    test::Random random(seed);
    const Case c = random_case(random);
    const int tile = static_cast<int>(random.one_of<std::int64_t>({1, 8, 64}));
    const int ratio = c.pattern.heads / c.kv_heads;
    const bool canonical = random.coin();
    for (const Side side : {Side::queries, Side::keys}) {
      // Batch entry, head, query, key.
      std::map<std::tuple<int, int, std::int64_t, std::int64_t>, int> weights;
      for (int rank = 0; rank < c.placement.ranks(); ++rank) {
        const Plan plan(plan_options(c), rank);
        const Positions positions(plan);
        const Computation computation = computation_of(c, rank);
        for (int step = 0; step <= plan.steps(); ++step) {
          const Stage stage{c.travel == Travel::keys && side == Side::queries
                                ? Stage::Kind::forward
                                : Stage::Kind::gradients,
                            &plan, step, step};
          const Tables tables = make_tables(stage, computation, side, tile, canonical);
          std::int32_t next = 0;
          std::int64_t dilation = std::numeric_limits<std::int64_t>::max();
          for (const Launch& launch : tables.launches) {
            EXPECT_EQ(launch.first_item, next);
            next += launch.items;
            const std::int64_t of_branch =
                c.pattern.branches[static_cast<std::size_t>(launch.branch)].dilation;
            EXPECT_LE(of_branch, dilation) << "coarse branches come first";
            dilation = of_branch;
            std::set<std::tuple<int, int, std::int32_t, std::int64_t>> written;
            for (std::int32_t i = 0; i < launch.items; ++i) {
              const Item& item = tables.items[static_cast<std::size_t>(launch.first_item + i)];
              const Group& group = tables.groups[static_cast<std::size_t>(item.group)];
              EXPECT_EQ(group.dilation, of_branch);
              EXPECT_LE(item.rows, tile);
              const std::vector<Row> queries = rows_of(tables, group.queries);
              const std::vector<Row> keys = rows_of(tables, group.keys);
              const std::vector<Row>& own = side == Side::queries ? queries : keys;
              const std::vector<Row>& other = side == Side::queries ? keys : queries;
              if (canonical) {
                EXPECT_NE(group.queries.ascending, 0);
                EXPECT_NE(group.keys.ascending, 0);
              }
              for (std::int32_t m = 0; m < item.members; ++m) {
                const Member& member = tables.members[static_cast<std::size_t>(item.member + m)];
                EXPECT_EQ(member.kv_head, member.head / ratio);
                for (std::int32_t r = item.begin; r < item.begin + item.rows; ++r) {
                  const Row& mine = own[static_cast<std::size_t>(r)];
                  if (m == 0) {
                    const int head = side == Side::queries ? member.head : member.kv_head;
                    EXPECT_TRUE(written.insert({item.batch, head, mine.source, mine.at}).second)
                        << "two items of a launch write one row";
                  }
                  for (const Row& theirs : other) {
                    const Row& query = side == Side::queries ? mine : theirs;
                    const Row& key = side == Side::queries ? theirs : mine;
                    const int weight = weight_of(tables, group, query, key);
                    if (weight > 0)
                      weights[{item.batch, member.head, positions.of(query), positions.of(key)}] +=
                          weight;
                  }
                }
              }
            }
          }
          EXPECT_EQ(next, static_cast<std::int32_t>(tables.items.size()));
        }
      }
      for (int entry = 0; entry < 2; ++entry) {
        for (int head = 0; head < c.pattern.heads; ++head) {
          for (std::int64_t q = 0; q < c.placement.tokens(); ++q) {
            for (std::int64_t k = 0; k < c.placement.tokens(); ++k) {
              int allowed = 0;
              for (const Branch& branch : c.pattern.branches)
                allowed += c.pattern.allows(branch, head, q, k, entry) ? 1 : 0;
              const auto found = weights.find({entry, head, q, k});
              const int weight = found == weights.end() ? 0 : found->second;
              ASSERT_EQ(weight, allowed)
                  << "entry " << entry << ", head " << head << ", query " << q << ", key " << k;
            }
          }
        }
      }
    }
  }
}

// Tables of one rank that holds everything.
Tables whole(const Pattern& pattern, std::int64_t tokens, int tile) {
  const WholeSequence whole(pattern, tokens);
  return make_tables({Stage::Kind::forward, &whole.plan, 0, 0}, whole.computation, Side::queries,
                     tile, false);
}

// Heads lie side by side in memory: blocks that run at the same time should be at the same tokens.
TEST(CudaTables, ForwardsItemsOfASegmentAreNeighboursWhateverTheirHead) {
  const std::vector<std::int64_t> segments{64, 128};
  const Pattern pattern = longnet(4, segments, std::vector<std::int64_t>{1, 4});
  WholeSequence all(pattern, 1024);
  all.computation.batch = 3;
  const Tables tables = make_tables({Stage::Kind::forward, &all.plan, 0, 0}, all.computation,
                                    Side::queries, 16, false);
  ASSERT_EQ(tables.launches.size(), 2U);
  for (const Launch& launch : tables.launches) {
    const std::int64_t segment = segments[static_cast<std::size_t>(launch.branch)];
    std::pair<std::int64_t, std::int64_t> before{-1, -1};  // batch, segment
    std::int64_t changes = 0;
    for (std::int32_t i = 0; i < launch.items; ++i) {
      const Item& item = tables.items[static_cast<std::size_t>(launch.first_item + i)];
      const Group& group = tables.groups[static_cast<std::size_t>(item.group)];
      const std::pair<std::int64_t, std::int64_t> here{
          item.batch, rows_of(tables, group.queries)[0].at / segment};
      changes += here == before ? 0 : 1;
      before = here;
    }
    EXPECT_EQ(changes, all.computation.batch * 1024 / segment);
  }
}

TEST(CudaTables, ArrangedItemsAreTheSameAndLoadBlocksEvenly) {
  constexpr int kBlocks = 12;
  constexpr int kTile = 64;
  const Tables tables = whole(dense(4, true), 64 * kTile, kTile);
  ASSERT_EQ(tables.launches.size(), 1U);
  const std::vector<Item> arranged = arrange_items(tables, tables.launches[0], kBlocks, kTile);
  const auto key = [](const Item& item) { return std::tuple(item.member, item.begin, item.rows); };
  std::multiset<std::tuple<int, int, int>> before;
  std::multiset<std::tuple<int, int, int>> after;
  std::vector<std::int64_t> load(kBlocks, 0);
  for (const Item& item : tables.items) before.insert(key(item));
  for (std::size_t i = 0; i < arranged.size(); ++i) {
    if (arranged[i].rows == 0) continue;
    after.insert(key(arranged[i]));
    load[i % kBlocks] += arranged[i].begin / kTile + 1;  // tiles of keys that a causal item sees
  }
  EXPECT_EQ(before, after);
  const auto [least, most] = std::minmax_element(load.begin(), load.end());
  EXPECT_LE(*most, 1.1 * static_cast<double>(*least));
}

// What hosts and kernels find of a list by index, against a look at every row.
TEST(CudaTables, RowsAndTilesBetweenIndicesAreThoseOfTheList) {
  for (std::uint64_t seed = 0; seed < 100; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    test::Random random(seed);
    const Case c = random_case(random);
    const Plan plan(plan_options(c), 0);
    const Tables tables = make_tables({Stage::Kind::gradients, &plan, 0, plan.steps()},
                                      computation_of(c, 0), Side::keys, 64, random.coin());
    for (const Group& group : tables.groups) {
      const std::vector<Row> rows = rows_of(tables, group.keys);
      const auto size = static_cast<std::int64_t>(rows.size());
      const auto begin = static_cast<std::int32_t>(random.between(0, size - 1));
      const auto count = static_cast<std::int32_t>(random.between(1, size - begin));
      const Stretch found = indices_of(tables, group.keys, begin, count);
      const auto [low, high] =
          std::minmax_element(rows.begin() + begin, rows.begin() + begin + count,
                              [](const Row& a, const Row& b) { return a.index < b.index; });
      EXPECT_EQ(found.first, low->index);
      EXPECT_EQ(found.last, high->index);
      const std::int64_t from = random.between(-10, 100);
      const Stretch wanted{from, from + random.between(-1, 60)};
      const int tile = static_cast<int>(random.between(1, 20));
      std::int64_t within = 0;
      std::int64_t tiles = 0;
      for (std::int64_t t = 0; t * tile < size; ++t) {
        std::int64_t of_tile = 0;
        for (std::int64_t r = t * tile; r < std::min(size, (t + 1) * tile); ++r) {
          const std::int32_t index = rows[static_cast<std::size_t>(r)].index;
          of_tile += wanted.first <= index && index <= wanted.last ? 1 : 0;
        }
        within += of_tile;
        tiles += of_tile > 0 ? 1 : 0;
      }
      EXPECT_EQ(count_rows(tables, group.keys, wanted), within);
      const std::int64_t at_most = count_tiles(tables, group.keys, wanted, tile);
      if (group.keys.ascending != 0) {
        EXPECT_EQ(at_most, tiles);
      } else {
        EXPECT_GE(at_most, tiles);
      }
    }
  }
}

// Each has a prologue, and a state that the next one reads: 16 launches of short items took twice
// as long as one. Where each branch has its own deltas, a launch is of one.
TEST(CudaTables, AllOffsetsOfADilationAreOneLaunch) {
  using List = std::vector<std::int64_t>;
  const auto launches = [](const Pattern& pattern, MixGradient mix, Side side) {
    WholeSequence all(pattern, 512);
    all.computation.mix_gradient = mix;
    const Stage stage{Stage::Kind::gradients, &all.plan, 0, 0};
    return make_tables(stage, all.computation, side, 64, false).launches.size();
  };
  const Pattern alone = longnet(2, List{512}, List{16}, true, Offsets::all);
  const Pattern several = longnet(2, List{64, 512}, List{4, 16}, false, Offsets::all);
  const Pattern blocked = longnet(2, List{64, 512}, List{4, 4}, false);
  const Pattern groups = head_groups(4, List{64, 128}, List{4, 4});
  for (const Side side : {Side::queries, Side::keys}) {
    EXPECT_EQ(launches(alone, MixGradient::full, side), 1U);
    EXPECT_EQ(launches(alone, MixGradient::detached, side), 16U);
    EXPECT_EQ(launches(several, MixGradient::full, side), 2U);
    EXPECT_EQ(launches(blocked, MixGradient::full, side), 2U) << "rows are in both";
    EXPECT_EQ(launches(groups, MixGradient::full, side), 1U) << "of other heads";
  }
}

TEST(CudaTables, LongestItemsComeFirstAmongHeadsThatFitTheCache) {
  constexpr int kTile = 1024;
  const Tables made = whole(dense(4, true), kCachedRows / 2, kTile);
  ASSERT_EQ(made.launches.size(), 1U);
  Tables sorted = made;
  put_longest_first(sorted, Side::queries);
  ASSERT_EQ(sorted.items.size(), made.items.size());
  std::set<std::pair<int, int>> seen;
  const std::size_t together = sorted.items.size() / 2;  // of two heads
  for (std::size_t i = 0; i < sorted.items.size(); ++i) {
    const Item& item = sorted.items[i];
    EXPECT_EQ(item.member / 2, static_cast<int>(i / together));
    if (i % together != 0) {
      EXPECT_LE(item.begin, sorted.items[i - 1].begin);
    }
    EXPECT_TRUE(seen.insert({item.member, item.begin}).second);
  }
}

TEST(CudaTables, ItemsOfNarrowWindowsAreSortedByPosition) {
  using List = std::vector<std::int64_t>;
  Pattern pattern = longnet(2, List{1024}, List{4}, true, Offsets::all);
  const auto begins = [&](std::int64_t before) {
    pattern.window = {before, 0};
    Tables tables = whole(pattern, 1024, 64);
    put_by_position(tables, 64);
    EXPECT_EQ(tables.launches.size(), 1U);
    List out;
    for (const Item& item : tables.items) out.push_back(item.begin);
    return out;
  };
  EXPECT_TRUE(std::ranges::is_sorted(begins(100)));
  EXPECT_FALSE(std::ranges::is_sorted(begins(-1))) << "no window";
  EXPECT_FALSE(std::ranges::is_sorted(begins(std::int64_t{1} << 20))) << "too wide for the cache";
}

TEST(CudaTables, MostIndicesBoundThoseOfEveryList) {
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    test::Random random(seed);
    const Case c = random_case(random);
    const std::int64_t most = most_indices(c.pattern, c.placement.tokens());
    for (int rank = 0; rank < c.placement.ranks(); ++rank) {
      const Plan plan(plan_options(c), rank);
      const Tables tables = make_tables({Stage::Kind::gradients, &plan, 0, plan.steps()},
                                        computation_of(c, rank), Side::keys, 64, false);
      for (const auto& run : tables.runs)
        EXPECT_LT(run.index + std::int64_t{run.count - 1} * run.index_stride, most);
    }
  }
  // As many as a causal mask over a ring's whole sequence may have, and more than kernels count.
  EXPECT_EQ(most_indices(dense(1, true), std::int64_t{1} << 30), std::int64_t{1} << 30);
  EXPECT_EQ(
      most_indices(
          longnet(2, std::vector<std::int64_t>{100, 4096}, std::vector<std::int64_t>{3, 2}), 1001),
      501);
}

TEST(CudaTables, TraitsSayWhatKernelsAreChosenBy) {
  const std::vector<std::int64_t> segments{256, 512};
  const Pattern nested = longnet(4, segments, std::vector<std::int64_t>{1, 2}, true);
  const Tables shared = whole(nested, 1024, 64);
  ASSERT_EQ(shared.launches.size(), 2U);
  const LaunchTraits guest = launch_traits(shared, shared.launches[0]);  // coarse first
  EXPECT_EQ(guest.key_stride, 2);
  EXPECT_EQ(guest.weights, PairWeights::none);
  EXPECT_EQ(guest.limits, Limits::none);  // all its keys are in segments before its queries'
  const LaunchTraits host = launch_traits(shared, shared.launches[1]);
  EXPECT_EQ(host.limits, Limits::most);
  EXPECT_EQ(host.key_stride, 1);
  EXPECT_EQ(host.weights, PairWeights::periodic);  // every second row counts twice

  Pattern windowed = dense(1, true);
  for (const auto& [before, limits] :
       {std::pair{100, Limits::both}, std::pair{1023, Limits::most}, std::pair{-1, Limits::most}}) {
    windowed.window.before = before;
    const Tables tables = whole(windowed, 1024, 64);
    EXPECT_EQ(launch_traits(tables, tables.launches[0]).limits, limits) << before;
  }

  const Pattern odd =
      longnet(3, std::vector<std::int64_t>{240, 480}, std::vector<std::int64_t>{1, 3});
  const Tables thirds = whole(odd, 960, 64);
  ASSERT_EQ(thirds.launches.size(), 2U);
  EXPECT_EQ(launch_traits(thirds, thirds.launches[1]).weights, PairWeights::general);
}

// Every received row must be where bulk copies look for it: a row of the grid of its launch.
TEST(CudaTables, ReceivedRowsAreRowsOfTheLaunchesGrid) {
  constexpr std::int64_t kRow = 256;
  constexpr std::int64_t kStatistics = 16;
  int found = 0;
  int between = 0;
  for (std::uint64_t seed = 0; seed < 150; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    test::Random random(seed);
    const Case c = random_case(random);
    const bool by_keys = c.travel == Travel::keys;
    const Plan plan(plan_options(c), static_cast<int>(random.between(0, c.placement.ranks() - 1)));
    const Computation computation = computation_of(c, plan.rank());
    const ParcelLayout layout(
        plan, computation.batch,
        by_keys ? std::vector{kRow, kRow} : std::vector{kRow, kRow, kStatistics});
    // As a courier puts them: those of a step one after the other.
    std::vector<std::byte*> bases(plan.parcels().size(), nullptr);
    for (int step = 1; step <= plan.steps(); ++step) {
      auto* next = reinterpret_cast<std::byte*>(std::uintptr_t{1} << (40 + step % 2));
      for (const Hop& hop : plan.incoming(step)) {
        bases[static_cast<std::size_t>(hop.parcel)] = next;
        next += layout.bytes(hop.parcel);
      }
    }
    const Side side = by_keys ? Side::keys : Side::queries;
    for (int step = 0; step <= plan.steps(); ++step) {
      const Tables tables = make_tables({Stage::Kind::gradients, &plan, step, step}, computation,
                                        Side::keys, 64, false);
      for (const Launch& launch : tables.launches) {
        const LaunchTraits traits = launch_traits(tables, launch);
        EXPECT_EQ(by_keys ? traits.keys_received : traits.queries_received, step > 0);
        EXPECT_FALSE(by_keys ? traits.queries_received : traits.keys_received);
        const std::vector<std::int32_t> parcels = parcels_of(tables, launch, side);
        EXPECT_EQ(parcels.empty(), step == 0);
        // Statistics lie between the rows of queries: those begin between rows of the grid, too.
        const std::int64_t step_bytes = by_keys ? kRow : kMapStep;
        const RowGrid grid = grid_of({&layout, &bases}, parcels, kRow, step_bytes);
        EXPECT_EQ(grid.rows == 0, step == 0);
        if (grid.rows == 0) continue;
        for (std::int32_t i = 0; i < launch.items; ++i) {
          const Item& item = tables.items[static_cast<std::size_t>(launch.first_item + i)];
          const Group& group = tables.groups[static_cast<std::size_t>(item.group)];
          const Member& member = tables.members[static_cast<std::size_t>(item.member)];
          for (const Row& row : rows_of(tables, by_keys ? group.keys : group.queries)) {
            for (const int section : {0, 1}) {
              const std::byte* const at =
                  bases[static_cast<std::size_t>(row.source)] +
                  layout.offset(row.source, item.batch, member.unit, section) + row.at * kRow;
              ASSERT_EQ((at - grid.base) % step_bytes, 0);
              ASSERT_GE(at, grid.base);
              ASSERT_LT((at - grid.base) / kRow, grid.rows);
              ++found;
              between += (at - grid.base) % kRow != 0 ? 1 : 0;
            }
          }
        }
      }
    }
  }
  EXPECT_GT(between, 0);
  EXPECT_GT(found, between);
}

TEST(CudaTables, ParcelsThatBeginBetweenRowsAreNoGrid) {
  const Pattern pattern = dense(1, false);
  const Placement placement = Placement::contiguous(12, 3);
  const Plan plan({pattern, placement, placement, 1, Schedule::gather, Travel::keys}, 0);
  const ParcelLayout layout(plan, 1, {256, 256});
  std::vector<std::byte*> bases(plan.parcels().size(), nullptr);
  std::vector<std::int32_t> used;
  auto* next = reinterpret_cast<std::byte*>(std::uintptr_t{1} << 40);
  for (const Hop& hop : plan.incoming(1)) {
    used.push_back(hop.parcel);
    bases[static_cast<std::size_t>(hop.parcel)] = next;
    next += layout.bytes(hop.parcel) + 128;
  }
  ASSERT_EQ(used.size(), 2U);
  EXPECT_EQ(grid_of({&layout, &bases}, used, 256, 256).rows, 0);
  EXPECT_EQ(grid_of({&layout, &bases}, used, 256, 128).rows, 16);
  bases[static_cast<std::size_t>(used[1])] -= 128;
  EXPECT_EQ(grid_of({&layout, &bases}, used, 256, 256).rows, 16);
}

}  // namespace
}  // namespace annulus::cuda
