#include "annulus/plan.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <regex>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "annulus/error.h"

namespace annulus {
namespace {

using Lengths = std::vector<std::int64_t>;

const Lengths kSegments{2048, 4096, 8192, 16384, 32768};
const Lengths kDilations{1, 2, 4, 8, 16};

PlanOptions options_of(Pattern pattern, const Placement& placement, int kv_heads = 1) {
  return {std::move(pattern), placement, placement, kv_heads, Schedule::ring, Travel::keys};
}

// A rank in the middle, which has neighbours on both sides.
Plan view_of(const PlanOptions& options) { return {options, options.queries.ranks() / 2}; }

// Row sets, hops and classes: what a plan keeps in memory.
std::size_t size_of(const Plan& plan) {
  std::size_t size = plan.classes().size();
  for (const Parcel& parcel : plan.parcels()) size += parcel.rows.size() + 1;
  for (int step = 1; step <= plan.steps(); ++step) {
    size += plan.incoming(step).size() + plan.outgoing(step).size();
  }
  return size;
}

TEST(Plan, OneRankMovesNothing) {
  const Plan plan(
      options_of(longnet(4, Lengths{8, 16}, Lengths{1, 2}), Placement::contiguous(64, 1)), 0);
  EXPECT_EQ(plan.steps(), 0);
  EXPECT_TRUE(plan.parcels().empty());
  EXPECT_EQ(plan.total_unit_rows(), 0);
  // Eight segments of the one offset, four of each of the two.
  EXPECT_EQ(plan.tile_groups(0, 0).size(), 8U + 2U * 4U);
}

TEST(Plan, DenseRingPassesEveryShardToEveryOtherRank) {
  const std::vector<Plan> views =
      Plan::of_all_ranks(options_of(dense(8), Placement::contiguous(64, 4), 2));
  const Plan& plan = views[0];
  ASSERT_EQ(plan.classes().size(), 1U);
  EXPECT_EQ(plan.classes()[0].units, (std::vector<int>{0, 1}));
  EXPECT_EQ(plan.classes()[0].selections[0].members.size(), 8U);
  EXPECT_EQ(plan.steps(), 3);
  ASSERT_EQ(plan.parcels().size(), 4U);
  for (int owner = 0; owner < 4; ++owner) {
    const Parcel& parcel = plan.parcels()[static_cast<std::size_t>(owner)];
    EXPECT_EQ(parcel.rows, (std::vector<RowSet>{{16 * owner, 16, 1}}));
    EXPECT_EQ(plan.itinerary(owner),
              (std::vector<int>{(owner + 1) % 4, (owner + 2) % 4, (owner + 3) % 4}));
  }
  for (int step = 1; step <= 3; ++step) {
    for (int rank = 0; rank < 4; ++rank) {  // neighbours only
      const Plan& view = views[static_cast<std::size_t>(rank)];
      ASSERT_EQ(view.incoming(step).size(), 1U);
      EXPECT_EQ(view.incoming(step)[0].peer, (rank + 3) % 4);
      EXPECT_EQ(view.outgoing(step)[0].peer, (rank + 1) % 4);
      EXPECT_EQ(view.incoming(step)[0].parcel, (rank + 4 - step) % 4);
      EXPECT_EQ(view.arrival((rank + 4 - step) % 4), step);
    }
  }
  EXPECT_EQ(plan.received_unit_rows(), 48 * 2);
  EXPECT_EQ(plan.largest_step_unit_rows(), 16 * 2);
  EXPECT_EQ(plan.total_unit_rows(), 4 * 48 * 2);
}

TEST(Plan, CausalRowsStopAtTheLastRankThatNeedsThem) {
  const std::vector<Plan> views =
      Plan::of_all_ranks(options_of(dense(1, true), Placement::contiguous(64, 4)));
  ASSERT_EQ(views[3].parcels().size(), 3U);  // nobody is after the last rank
  EXPECT_EQ(views[3].itinerary(0), (std::vector<int>{1, 2, 3}));
  EXPECT_EQ(views[3].itinerary(1), (std::vector<int>{2, 3}));
  EXPECT_EQ(views[3].itinerary(2), (std::vector<int>{3}));
  EXPECT_EQ(views[0].parcels().size(), 1U) << "a rank keeps what concerns it";
  EXPECT_EQ(views[0].received_unit_rows(), 0);
}

TEST(Plan, CausalRingsReceiveAtMostOneShardPerStep) {
  for (const char* name : {"contiguous", "zigzag"}) {
    for (const Travel travel : {Travel::keys, Travel::queries}) {
      PlanOptions options = options_of(dense(1, true), Placement::named(name, 4096, 8));
      options.travel = travel;
      for (const Plan& plan : Plan::of_all_ranks(options)) {
        EXPECT_LE(plan.largest_step_unit_rows(), 512) << name << ", " << name_of(travel);
      }
    }
  }
}

TEST(Plan, TilesThatHideNothingAreFull) {
  for (const Plan& plan :
       Plan::of_all_ranks(options_of(dense(1, true), Placement::contiguous(64, 4)))) {
    for (int step = 0; step <= plan.steps(); ++step) {
      for (const TileGroup& group : plan.tile_groups(step, step)) {
        // Keys that came from other ranks lie before all queries.
        EXPECT_EQ(group.band, step == 0 ? Band::causal() : Band{});
      }
    }
  }
}

TEST(Plan, FewQueriesMeetManyKeys) {
  PlanOptions options = options_of(dense(1), Placement::contiguous(10, 4));
  options.keys = Placement::contiguous(100, 4);
  const Plan keys(options, 0);
  EXPECT_EQ(keys.total_unit_rows(), 3 * 100);
  EXPECT_EQ(keys.pairs(), 3 * 100);  // 3 of the 10 queries
  options.travel = Travel::queries;
  const Plan queries(options, 1);
  EXPECT_EQ(queries.total_unit_rows(), 3 * 10);
  EXPECT_EQ(queries.received_unit_rows(), 7);
  EXPECT_NE(plan_table(queries).find("10 tokens against 100"), std::string::npos);
  EXPECT_EQ(plan_svg(queries).find("nan"), std::string::npos);
}

TEST(Plan, HeadsThatSelectTheSameRowsShareAClass) {
  const Plan plan(
      options_of(longnet(8, Lengths{16, 64}, Lengths{1, 4}), Placement::contiguous(64, 2), 8), 0);
  ASSERT_EQ(plan.classes().size(), 4U);  // blocked offsets: two heads each
  EXPECT_EQ(plan.classes()[1].units, (std::vector<int>{2, 3}));
  ASSERT_EQ(plan.classes()[1].selections.size(), 2U);
  EXPECT_EQ(plan.classes()[1].selections[1].offset, 1);
  EXPECT_EQ(plan.classes()[1].selections[1].members[1].unit_index, 1);
  EXPECT_EQ(plan.classes()[1].selections[1].members[1].q_head, 3);
}

TEST(Plan, QueryHeadsOfOneKeyHeadSendTheUnionOfTheirRowsOnce) {
  // Four query heads with offsets 0..3 share a K/V head: together they need every row.
  const Plan plan(options_of(longnet(4, Lengths{64}, Lengths{4}), Placement::contiguous(64, 2)), 0);
  ASSERT_EQ(plan.parcels().size(), 2U);
  EXPECT_EQ(plan.parcels()[0].rows, (std::vector<RowSet>{{0, 32, 1}}));
}

TEST(Plan, BranchesSendTheUnionOfTheirRowsOnce) {
  // w = 32 needs every second row, w = 64 every fourth; shards are 16 long. The rows of both visit
  // all ranks, the others only the neighbour in their half.
  for (const Plan& plan : Plan::of_all_ranks(
           options_of(longnet(1, Lengths{32, 64}, Lengths{2, 4}), Placement::contiguous(64, 4)))) {
    EXPECT_EQ(plan.received_unit_rows(), 8 + 2 * 4);
  }
}

struct Aligned {
  std::int64_t segment, dilation, shard;
};

class AlignedShards : public ::testing::TestWithParam<Aligned> {};

// The formula of the design: max(0, w - n) / r rows per rank, branch and head.
TEST_P(AlignedShards, ReceiveTheRestOfTheirSegment) {
  const auto [segment, dilation, shard] = GetParam();
  const std::int64_t tokens = 65536;
  const int ranks = static_cast<int>(tokens / shard);
  const int heads = static_cast<int>(dilation);  // one per offset
  const std::int64_t rows = std::max<std::int64_t>(0, segment - shard) / dilation;
  for (const Plan& plan :
       Plan::of_all_ranks(options_of(longnet(heads, Lengths{segment}, Lengths{dilation}),
                                     Placement::contiguous(tokens, ranks), heads))) {
    EXPECT_EQ(plan.received_unit_rows(), rows * heads);
  }
}

INSTANTIATE_TEST_SUITE_P(PowersOfTwo, AlignedShards,
                         ::testing::Values(Aligned{2048, 1, 1024}, Aligned{2048, 1, 2048},
                                           Aligned{2048, 1, 4096}, Aligned{4096, 2, 1024},
                                           Aligned{8192, 4, 2048}, Aligned{16384, 8, 2048},
                                           Aligned{32768, 16, 1024}, Aligned{65536, 16, 8192},
                                           Aligned{65536, 1, 4096}),
                         [](const auto& info) {
                           return "w" + std::to_string(info.param.segment) + "_r" +
                                  std::to_string(info.param.dilation) + "_n" +
                                  std::to_string(info.param.shard);
                         });

TEST(Plan, LongNetAtAMillionTokensMovesAThousandthOfDense) {
  const Placement placement = Placement::contiguous(1 << 20, 64);
  const Plan sparse(options_of(longnet(16, kSegments, kDilations), placement, 16), 5);
  const Plan all(options_of(dense(16), placement, 16), 5);
  EXPECT_EQ(sparse.received_unit_rows(), 16 * 1024);  // (32768 - 16384) / 16 rows of each head
  EXPECT_EQ(all.received_unit_rows(), std::int64_t{16} * 63 * 16384);
}

TEST(Plan, RefusesWhatItCannotPlan) {
  const Placement placement = Placement::contiguous(64, 2);
  EXPECT_THROW(Plan(options_of(dense(6), placement, 4), 0), ConfigError);
  EXPECT_THROW(Plan(options_of(dense(6), placement, 0), 0), ConfigError);
  EXPECT_THROW(Plan(options_of(Pattern{}, placement), 0), ConfigError);
  EXPECT_THROW(Plan(options_of(dense(1), placement), 2), ConfigError);
  EXPECT_THROW(Plan(options_of(dense(1), placement), -1), ConfigError);
  PlanOptions uneven = options_of(dense(1), placement);
  uneven.keys = Placement::contiguous(64, 3);
  EXPECT_THROW(Plan(uneven, 0), ConfigError);
  PlanOptions undecided = options_of(dense(1), placement);
  undecided.schedule = Schedule::automatic;
  EXPECT_THROW(Plan(undecided, 0), ConfigError);
  const Plan plan(options_of(dense(1), placement), 0);
  EXPECT_THROW((void)plan.with_schedule(Schedule::automatic), ConfigError);
  EXPECT_THROW((void)plan.incoming(0), ConfigError);
  EXPECT_THROW((void)plan.outgoing(2), ConfigError);
  EXPECT_THROW((void)plan.tile_groups(0, 2), ConfigError);
}

TEST(Plan, DigestIsStableAndDiffersWhenAnythingDiffers) {
  const auto digest = [](const PlanOptions& options) { return Plan(options, 0).digest(); };
  const auto base = [] {
    return options_of(longnet(8, Lengths{16, 64}, Lengths{1, 4}), Placement::contiguous(128, 4), 4);
  };
  EXPECT_EQ(digest(base()), digest(base()));
  PlanOptions renamed = base();
  renamed.pattern.name = "another name";
  EXPECT_EQ(digest(base()), digest(renamed)) << "names are for people";
  PlanOptions alike = base();
  alike.keys = Placement::contiguous(128, 4);
  EXPECT_FALSE(Plan(alike, 0).self_attention());
  EXPECT_EQ(digest(base()), digest(alike)) << "placements count by content";

  const std::vector<std::function<void(PlanOptions&)>> changes = {
      [](PlanOptions& o) { o.pattern.causal = true; },
      [](PlanOptions& o) { o.pattern.output_scale = 0.5; },
      [](PlanOptions& o) { o.pattern.branches[0].segment_length = 32; },
      [](PlanOptions& o) { o.pattern.branches[1].dilation = 5; },
      [](PlanOptions& o) { o.pattern.branches[1].offset[7] = 0; },
      [](PlanOptions& o) { o.pattern.branches[1].offset[7] = -1; },
      [](PlanOptions& o) { o.pattern.branches.pop_back(); },
      [](PlanOptions& o) { std::swap(o.pattern.branches[0], o.pattern.branches[1]); },
      [](PlanOptions& o) {
        o.pattern = longnet(16, Lengths{16, 64}, Lengths{1, 4});
      },
      [](PlanOptions& o) { o.queries = o.keys = Placement::contiguous(127, 4); },
      [](PlanOptions& o) { o.queries = o.keys = Placement::contiguous(128, 3); },
      [](PlanOptions& o) { o.queries = o.keys = Placement::zigzag(128, 4); },
      [](PlanOptions& o) { o.queries = o.keys = Placement::striped(128, 4); },
      [](PlanOptions& o) { o.queries = o.keys = Placement::hilbert(128, 4); },
      [](PlanOptions& o) { o.queries = Placement::zigzag(128, 4); },
      [](PlanOptions& o) { o.keys = Placement::zigzag(128, 4); },
      [](PlanOptions& o) { o.keys = Placement::contiguous(127, 4); },
      [](PlanOptions& o) { o.kv_heads = 2; },
      [](PlanOptions& o) { o.schedule = Schedule::gather; },
      [](PlanOptions& o) { o.travel = Travel::queries; },
      [](PlanOptions& o) { o.pattern.documents = {{.query_end = 128, .key_end = 128}}; },
      [](PlanOptions& o) { o.pattern.documents = {{.query_end = 127, .key_end = 128}}; },
      [](PlanOptions& o) { o.pattern.documents = {{.query_end = 128, .key_end = 127}}; },
      [](PlanOptions& o) {
        o.pattern.documents = {{.query_end = 128, .key_end = 128, .query_start = 1}};
      },
      [](PlanOptions& o) {
        o.pattern.documents = {{.query_end = 128, .key_end = 128, .key_start = 1}};
      }};
  std::set<std::uint64_t> digests{digest(base())};
  for (const auto& change : changes) {
    PlanOptions changed = base();
    change(changed);
    EXPECT_TRUE(digests.insert(digest(changed)).second) << digests.size();
  }
}

TEST(Plan, AbsurdLengthsDoNotOverflow) {
  Pattern pattern = dense(2, true);
  pattern.branches[0].dilation = std::int64_t{1} << 62U;  // position `offset` of the sequence alone
  pattern.branches[0].offset = {3, 5'000};
  pattern.branches.push_back({kWholeSequence - 1, kWholeSequence, {2, -1}});
  pattern.branches.push_back({8, kWholeSequence, {7, 8}});  // 8 lies in no segment of 8
  for (const char* name : {"contiguous", "zigzag", "striped", "hilbert"}) {
    double pairs = 0.0;
    for (const Plan& plan :
         Plan::of_all_ranks(options_of(pattern, Placement::named(name, 64, 4), 2))) {
      EXPECT_EQ(plan.total_unit_rows(), 0) << "single rows attend themselves";
      pairs += plan.pairs();
    }
    EXPECT_EQ(pairs, 1.0 + 1.0 + 8.0);
    EXPECT_EQ(pairs, allowed_pairs(pattern, 64));
  }
  // A single row may come with any stride.
  const std::int64_t far = std::int64_t{1} << 60U;
  const Placement single =
      Placement::explicit_ranges(8, {{{0, 1, far}, {1, 1, 1}, {2, 2, 1}}, {{4, 4, 1}}});
  EXPECT_EQ(Plan(options_of(dense(1), single), 0).total_unit_rows(), 8);
}

class Million : public ::testing::TestWithParam<std::tuple<std::string, bool>> {};

// How long it takes is measured by bench/planning.py, which 'make perf' runs.
TEST_P(Million, CountsEveryAllowedPair) {
  const auto& [name, causal] = GetParam();
  const Placement placement = Placement::named(name, 1 << 20, 64);
  for (const Pattern& pattern : {dense(16, causal), longnet(16, kSegments, kDilations, causal)}) {
    const Plan plan = view_of(options_of(pattern, placement, 16));
    double pairs = 0.0;
    for (const RankTotals& rank : plan.rank_totals()) pairs += rank.query_pairs;
    EXPECT_EQ(pairs, allowed_pairs(pattern, 1 << 20));
  }
}

INSTANTIATE_TEST_SUITE_P(Tokens, Million,
                         ::testing::Combine(::testing::Values("contiguous", "zigzag", "striped",
                                                              "hilbert"),
                                            ::testing::Bool()),
                         [](const auto& info) {
                           return std::get<0>(info.param) +
                                  (std::get<1>(info.param) ? "_causal" : "");
                         });

TEST(Plan, SizeDoesNotGrowWithTokensOrHeadsOfAClass) {
  for (const bool causal : {false, true}) {
    for (const char* name : {"contiguous", "zigzag"}) {
      // Segments straddle shards everywhere; only the number of tokens between boundaries grows.
      const auto plan = [&](std::int64_t scale, int heads) {
        const Lengths segments{2100 * scale, 6000 * scale};
        return view_of(options_of(longnet(heads, segments, Lengths{1, 4}, causal),
                                  Placement::named(name, 65536 * scale, 16), heads));
      };
      EXPECT_EQ(size_of(plan(1, 4)), size_of(plan(16, 4))) << name;
      EXPECT_EQ(size_of(plan(1, 4)), size_of(plan(1, 32))) << name;
    }
    // More segments of the same length: those within a shard cost nothing.
    const auto longer = [&](std::int64_t tokens) {
      return size_of(view_of(options_of(longnet(16, kSegments, kDilations, causal),
                                        Placement::contiguous(tokens, 64), 16)));
    };
    EXPECT_LE(longer(1 << 24), longer(1 << 20));
    EXPECT_LE(longer(1 << 20), 200U);
  }
}

// Everything that a rank keeps of a ring that it is a small part of.
TEST(Plan, SizeDoesNotGrowWithTheRing) {
  for (const bool causal : {false, true}) {
    const auto longnet_view = [&](int ranks) {
      return view_of(options_of(longnet(16, kSegments, kDilations, causal),
                                Placement::contiguous(std::int64_t{10'240} * ranks, ranks), 16));
    };
    EXPECT_EQ(size_of(longnet_view(1024)), size_of(longnet_view(64)));
    // One parcel of every other rank at most, and two hops of it.
    const auto dense_view = [&](int ranks) {
      return view_of(options_of(dense(8, causal), Placement::contiguous(1 << 20, ranks), 8));
    };
    EXPECT_LE(size_of(dense_view(1024)), 1 + 4U * 1024U);
  }
}

TEST(Plan, AnotherScheduleSharesTheParcels) {
  const Plan ring(options_of(dense(4, true), Placement::zigzag(4096, 4), 2), 1);
  const Plan gather = ring.with_schedule(Schedule::gather);
  EXPECT_EQ(ring.parcels().data(), gather.parcels().data());
  EXPECT_EQ(gather.steps(), 1);
  EXPECT_EQ(gather.total_unit_rows(), ring.total_unit_rows());
  EXPECT_EQ(gather.incoming(1).size() + 2, gather.parcels().size()) << "two are its own";
}

TEST(Plan, TableAndPictureTellTheTotals) {
  PlanOptions options = options_of(dense(4, true), Placement::zigzag(4096, 4), 2);
  for (const Schedule schedule : {Schedule::ring, Schedule::gather}) {
    for (const Travel travel : {Travel::keys, Travel::queries}) {
      options.schedule = schedule;
      options.travel = travel;
      options.pattern.name = "a < b & c";
      const Plan plan(options, 0);
      const std::string table = plan_table(plan);
      EXPECT_NE(table.find("a < b & c, causal: 4,096 tokens"), std::string::npos) << table;
      EXPECT_NE(table.find("100 %"), std::string::npos) << "zigzag is balanced\n" << table;
      const std::string svg = plan_svg(plan);
      EXPECT_EQ(svg.rfind("<svg", 0), 0U);
      EXPECT_NE(svg.find("a &lt; b &amp; c"), std::string::npos);
      EXPECT_NE(svg.find("rank 3"), std::string::npos);
      EXPECT_EQ(svg.find("nan"), std::string::npos);
      EXPECT_EQ(svg.find("inf"), std::string::npos);
    }
  }
}

TEST(Plan, TitlesOfAnyLengthFitIntoThePicture) {
  // Letters of DejaVu Sans Bold are 0.6 em wide on average.
  const std::regex title(
      "<svg [^>]*width=\"(\\d+)\"[^]*font-size=\"([0-9.]+)\"[^>]*weight=\"600\">([^<]*)<");
  for (const std::size_t length : {5U, 60U, 90U, 300U}) {
    PlanOptions options = options_of(dense(4, true), Placement::zigzag(4096, 4), 2);
    options.pattern.name = std::string(length, 'n');
    const std::string svg = plan_svg(Plan(options, 0));
    std::smatch found;
    ASSERT_TRUE(std::regex_search(svg, found, title)) << svg;
    EXPECT_LT(26 + 0.6 * std::stod(found[2]) * static_cast<double>(found[3].length()),
              std::stod(found[1]));
  }
}

TEST(Plan, PicturesLeavePaddingBlank) {
  PlanOptions options = options_of(dense(2), Placement::contiguous(1000, 2));
  options.pattern.documents = packed_documents(std::vector<std::int64_t>{0, 200, 600});
  const std::string svg = plan_svg(Plan(options, 0));
  const auto height_of = [&](const std::string& column) {  // of all its rectangles
    double sum = 0.0;
    const std::regex rect("<rect x=\"" + column +
                          "\" y=\"[0-9.]+\" width=\"[0-9.]+\" height=\"([0-9.]+)\"");
    for (std::sregex_iterator r(svg.begin(), svg.end(), rect), end; r != end; ++r)
      sum += std::stod((*r)[1]);
    return sum;
  };
  // The tokens, whose column has a frame, and the only branch.
  EXPECT_NEAR(height_of("132.00"), 0.6 * height_of("72.00") / 2, 0.1) << svg;
}

TEST(Plan, PictureDegradesToManyRanks) {
  for (const int ranks : {1, 2, 16, 17, 64, 100}) {
    const std::string svg =
        plan_svg(Plan(options_of(dense(1, true), Placement::zigzag(8192, ranks)), 0));
    EXPECT_NE(svg.find("</svg>"), std::string::npos);
    EXPECT_EQ(svg.find("nan"), std::string::npos);
  }
  const std::string tiny = plan_svg(Plan(options_of(dense(1), Placement::striped(2, 5)), 0));
  EXPECT_NE(tiny.find("idle"), std::string::npos) << "three ranks have no token";
}

}  // namespace
}  // namespace annulus
