// Random plans against brute force over every position: small sequences, all placements, odd
// shapes.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "annulus/pattern.h"
#include "annulus/placement.h"
#include "annulus/plan.h"
#include "plan/pair_counts.h"
#include "plan/rank_sets.h"
#include "plan/row_partition.h"
#include "support/random_plans.h"

namespace annulus {
namespace {

constexpr int kConfigurations = 4000;

std::vector<int> owners(const Placement& placement) {
  std::vector<int> owner(static_cast<std::size_t>(placement.tokens()), -1);
  for (int rank = 0; rank < placement.ranks(); ++rank) {
    for (const std::int64_t p : placement.positions(rank))
      owner[static_cast<std::size_t>(p)] = rank;
  }
  return owner;
}

std::vector<std::int64_t> positions_of(const Parcel& parcel) {
  std::vector<std::int64_t> positions;
  for (const RowSet& rows : parcel.rows) {
    for (std::int64_t i = 0; i < rows.count; ++i) positions.push_back(rows[i]);
  }
  return positions;
}

int unit_of(const Plan& plan, int q_head) {
  return plan.options().travel == Travel::queries
             ? q_head
             : q_head / (plan.pattern().heads / plan.options().kv_heads);
}

using Views = std::vector<Plan>;  // one per rank

// Calls check(views) on many random plans; stops at the first that fails. Queries and keys share a
// placement in two of three.
template <typename Check>
void for_random_plans(std::uint64_t first_seed, Check check) {
  for (std::uint64_t seed = first_seed; seed < first_seed + kConfigurations; ++seed) {
    test::Random random(seed);
    const Views views =
        Plan::of_all_ranks(seed % 3 == 0 ? test::any_sides(random) : test::any_options(random));
    SCOPED_TRACE("seed " + std::to_string(seed) + ": " + test::describe(views.front()));
    check(views);
    if (::testing::Test::HasFailure()) return;
  }
}

// One byte per (branch, q head, query, key): how often the tiles of all ranks and steps cover it.
class Coverage {
 public:
  explicit Coverage(const Plan& plan)
      : queries_(static_cast<std::size_t>(plan.query_placement().tokens())),
        keys_(static_cast<std::size_t>(plan.key_placement().tokens())),
        heads_(static_cast<std::size_t>(plan.pattern().heads)),
        counts_(plan.pattern().branches.size() * heads_ * queries_ * keys_, 0) {}

  std::uint8_t& at(std::size_t branch, int head, std::int64_t query, std::int64_t key) {
    return counts_[((branch * heads_ + static_cast<std::size_t>(head)) * queries_ +
                    static_cast<std::size_t>(query)) *
                       keys_ +
                   static_cast<std::size_t>(key)];
  }

