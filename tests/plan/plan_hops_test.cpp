// Random plans as all their ranks see them: what moves in which step, and that the views fit
// together.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include "annulus/placement.h"
#include "annulus/plan.h"
#include "support/random_plans.h"

namespace annulus {
namespace {

using test::for_random_plans;
using test::positions_of;
using test::Views;

// A parcel by what it is: ids are local to a view.
using ParcelKey = std::tuple<int, int, std::int64_t>;  // owner, class, first row

ParcelKey key_of(const Plan& view, int parcel) {
  const Parcel& p = view.parcels()[static_cast<std::size_t>(parcel)];
  return {p.owner, p.head_class, p.rows.front().first};
}

// (step, sender, receiver, parcel)
using Move = std::tuple<int, int, int, ParcelKey>;

TEST(PlanHops, ItinerariesGoRoundOneWayAndParcelsAreViewsOfTheirOwnersShard) {
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

TEST(PlanHops, HopsFollowTheItineraryAndForwardOnlyWhatIsThere) {
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

TEST(PlanHops, SenderAndReceiverAgreeOnTheOrderInsideAMessage) {
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

TEST(PlanHops, ARankPlansAloneWhatAllRanksPlanTogether) {
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

TEST(PlanHops, TotalsOfAllRanksAreTheSumsOfTheirViews) {
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

TEST(PlanHops, ParcelsOfAnOwnerAndClassHaveDifferentItinerariesAndNoCommonRow) {
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

TEST(PlanHops, RingAndGatherMoveTheSameRows) {
  for_random_plans(120'000, [](const Views& views) {
    for (const Plan& view : views) {
      const bool ring = view.options().schedule == Schedule::ring;
      const Plan swapped = view.with_schedule(ring ? Schedule::gather : Schedule::ring);
      EXPECT_EQ(view.total_unit_rows(), swapped.total_unit_rows());
      EXPECT_EQ(view.received_unit_rows(), swapped.received_unit_rows());
    }
  });
}

}  // namespace
}  // namespace annulus
