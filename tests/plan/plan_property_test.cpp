// Random plans against brute force over every position: small sequences, all placements, odd
// shapes.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "annulus/pattern.h"
#include "annulus/placement.h"
#include "annulus/plan.h"
#include "plan/build_parcels.h"
#include "plan/pair_counts.h"
#include "plan/periodic_parcels.h"
#include "plan/rank_sets.h"
#include "plan/row_partition.h"
#include "support/random_plans.h"

namespace annulus {
namespace {

using test::for_random_plans;
using test::kConfigurations;
using test::positions_of;
using test::Views;

std::vector<int> owners(const Placement& placement) {
  std::vector<int> owner(static_cast<std::size_t>(placement.tokens()), -1);
  for (int rank = 0; rank < placement.ranks(); ++rank) {
    for (const std::int64_t p : placement.positions(rank))
      owner[static_cast<std::size_t>(p)] = rank;
  }
  return owner;
}

int unit_of(const Plan& plan, int q_head) {
  return plan.options().travel == Travel::queries
             ? q_head
             : q_head / (plan.pattern().heads / plan.options().kv_heads);
}

// One byte per (batch entry, branch, q head, query, key): how often the tiles of all ranks and
// steps cover it.
class Coverage {
 public:
  explicit Coverage(const Plan& plan)
      : queries_(static_cast<std::size_t>(plan.query_placement().tokens())),
        keys_(static_cast<std::size_t>(plan.key_placement().tokens())),
        heads_(static_cast<std::size_t>(plan.pattern().heads)),
        branches_(plan.pattern().branches.size()),
        counts_(static_cast<std::size_t>(plan.pattern().counted_entries()) * branches_ * heads_ *
                    queries_ * keys_,
                0) {}

  std::uint8_t& at(std::int64_t entry, std::size_t branch, int head, std::int64_t query,
                   std::int64_t key) {
    return counts_[(((static_cast<std::size_t>(entry) * branches_ + branch) * heads_ +
                     static_cast<std::size_t>(head)) *
                        queries_ +
                    static_cast<std::size_t>(query)) *
                       keys_ +
                   static_cast<std::size_t>(key)];
  }