 private:
  std::size_t queries_;
  std::size_t keys_;
  std::size_t heads_;
  std::vector<std::uint8_t> counts_;
};

TEST(PlanProperty, CoversEveryAllowedPairExactlyOnce) {
  for_random_plans(1, [](const Views& views) {
    const Plan& plan = views.front();
    const Pattern& pattern = plan.pattern();
    Coverage coverage(plan);
    for (int rank = 0; rank < plan.ranks(); ++rank) {
      for (int step = 0; step <= plan.steps(); ++step) {
        for (const TileGroup& group :
             views[static_cast<std::size_t>(rank)].tile_groups(step, step)) {
          const Selection& selection = plan.classes()[static_cast<std::size_t>(group.head_class)]
                                           .selections[static_cast<std::size_t>(group.selection)];
          std::int64_t pairs = 0;
          std::int64_t hidden = 0;
          for (const PlacedRows& q : group.queries) {
            for (const PlacedRows& k : group.keys) {
              for (std::int64_t i = 0; i < q.rows.count; ++i) {
                for (std::int64_t j = 0; j < k.rows.count; ++j) {
                  if (!group.mask.allows(q.rows[i], k.rows[j])) {
                    ++hidden;
                    continue;
                  }
                  ++pairs;
                  for (const Selection::Member& m : selection.members) {
                    ++coverage.at(static_cast<std::size_t>(selection.branch), m.q_head, q.rows[i],
                                  k.rows[j]);
                  }
                }
              }
            }
          }
          EXPECT_GT(pairs, 0) << "a group without an allowed pair";
          EXPECT_EQ(group.mask.kind == Mask::full, hidden == 0) << "full iff nothing is hidden";
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
            const int expected = pattern.allows(pattern.branches[b], h, t, p) ? 1 : 0;
            wrong += coverage.at(b, h, t, p) != expected ? 1 : 0;
            pairs += expected;
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
    if (plan.pattern().causal) return;  // row sets that the mask hides are dropped per call
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
    std::set<std::tuple<int, std::int64_t, int>> needed;  // (unit, position, rank)
    for (const Branch& branch : pattern.branches) {
      for (int h = 0; h < pattern.heads; ++h) {
        if (branch.offset[static_cast<std::size_t>(h)] < 0) continue;
        for (std::int64_t t = 0; t < plan.query_placement().tokens(); ++t) {
          if (!branch.selects(h, t)) continue;
          for (std::int64_t p = 0; p < plan.key_placement().tokens(); ++p) {
            if (!pattern.allows(branch, h, t, p)) continue;
            const std::int64_t row = keys_travel ? p : t;
            const int rank = needs[static_cast<std::size_t>(keys_travel ? t : p)];
            if (owner[static_cast<std::size_t>(row)] != rank)
              needed.emplace(unit_of(plan, h), row, rank);
          }
        }
      }
    }
    std::map<std::tuple<int, std::int64_t, int>, int> received;
    for (int rank = 0; rank < plan.ranks(); ++rank) {
      for (int step = 1; step <= plan.steps(); ++step) {
        for (const Hop& hop : views[static_cast<std::size_t>(rank)].incoming(step)) {
          const Parcel& parcel =
              views[static_cast<std::size_t>(rank)].parcels()[static_cast<std::size_t>(hop.parcel)];
          for (const int unit : plan.classes()[static_cast<std::size_t>(parcel.head_class)].units) {
            for (const std::int64_t p : positions_of(parcel)) ++received[{unit, p, rank}];
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

// A parcel by what it is: ids are local to a view.
using ParcelKey = std::tuple<int, int, std::int64_t>;  // owner, class, first row

ParcelKey key_of(const Plan& view, int parcel) {
  const Parcel& p = view.parcels()[static_cast<std::size_t>(parcel)];
  return {p.owner, p.head_class, p.rows.front().first};
}

// (step, sender, receiver, parcel)
using Move = std::tuple<int, int, int, ParcelKey>;

TEST(PlanProperty, ItinerariesGoRoundOneWayAndParcelsAreViewsOfTheirOwnersShard) {
  for_random_plans(80'000, [](const Views& views) {
    const Plan& plan = views.front();
    const int ranks = plan.ranks();
    const bool ring = plan.options().schedule == Schedule::ring;
    int longest = 0;
    bool up = true;
    bool down = true;
    for (const Plan& view : views) {
      const std::vector<std::int64_t> held = view.travelling_placement().positions(view.rank());
      const std::set<std::int64_t> own(held.begin(), held.end());
      for (int i = 0; i < static_cast<int>(view.parcels().size()); ++i) {
        const Parcel& parcel = view.parcels()[static_cast<std::size_t>(i)];
        if (parcel.owner != view.rank()) continue;
        const std::vector<int> visits = view.itinerary(i);
        EXPECT_FALSE(visits.empty());
        EXPECT_EQ(parcel.row_count, static_cast<std::int64_t>(positions_of(parcel).size()));
        EXPECT_GT(parcel.row_count, 0);
        for (const std::int64_t p : positions_of(parcel)) EXPECT_TRUE(own.contains(p));
        for (const RowSet& rows : parcel.rows) {  // a strided view of the owner's shard
          const auto ranges = plan.travelling_placement().ranges(parcel.owner);
          EXPECT_TRUE(std::any_of(ranges.begin(), ranges.end(), [&](const RowSet& range) {
            return intersect(range, rows).count == rows.count;
          }));
        }
        const auto after_owner = [&](int rank) { return (rank - parcel.owner + ranks) % ranks; };
        for (std::size_t n = 1; n < visits.size(); ++n) {
          const int step = after_owner(visits[n]) - after_owner(visits[n - 1]);
          up = up && step > 0;
          down = down && step < 0;
        }
        longest = std::max(longest, ring ? static_cast<int>(visits.size()) : 1);
      }
    }
    EXPECT_TRUE(up || (ring && down)) << "ranks follow the owner in cyclic order, all one way";
    for (const Plan& view : views) EXPECT_EQ(view.steps(), longest);
  });
}

TEST(PlanProperty, HopsFollowTheItineraryAndForwardOnlyWhatIsThere) {
  for_random_plans(160'000, [](const Views& views) {
    const bool ring = views.front().options().schedule == Schedule::ring;
    std::set<Move> expected;
    std::set<Move> in;
    std::set<Move> out;
    std::set<std::pair<int, ParcelKey>> holds;  // (rank, parcel)
    for (const Plan& view : views) {
      for (int i = 0; i < static_cast<int>(view.parcels().size()); ++i) {
        if (view.parcels()[static_cast<std::size_t>(i)].owner != view.rank()) continue;
        holds.emplace(view.rank(), key_of(view, i));
        EXPECT_EQ(view.arrival(i), 0);
        int sender = view.rank();
        int step = 1;
        for (const int receiver : view.itinerary(i)) {
          expected.emplace(step, sender, receiver, key_of(view, i));
          if (!ring) continue;
          sender = receiver;
          ++step;
        }
      }
    }
    for (int step = 1; step <= views.front().steps(); ++step) {
      for (const Plan& view : views) {
        for (const Hop& hop : view.outgoing(step)) {
          EXPECT_TRUE(holds.contains({view.rank(), key_of(view, hop.parcel)}));
          out.emplace(step, view.rank(), hop.peer, key_of(view, hop.parcel));
        }
        for (const Hop& hop : view.incoming(step)) {
          EXPECT_EQ(view.arrival(hop.parcel), step);
          in.emplace(step, hop.peer, view.rank(), key_of(view, hop.parcel));
        }
      }
      for (const Plan& view : views) {  // only after all sends of the step were checked
        for (const Hop& hop : view.incoming(step)) {
          holds.emplace(view.rank(), key_of(view, hop.parcel));
        }
      }
    }
    EXPECT_EQ(in, expected);
    EXPECT_EQ(out, expected);
  });
}

TEST(PlanProperty, SenderAndReceiverAgreeOnTheOrderInsideAMessage) {
  for_random_plans(180'000, [](const Views& views) {
    std::map<std::tuple<int, int, int>, std::vector<std::vector<std::int64_t>>> sent;
    std::map<std::tuple<int, int, int>, std::vector<std::vector<std::int64_t>>> received;
    for (const Plan& view : views) {
      const auto rows = [&](const Hop& hop) {
        return positions_of(view.parcels()[static_cast<std::size_t>(hop.parcel)]);
      };
      for (int step = 1; step <= view.steps(); ++step) {
        int peer = -1;
        for (const Hop& hop : view.outgoing(step)) {
          EXPECT_LE(peer, hop.peer) << "hops to one peer follow each other";
          peer = hop.peer;
          sent[{step, view.rank(), peer}].push_back(rows(hop));
        }
        peer = -1;
        for (const Hop& hop : view.incoming(step)) {
          EXPECT_LE(peer, hop.peer);
          peer = hop.peer;
          received[{step, peer, view.rank()}].push_back(rows(hop));
        }
      }
    }
    EXPECT_EQ(sent, received);
  });
}

TEST(PlanProperty, ARankPlansAloneWhatAllRanksPlanTogether) {
  for_random_plans(200'000, [](const Views& views) {
    const Plan& together = views[static_cast<std::size_t>(views.front().ranks() / 2)];
    const Plan alone(together.options(), together.rank());
    const auto hops = [](std::span<const Hop> list) {
      std::vector<std::pair<int, int>> out;
      for (const Hop& hop : list) out.emplace_back(hop.peer, hop.parcel);
      return out;
    };
    EXPECT_EQ(alone.steps(), together.steps());
    EXPECT_EQ(alone.total_unit_rows(), together.total_unit_rows());
    ASSERT_EQ(alone.parcels().size(), together.parcels().size());
    for (int i = 0; i < static_cast<int>(alone.parcels().size()); ++i) {
      EXPECT_EQ(alone.parcels()[static_cast<std::size_t>(i)].rows,
                together.parcels()[static_cast<std::size_t>(i)].rows);
      EXPECT_EQ(key_of(alone, i), key_of(together, i));
      EXPECT_EQ(alone.itinerary(i), together.itinerary(i));
    }
    for (int step = 1; step <= alone.steps(); ++step) {
      EXPECT_EQ(hops(alone.incoming(step)), hops(together.incoming(step)));
      EXPECT_EQ(hops(alone.outgoing(step)), hops(together.outgoing(step)));
    }
  });
}

TEST(PlanProperty, TotalsOfAllRanksAreTheSumsOfTheirViews) {
  for_random_plans(220'000, [](const Views& views) {
    std::int64_t total = 0;
    for (const Plan& view : views) {
      const RankTotals totals = views.front().rank_totals()[static_cast<std::size_t>(view.rank())];
      EXPECT_EQ(totals.received, view.received_unit_rows());
      EXPECT_EQ(totals.largest_step, view.largest_step_unit_rows());
      EXPECT_EQ(totals.query_pairs, view.pairs());
      std::int64_t sent = 0;
      for (int step = 1; step <= view.steps(); ++step) sent += view.unit_rows(view.outgoing(step));
      EXPECT_EQ(totals.sent, sent);
      total += sent;
    }
    for (const Plan& view : views) EXPECT_EQ(view.total_unit_rows(), total);
  });
}

TEST(PlanProperty, ParcelsOfAnOwnerAndClassHaveDifferentItinerariesAndNoCommonRow) {
  for_random_plans(100'000, [](const Views& views) {
    for (const Plan& view : views) {
      std::set<std::tuple<int, int, std::vector<int>>> itineraries;
      std::set<std::tuple<int, std::int64_t>> rows;  // (class, position)
      for (int i = 0; i < static_cast<int>(view.parcels().size()); ++i) {
        const Parcel& parcel = view.parcels()[static_cast<std::size_t>(i)];
        EXPECT_TRUE(itineraries.emplace(parcel.owner, parcel.head_class, view.itinerary(i)).second);
        for (const std::int64_t p : positions_of(parcel)) {
          EXPECT_TRUE(rows.emplace(parcel.head_class, p).second);
        }
      }
    }
  });
}

TEST(PlanProperty, RingAndGatherMoveTheSameRows) {
  for_random_plans(120'000, [](const Views& views) {
    for (const Plan& view : views) {
      const bool ring = view.options().schedule == Schedule::ring;
      const Plan swapped = view.with_schedule(ring ? Schedule::gather : Schedule::ring);
      EXPECT_EQ(view.total_unit_rows(), swapped.total_unit_rows());
      EXPECT_EQ(view.received_unit_rows(), swapped.received_unit_rows());
    }
  });
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
    if (!plan.self_attention()) return;  // brute force counts those
    EXPECT_EQ(by_query, allowed_pairs(plan.pattern(), plan.query_placement().tokens()));
  });
}

}  // namespace
}  // namespace annulus
