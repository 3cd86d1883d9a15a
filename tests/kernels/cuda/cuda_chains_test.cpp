// Items in chains, taken by blocks of threads as the Hopper backward kernel takes them, at whatever
// speed each of them has. No GPU is needed.

#include "kernels/cuda/work/chains.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/cuda/work/lists.h"
#include "support/random_tables.h"

namespace annulus::cuda {
namespace {

constexpr std::int32_t kFinished = std::numeric_limits<std::int32_t>::max();

// What a block adds to dQ at once, when it may, and how far it is then: as the kernel has it.
struct Step {
  int member;
  std::vector<Row> rows;
  std::vector<bool> seeing;  // whether the item has something to add to the row
  std::int32_t until;
  std::int32_t reached;
};

std::vector<Step> steps_of(const Tables& tables, const Item& item, const ItemTurn& turn, int size) {
  const Group& group = tables.groups[static_cast<std::size_t>(item.group)];
  const std::vector<Row> queries = rows_of(tables, group.queries);
  const std::vector<Row> keys = rows_of(tables, group.keys);
  const Stretch of_keys = indices_of(tables, group.keys, item.begin, item.rows);
  const Band band = group.band();
  struct Block {
    std::vector<Row> rows;
    std::vector<bool> seeing;
    std::int32_t last;
  };
  std::vector<Block> blocks;
  for (std::size_t begin = 0; begin < queries.size(); begin += static_cast<std::size_t>(size)) {
    const std::size_t end = std::min(queries.size(), begin + static_cast<std::size_t>(size));
    Block block{{queries.begin() + static_cast<std::ptrdiff_t>(begin),
                 queries.begin() + static_cast<std::ptrdiff_t>(end)},
                {},
                static_cast<std::int32_t>(end) - 1};
    Stretch of_block{std::numeric_limits<std::int32_t>::max(), -1};
    for (const Row& row : block.rows) {
      of_block.first = std::min<std::int64_t>(of_block.first, row.index);
      of_block.last = std::max<std::int64_t>(of_block.last, row.index);
      bool seeing = false;
      for (std::int32_t i = 0; i < item.rows; ++i)
        seeing =
            seeing || band.allows(row.index, keys[static_cast<std::size_t>(item.begin + i)].index);
      block.seeing.push_back(seeing);
    }
    if (group.queries.ascending != 0)
      block.last =
          static_cast<std::int32_t>(std::min(of_block.last, band.queries_of(of_keys).last));
    if (!band.hides_all(of_block, of_keys)) blocks.push_back(std::move(block));
  }
  std::vector<Step> steps;
  if (blocks.empty()) return {{0, {}, {}, kFinished, kFinished}};
  for (int member = 0; member < item.members; ++member) {
    for (std::size_t b = 0; b < blocks.size(); ++b) {
      const bool ends = b + 1 == blocks.size() && turn.finish != 0;
      const std::int32_t reached =
          ends ? (member + 1) * turn.span : member * turn.span + blocks[b].last + 1;
      const std::int32_t until = !ends && blocks[b].last < turn.alone ? 0 : reached;
      steps.push_back({member, blocks[b].rows, blocks[b].seeing, until, reached});
    }
  }
  steps.back().reached = kFinished;
  return steps;
}

using RowName = std::tuple<std::int32_t, std::int32_t, std::int32_t, std::int64_t>;
using Sums = std::map<RowName, std::vector<std::int32_t>>;  // who added, in order

// Runs a launch with some blocks at random speeds, each of which adds the first and the second half
// of its rows apart, as for head dim 64. False: they all wait for each other.
bool run(const Tables& tables, const Launch& launch, const std::vector<ItemTurn>& turns, int size,
         int blocks, test::Random& random, Sums& sums) {
  struct Walker {
    std::int32_t item = -1;
    std::array<std::size_t, 2> step{};
    std::vector<Step> steps;
  };
  std::vector<Walker> walkers(static_cast<std::size_t>(blocks));
  std::vector<std::array<std::int32_t, 2>> progress(tables.items.size(), {0, 0});
  std::int32_t next = launch.first_item;
  const std::int32_t end = launch.first_item + launch.items;
  std::int64_t idle = 0;
  for (std::int32_t left = launch.items; left > 0;) {
    Walker& walker = walkers[static_cast<std::size_t>(random.between(0, std::int64_t{blocks} - 1))];
    if (walker.item < 0) {
      if (next == end) continue;
      walker.item = next++;
      walker.step = {};
      walker.steps = steps_of(tables, tables.items[static_cast<std::size_t>(walker.item)],
                              turns[static_cast<std::size_t>(walker.item)], size);
    }
    const auto half = static_cast<std::size_t>(random.between(0, 1));
    if (walker.step[half] == walker.steps.size()) continue;
    const ItemTurn& turn = turns[static_cast<std::size_t>(walker.item)];
    const Step& step = walker.steps[walker.step[half]];
    if (turn.after >= 0) {
      const auto& before = progress[static_cast<std::size_t>(turn.after)];
      if (std::min(before[0], before[1]) < step.until) {
        if (++idle > 10000) return false;
        continue;
      }
    }
    idle = 0;
    const Item& item = tables.items[static_cast<std::size_t>(walker.item)];
    const std::int32_t head =
        tables.members[static_cast<std::size_t>(item.member + step.member)].head;
    const std::size_t first = half * static_cast<std::size_t>(size) / 2;
    const std::size_t last = std::min(step.rows.size(), first + static_cast<std::size_t>(size) / 2);
    for (std::size_t r = first; r < last; ++r) {
      if (step.seeing[r])
        sums[{item.batch, head, step.rows[r].source, step.rows[r].at}].push_back(walker.item);
    }
    progress[static_cast<std::size_t>(walker.item)][half] = step.reached;
    ++walker.step[half];
    if (walker.step[0] == walker.steps.size() && walker.step[1] == walker.steps.size()) {
      walker.item = -1;
      --left;
    }
  }
  return true;
}

struct Example {
  Pattern pattern;
  Placement placement;
  int kv_heads;
  Schedule schedule;
  Travel travel;
};

Example random_example(test::Random& random) {
  const bool nested = random.coin();  // a branch has four groups in a segment then: shared_pairs.h
  const std::int64_t tokens = nested ? random.between(256, 600) : random.between(1, 200);
  const int heads = static_cast<int>(random.one_of<std::int64_t>({1, 2, 4, 8}));
  const bool causal = random.coin();
  Pattern pattern;
  if (!nested) {
    pattern = test::random_branches(random, tokens, heads, causal);
  } else {
    const std::vector<std::int64_t> segments{64, 256};
    const std::vector<std::int64_t> dilations{1, 2};
    pattern =
        longnet(heads, segments, dilations, causal,
                random.one_of<Offsets>({Offsets::blocked, Offsets::interleaved, Offsets::all}));
  }
  pattern.window = test::any_window(random, tokens, causal);
  const std::string name =
      random.one_of<std::string>({"contiguous", "zigzag", "striped", "hilbert"});
  const int ranks = static_cast<int>(random.between(1, 3));
  return {std::move(pattern), Placement::named(name, tokens, ranks),
          random.coin()   ? heads
          : random.coin() ? (heads + 1) / 2
                          : 1,
          random.coin() ? Schedule::ring : Schedule::gather,
          random.coin() ? Travel::keys : Travel::queries};
}

TEST(CudaChains, EveryRowIsAddedToInOneOrderWhateverTheSpeedOfBlocks) {
  std::size_t waits = 0;
  std::size_t several_groups = 0;
  for (std::uint64_t seed = 0; seed < 120; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    test::Random random(seed);
    const Example e = random_example(random);
    const int size = static_cast<int>(random.one_of<std::int64_t>({4, 8}));
    const PlanOptions options{e.pattern,  e.placement, e.placement,
                              e.kv_heads, e.schedule,  e.travel};
    const Plan plan(options, 0);
    Computation computation;
    computation.pattern = &e.pattern;
    computation.query_tokens = computation.key_tokens = e.placement.local_tokens(0);
    computation.kv_heads = e.kv_heads;
    computation.batch = 2;
    for (int step = 0; step <= plan.steps(); ++step) {
      const Stage stage{Stage::Kind::gradients, &plan, step, step};
      const Tables made = make_tables(stage, computation, Side::keys, 8, false);
      Tables tables = made;
      const std::vector<ItemTurn> turns =
          put_in_chains(tables, {.blocks = 4, .step = size, .distance = random.coin() ? 0.0 : 4.0});
      ASSERT_EQ(turns.size(), tables.items.size());
      // The same items, each in a launch of its branch.
      const auto name = [](const Item& i) {
        return std::tuple{i.group, i.member, i.members, i.batch, i.begin, i.rows};
      };
      const auto less = [&](const Item& a, const Item& b) { return name(a) < name(b); };
      std::vector<Item> before = made.items;
      std::vector<Item> after = tables.items;
      std::sort(before.begin(), before.end(), less);
      std::sort(after.begin(), after.end(), less);
      EXPECT_TRUE(std::equal(before.begin(), before.end(), after.begin(), after.end(),
                             [&](const Item& a, const Item& b) { return name(a) == name(b); }));
      std::int32_t next = 0;
      for (const Launch& launch : tables.launches) {
        ASSERT_EQ(launch.first_item, next);
        next += launch.items;
        for (std::int32_t i = launch.first_item; i < next; ++i) {
          const Item& item = tables.items[static_cast<std::size_t>(i)];
          const ItemTurn& turn = turns[static_cast<std::size_t>(i)];
          const auto branch = static_cast<std::size_t>(launch.branch);
          EXPECT_EQ(tables.groups[static_cast<std::size_t>(item.group)].dilation,
                    e.pattern.branches[branch].dilation);
          EXPECT_LT(turn.after, i) << "whoever is waited for is taken first";
          EXPECT_TRUE(turn.after < 0 || turn.after >= launch.first_item);
          if (turn.after < 0) continue;
          ++waits;
          if (tables.items[static_cast<std::size_t>(turn.after)].group != item.group)
            ++several_groups;
        }
        Sums first;
        for (const int blocks : {1, 3, 7}) {
          Sums sums;
          ASSERT_TRUE(run(tables, launch, turns, size, blocks, random, sums)) << "a deadlock";
          if (blocks == 1) first = sums;
          EXPECT_EQ(sums, first) << blocks << " blocks";
        }
      }
      EXPECT_EQ(next, static_cast<std::int32_t>(tables.items.size()));
    }
  }
  EXPECT_GT(waits, 0U);
  EXPECT_GT(several_groups, 0U);
}

// A launch of groups with one item each, made by hand. Queries and keys: [begin, end), which are
// indices and places; heads: of one K/V head.
struct HandMade {
  std::pair<std::int32_t, std::int32_t> queries;
  std::pair<std::int32_t, std::int32_t> keys;
  std::vector<std::int32_t> heads;
};

Tables tables_of(const std::vector<HandMade>& groups, bool causal) {
  Tables tables;
  const auto add = [&](std::pair<std::int32_t, std::int32_t> rows) {
    Run run;
    run.count = rows.second - rows.first;
    run.index = rows.first;
    run.first = rows.first;
    tables.runs.push_back(run);
    return RowList{static_cast<std::int32_t>(tables.runs.size()) - 1, 1, run.count, 1, 0};
  };
  for (const HandMade& from : groups) {
    Item item;
    item.group = static_cast<std::int32_t>(tables.groups.size());
    item.member = static_cast<std::int32_t>(tables.members.size());
    item.members = static_cast<std::int32_t>(from.heads.size());
    item.rows = from.keys.second - from.keys.first;
    tables.items.push_back(item);
    for (const std::int32_t head : from.heads) tables.members.push_back({head, 0, 0});
    Group group;
    group.queries = add(from.queries);
    group.keys = add(from.keys);
    group.set_band(causal ? Band::causal() : Band{});
    tables.groups.push_back(group);
  }
  tables.launches.push_back({0, 0, static_cast<std::int32_t>(tables.items.size())});
  return tables;
}

void expect_one_order(const Tables& tables, const std::vector<ItemTurn>& turns) {
  for (const Launch& launch : tables.launches) {
    Sums first;
    for (std::uint64_t seed = 0; seed < 50; ++seed) {
      test::Random random(seed);
      Sums sums;
      ASSERT_TRUE(run(tables, launch, turns, 4, seed == 0 ? 1 : 3, random, sums)) << "a deadlock";
      if (seed == 0) first = sums;
      ASSERT_EQ(sums, first) << "seed " << seed;
    }
  }
}

TEST(CudaChains, AnItemWithFewerRowsHoldsTheOthersInOrder) {
  Tables tables = tables_of(
      {{{0, 32}, {20, 24}, {0, 1}}, {{0, 16}, {10, 14}, {0, 1}}, {{0, 32}, {0, 4}, {0, 1}}}, false);
  const std::vector<ItemTurn> turns = put_in_chains(tables, {});
  ASSERT_EQ(tables.launches.size(), 1U);
  EXPECT_EQ(turns[2].after, 1);
  EXPECT_EQ(turns[1].after, 0);
  EXPECT_EQ(turns[1].finish, 1) << "16 to 31 are the first one's";
  expect_one_order(tables, turns);
}

TEST(CudaChains, RowsAreNobodysOnlyIfNoItemBeforeHasThem) {
  Tables tables =
      tables_of({{{0, 32}, {20, 24}, {0}}, {{28, 32}, {5, 9}, {0}}, {{0, 32}, {0, 4}, {0}}}, true);
  const std::vector<ItemTurn> turns = put_in_chains(tables, {});
  ASSERT_EQ(tables.launches.size(), 1U);
  EXPECT_EQ(turns[1].alone, 20);
  EXPECT_EQ(turns[2].alone, 20) << "not 28, where the one before it begins";
  expect_one_order(tables, turns);
}

TEST(CudaChains, LaunchesAreSplitWhereAnItemWouldWaitForSeveral) {
  Tables tables = tables_of({{{0, 32}, {0, 4}, {0}},
                             {{0, 32}, {4, 8}, {1}},
                             {{0, 32}, {8, 12}, {0, 1}},
                             {{40, 48}, {12, 16}, {0, 1}}},
                            false);
  const std::vector<ItemTurn> turns = put_in_chains(tables, {});
  ASSERT_EQ(tables.launches.size(), 2U);
  EXPECT_EQ(tables.launches[0].items, 3);
  EXPECT_EQ(tables.items[3].group, 2);
  for (const ItemTurn& turn : turns) EXPECT_EQ(turn.after, -1);
  // One, but of other members: their positions do not compare.
  Tables other = tables_of({{{0, 32}, {0, 4}, {0}}, {{0, 32}, {4, 8}, {0, 1}}}, false);
  static_cast<void>(put_in_chains(other, {}));
  EXPECT_EQ(other.launches.size(), 2U);
}

// Dense attention: one chain for each head, side by side (one after the other under a causal mask,
// where each item begins a tile after the one before it), and the last keys first.
TEST(CudaChains, BeginWithTheLastKeysAndKeepADistance) {
  for (const bool causal : {false, true}) {
    SCOPED_TRACE(causal ? "causal" : "full");
    const Pattern pattern = dense(6, causal);
    const Placement placement = Placement::named("contiguous", 256, 1);
    const Plan plan({pattern, placement, placement, 6, Schedule::ring, Travel::keys}, 0);
    Computation computation;
    computation.pattern = &pattern;
    computation.query_tokens = computation.key_tokens = 256;
    computation.kv_heads = 6;
    computation.batch = 1;
    const Stage stage{Stage::Kind::gradients, &plan, 0, 0};
    Tables tables = make_tables(stage, computation, Side::keys, 64, false);
    // Items have 4 steps of 64 queries: 8 blocks, a step apart, want 2 chains.
    const std::vector<ItemTurn> turns =
        put_in_chains(tables, {.blocks = 8, .step = 64, .distance = 1});
    ASSERT_EQ(tables.launches.size(), 1U);
    ASSERT_EQ(tables.items.size(), 24U);
    for (std::size_t i = 0; i < tables.items.size(); ++i) {
      const std::size_t width = causal ? 1 : 2;
      const std::size_t in_bundle = i % (4 * width);  // chains of four
      const auto number = static_cast<std::int32_t>(i);
      EXPECT_EQ(tables.items[i].begin, 192 - 64 * static_cast<std::int32_t>(in_bundle / width));
      if (in_bundle < width) {
        EXPECT_EQ(turns[i].after, -1);
      } else {
        EXPECT_EQ(turns[i].after, number - static_cast<std::int32_t>(width));
        EXPECT_EQ(turns[i].alone, causal ? tables.items[i].begin + 64 : 0);
      }
      EXPECT_EQ(turns[i].finish, 0);
      EXPECT_EQ(turns[i].span, 256);
    }
  }
}

// Offsets of a head have no row in common: nobody waits for an item of another one.
TEST(CudaChains, OffsetsOfALaunchAreChainsOfTheirOwn) {
  const Pattern pattern =
      longnet(2, std::vector<std::int64_t>{256}, std::vector<std::int64_t>{4}, true, Offsets::all);
  const WholeSequence whole(pattern, 256);
  Tables tables = make_tables({Stage::Kind::gradients, &whole.plan, 0, 0}, whole.computation,
                              Side::keys, 16, false);
  const std::vector<ItemTurn> turns = put_in_chains(tables, {.blocks = 8, .step = 4});
  ASSERT_EQ(tables.launches.size(), 1U);
  int chains = 0;
  for (std::size_t i = 0; i < tables.items.size(); ++i) {
    const std::int32_t before = turns[i].after;
    if (before < 0) {
      ++chains;
    } else {
      EXPECT_EQ(tables.items[i].group, tables.items[static_cast<std::size_t>(before)].group);
      EXPECT_EQ(tables.items[i].member, tables.items[static_cast<std::size_t>(before)].member);
    }
  }
  EXPECT_EQ(chains, 8);
  expect_one_order(tables, turns);
}

// Items of a window begin and end a tile after the one before them: nobody has rows behind those of
// an item that others wait for, so that none must wait for all of the item before it.
TEST(CudaChains, ItemsOfAWindowFollowEachOtherAtADistance) {
  for (const bool causal : {false, true}) {
    Pattern pattern = dense(2, causal);
    pattern.window = {25, causal ? 0 : 12};
    const WholeSequence whole(pattern, 256);
    Tables tables = make_tables({Stage::Kind::gradients, &whole.plan, 0, 0}, whole.computation,
                                Side::keys, 16, false);
    const std::vector<ItemTurn> turns = put_in_chains(tables, {.blocks = 8, .step = 4});
    ASSERT_EQ(tables.launches.size(), 1U);
    for (std::size_t i = 0; i < tables.items.size(); ++i) {
      const bool first = i % 16 == 0;
      EXPECT_EQ(turns[i].after, first ? -1 : static_cast<std::int32_t>(i) - 1);
      EXPECT_EQ(turns[i].finish, 0);
      if (!first) {
        EXPECT_EQ(turns[i].alone, std::max(0, tables.items[i].begin + 16 - (causal ? 0 : 12)));
      }
    }
    expect_one_order(tables, turns);
  }
}

}  // namespace
}  // namespace annulus::cuda