 private:
  std::size_t queries_;
  std::size_t keys_;
  std::size_t heads_;
  std::size_t branches_;
  std::vector<std::uint8_t> counts_;
};

TEST(PlanProperty, CoversEveryAllowedPairExactlyOnce) {
  for_random_plans(1, [](const Views& views) {
    const Plan& plan = views.front();
    const Pattern& pattern = plan.pattern();
    const std::int64_t entries = pattern.counted_entries();
    Coverage coverage(plan);
    for (int rank = 0; rank < plan.ranks(); ++rank) {
      for (int step = 0; step <= plan.steps(); ++step) {
        for (const TileGroup& group :
             views[static_cast<std::size_t>(rank)].tile_groups(step, step)) {
          const Selection& selection = plan.classes()[static_cast<std::size_t>(group.head_class)]
                                           .selections[static_cast<std::size_t>(group.selection)];
          const EntryRange range =
              plan.classes()[static_cast<std::size_t>(group.head_class)].entries;
          std::int64_t pairs = 0;
          std::int64_t hidden = 0;
          for (const PlacedRows& q : group.queries) {
            for (const PlacedRows& k : group.keys) {
              for (std::int64_t i = 0; i < q.rows.count; ++i) {
                for (std::int64_t j = 0; j < k.rows.count; ++j) {
                  if (!group.band.allows(q.rows[i], k.rows[j])) {
                    ++hidden;
                    continue;
                  }
                  ++pairs;
                  for (const Selection::Member& m : selection.members) {
                    for (std::int64_t e = range.begin; e < range.end_in(entries); ++e) {
                      ++coverage.at(e, static_cast<std::size_t>(selection.branch), m.q_head,
                                    q.rows[i], k.rows[j]);
                    }
                  }
                }
              }
            }
          }
          EXPECT_GT(pairs, 0) << "a group without an allowed pair";
          EXPECT_EQ(group.band.full(), hidden == 0) << "full iff nothing is hidden";
        }
      }
    }
    const std::vector<int> owner = owners(plan.query_placement());
    std::vector<double> pairs_of(static_cast<std::size_t>(plan.ranks()), 0.0);  // by query owner
    int wrong = 0;
    for (std::size_t b = 0; b < pattern.branches.size(); ++b) {
      for (int h = 0; h < pattern.heads; ++h) {
        for (std::int64_t t = 0; t < plan.query_placement().tokens(); ++t) {
          double& pairs = pairs_of[static_cast<std::size_t>(owner[static_cast<std::size_t>(t)])];
          for (std::int64_t p = 0; p < plan.key_placement().tokens(); ++p) {
            for (std::int64_t e = 0; e < entries; ++e) {
              const int expected = pattern.allows(pattern.branches[b], h, t, p, e) ? 1 : 0;
              wrong += coverage.at(e, b, h, t, p) != expected ? 1 : 0;
              pairs += expected;
            }
          }
        }
      }
    }
    EXPECT_EQ(wrong, 0) << "pairs covered not exactly as often as they are allowed";
    for (int rank = 0; rank < plan.ranks(); ++rank) {
      EXPECT_EQ(views[static_cast<std::size_t>(rank)].pairs(),
                pairs_of[static_cast<std::size_t>(rank)]);
    }
  });
}

TEST(PlanProperty, TilesPointAtTheRowsTheyName) {
  for_random_plans(20'000, [](const Views& views) {
    const Plan& plan = views.front();
    const bool keys_travel = plan.options().travel == Travel::keys;
    for (int rank = 0; rank < plan.ranks(); ++rank) {
      const std::vector<std::int64_t> local_queries = plan.query_placement().positions(rank);
      const std::vector<std::int64_t> local_keys = plan.key_placement().positions(rank);
      std::set<int> arrived;
      for (int step = 0; step <= plan.steps(); ++step) {
        arrived.clear();
        if (step > 0) {
          for (const Hop& hop : views[static_cast<std::size_t>(rank)].incoming(step))
            arrived.insert(hop.parcel);
        }
        std::tuple<int, int, std::int64_t> previous{-1, -1, -1};
        for (const TileGroup& group :
             views[static_cast<std::size_t>(rank)].tile_groups(step, step)) {
          const HeadClass& head_class = plan.classes()[static_cast<std::size_t>(group.head_class)];
          const Selection& selection =
              head_class.selections[static_cast<std::size_t>(group.selection)];
          const std::tuple order{selection.branch, group.head_class, group.segment};
          EXPECT_LE(previous, order) << "groups are ordered by branch, class and segment";
          previous = order;
          for (const bool keys : {false, true}) {
            const std::vector<PlacedRows>& side = keys ? group.keys : group.queries;
            for (std::size_t i = 0; i < side.size(); ++i) {
              if (i > 0) {
                EXPECT_GT(side[i].rows.first, side[i - 1].rows.first);
              }
              EXPECT_GT(side[i].rows.count, 0);
              EXPECT_EQ(side[i].parcel >= 0, keys == keys_travel && step > 0);
              std::vector<std::int64_t> stored = keys ? local_keys : local_queries;
              if (side[i].parcel >= 0) {
                const Parcel& parcel = views[static_cast<std::size_t>(rank)]
                                           .parcels()[static_cast<std::size_t>(side[i].parcel)];
                EXPECT_TRUE(arrived.contains(side[i].parcel));
                EXPECT_EQ(parcel.head_class, group.head_class);
                stored = positions_of(parcel);
              }
              for (std::int64_t j = 0; j < side[i].rows.count; ++j) {
                const std::int64_t at = side[i].store_first + j * side[i].store_stride;
                ASSERT_LT(at, static_cast<std::int64_t>(stored.size()));
                EXPECT_EQ(stored[static_cast<std::size_t>(at)], side[i].rows[j]);
              }
            }
          }
        }
      }
    }
  });
}

TEST(PlanProperty, StepsTakenTogetherHoldTheRowsOfEachStep) {
  using Key = std::tuple<int, int, std::int64_t, bool, std::int64_t>;
  for_random_plans(40'000, [](const Views& views) {
    const Plan& plan = views.front();
    if (!plan.pattern().band().full()) return;  // rows that the band hides are dropped per call
    const auto rows_of = [&](int rank, int first, int last, std::set<Key>& rows) {
      for (const TileGroup& group :
           views[static_cast<std::size_t>(rank)].tile_groups(first, last)) {
        for (const bool keys : {false, true}) {
          for (const PlacedRows& placed : keys ? group.keys : group.queries) {
            for (std::int64_t i = 0; i < placed.rows.count; ++i) {
              rows.emplace(group.head_class, group.selection, group.segment, keys, placed.rows[i]);
            }
          }
        }
      }
    };
    for (int rank = 0; rank < plan.ranks(); ++rank) {
      std::set<Key> together;
      std::set<Key> apart;
      rows_of(rank, 0, plan.steps(), together);
      for (int step = 0; step <= plan.steps(); ++step) rows_of(rank, step, step, apart);
      EXPECT_EQ(together, apart) << "rank " << rank;
    }
  });
}

TEST(PlanProperty, SendsEachRowOnceToEachRankThatNeedsItAndToNoOther) {
  for_random_plans(60'000, [](const Views& views) {
    const Plan& plan = views.front();
    const Pattern& pattern = plan.pattern();
    const std::vector<int> owner = owners(plan.travelling_placement());
    const std::vector<int> needs = owners(plan.staying_placement());
    const bool keys_travel = plan.options().travel == Travel::keys;
    // Batch entry, unit, position, rank.
    std::set<std::tuple<std::int64_t, int, std::int64_t, int>> needed;
    const std::int64_t entries = pattern.counted_entries();
    for (const Branch& branch : pattern.branches) {
      for (int h = 0; h < pattern.heads; ++h) {
        if (branch.offset[static_cast<std::size_t>(h)] < 0) continue;
        for (std::int64_t t = 0; t < plan.query_placement().tokens(); ++t) {
          for (std::int64_t p = 0; p < plan.key_placement().tokens(); ++p) {
            const std::int64_t row = keys_travel ? p : t;
            const int rank = needs[static_cast<std::size_t>(keys_travel ? t : p)];
            if (owner[static_cast<std::size_t>(row)] == rank) continue;
            for (std::int64_t e = 0; e < entries; ++e) {
              if (pattern.allows(branch, h, t, p, e))
                needed.emplace(e, unit_of(plan, h), row, rank);
            }
          }
        }
      }
    }
    std::map<std::tuple<std::int64_t, int, std::int64_t, int>, int> received;
    for (int rank = 0; rank < plan.ranks(); ++rank) {
      for (int step = 1; step <= plan.steps(); ++step) {
        for (const Hop& hop : views[static_cast<std::size_t>(rank)].incoming(step)) {
          const Parcel& parcel =
              views[static_cast<std::size_t>(rank)].parcels()[static_cast<std::size_t>(hop.parcel)];
          const HeadClass& head_class = plan.classes()[static_cast<std::size_t>(parcel.head_class)];
          for (const int unit : head_class.units) {
            for (std::int64_t e = head_class.entries.begin; e < head_class.entries.end_in(entries);
                 ++e) {
              for (const std::int64_t p : positions_of(parcel)) ++received[{e, unit, p, rank}];
            }
          }
        }
      }
    }
    EXPECT_EQ(received.size(), needed.size());
    for (const auto& [row, times] : received) {
      EXPECT_EQ(times, 1);
      EXPECT_TRUE(needed.contains(row));
    }
  });
}

// Long striped sequences are planned from their period: the same parcels as without it.
TEST(PlanProperty, PeriodicPlansAreTheDirectOnes) {
  int periodic = 0;
  for (std::uint64_t seed = 1; seed <= 400; ++seed) {
    test::Random random(seed);
    const int ranks = static_cast<int>(random.between(2, 9));
    const int heads = static_cast<int>(random.between(1, 4));
    const bool causal = random.coin();
    const std::int64_t tokens = random.between(500, 6000);
    Pattern pattern;
    pattern.heads = heads;
    pattern.causal = causal;
    pattern.window = random.coin() ? Window{} : test::any_window(random, 60, causal);
    for (std::int64_t b = random.between(1, 3); b > 0; --b) {
      Branch branch;
      branch.segment_length =
          random.one_of<std::int64_t>({4, 6, 8, 12, 16, 32, 40, kWholeSequence});
      branch.dilation = random.one_of<std::int64_t>({1, 1, 2, 3, 4, 8});
      for (int h = 0; h < heads; ++h) {
        branch.offset.push_back(random.between(-1, branch.dilation - 1));
      }
      pattern.branches.push_back(branch);
    }
    const Placement placement = Placement::striped(tokens, ranks);
    const PlanOptions options{pattern,        placement,
                              placement,      heads,
                              Schedule::ring, random.coin() ? Travel::keys : Travel::queries};
    const Plan plan(options, 0);
    SCOPED_TRACE("seed " + std::to_string(seed) + ": " + test::describe(plan));
    const int rank = static_cast<int>(random.between(kEveryRank, ranks - 1));
    const auto found = build_periodic_parcels(options, plan.classes(), rank);
    if (!found) continue;
    ++periodic;
    const BuiltParcels expected = build_parcels_directly(options, plan.classes(), rank);
    ASSERT_EQ(found->parcels.size(), expected.parcels.size());
    EXPECT_EQ(found->parcel_count, expected.parcel_count);
    for (std::size_t i = 0; i < expected.parcels.size(); ++i) {
      const Parcel& a = found->parcels[i];
      const Parcel& b = expected.parcels[i];
      EXPECT_EQ(a.rows, b.rows);
      EXPECT_EQ(std::tie(a.owner, a.head_class, a.row_count),
                std::tie(b.owner, b.head_class, b.row_count));
      EXPECT_EQ(found->sets.members(a.rank_set), expected.sets.members(b.rank_set));
    }
    std::map<std::pair<int, std::vector<int>>, std::int64_t> flows;
    for (const Flow& f : found->flows)
      flows[{f.owner, found->sets.members(f.rank_set)}] += f.unit_rows;
    for (const Flow& f : expected.flows) {
      flows[{f.owner, expected.sets.members(f.rank_set)}] -= f.unit_rows;
    }
    for (const auto& [flow, difference] : flows) EXPECT_EQ(difference, 0);
    double pairs = 0.0;
    for (const RankTotals& totals : plan.rank_totals()) pairs += totals.work;
    EXPECT_EQ(pairs, allowed_pairs(pattern, tokens));
    if (HasFailure()) return;
  }
  EXPECT_GT(periodic, 200) << "hardly any of these plans had a period: the test shows nothing";
}

TEST(RowPartition, HoldsEveryRowOnceWithAllTheRanksThatNeedIt) {
  constexpr std::int64_t kRows = 120;
  for (std::uint64_t seed = 1; seed <= kConfigurations; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    test::Random random(seed);
    RankSets sets(70);  // two words per set
    RowPartition partition(sets);
    std::vector<std::set<int>> expected(kRows);
    for (std::int64_t i = random.between(1, 6); i > 0; --i) {
      RowSet rows{random.between(0, kRows - 1), 0, random.between(1, 12)};
      rows.count = random.between(0, (kRows - 1 - rows.first) / rows.stride + 1);
      RankSets::Words ranks = sets.none();
      const int rank = static_cast<int>(random.between(62, 66));
      RankSets::flip(ranks, rank);
      partition.add(rows, sets.intern(ranks));
      if (random.coin()) partition.join();
      for (std::int64_t j = 0; j < rows.count; ++j) {
        expected[static_cast<std::size_t>(rows[j])].insert(rank);
      }
    }
    std::vector<std::set<int>> found(kRows);
    for (const LabelledRows& piece : partition.pieces()) {
      EXPECT_GT(piece.rows.count, 0);
      for (std::int64_t j = 0; j < piece.rows.count; ++j) {
        std::set<int>& ranks = found.at(static_cast<std::size_t>(piece.rows[j]));
        EXPECT_TRUE(ranks.empty()) << "a row in two pieces";
        for (const int rank : sets.members(piece.needed_by)) ranks.insert(rank);
      }
    }
    EXPECT_EQ(found, expected);
    if (HasFailure()) return;
  }
}

TEST(PlanProperty, PairsByRankAndByStepSumToTheAllowedPairs) {
  for_random_plans(140'000, [](const Views& views) {
    const Plan& plan = views.front();
    double by_query = 0.0;
    double by_work = 0.0;
    for (int rank = 0; rank < plan.ranks(); ++rank) {
      const Plan& view = views[static_cast<std::size_t>(rank)];
      by_query += view.pairs();
      double steps = 0.0;
      for (const double pairs : pairs_by_step(view)) steps += pairs;
      EXPECT_EQ(steps, shard_pairs(plan.pattern(), plan.query_placement(), plan.key_placement(),
                                   rank, plan.options().travel));
      by_work += steps;
    }
    EXPECT_EQ(by_query, by_work);
    EXPECT_EQ(by_query, allowed_pairs(plan.pattern(), plan.query_placement().tokens(),
                                      plan.key_placement().tokens()));
  });
}

}  // namespace
}  // namespace annulus
