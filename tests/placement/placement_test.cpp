#include "annulus/placement.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "annulus/error.h"

namespace annulus {
namespace {

constexpr std::uint64_t kSeed = 20240613;
const char* const kNames[] = {"contiguous", "zigzag", "striped", "hilbert"};

std::int64_t uniform(std::mt19937_64& random, std::int64_t low, std::int64_t high) {
  return std::uniform_int_distribution<std::int64_t>(low, high)(random);
}

std::string trace_of(const std::string& name, std::int64_t tokens, int ranks) {
  return "seed " + std::to_string(kSeed) + ": " + name + ", tokens " + std::to_string(tokens) +
         ", ranks " + std::to_string(ranks);
}

// The contract of every placement, whatever made it.
void expect_sound(const Placement& placement, std::int64_t tokens, int ranks) {
  ASSERT_EQ(placement.tokens(), tokens);
  ASSERT_EQ(placement.ranks(), ranks);
  std::vector<int> holders(static_cast<std::size_t>(tokens), 0);
  std::int64_t total = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    std::int64_t local = 0;
    const std::vector<std::int64_t> positions = placement.positions(rank);
    for (const RowSet& rows : placement.ranges(rank)) {
      ASSERT_GT(rows.count, 0) << "an empty row set is stored";
      ASSERT_GT(rows.stride, 0);
      for (std::int64_t i = 0; i < rows.count; ++i, ++local) {
        ASSERT_TRUE(rows[i] >= 0 && rows[i] < tokens) << rows[i];
        ++holders[static_cast<std::size_t>(rows[i])];
        ASSERT_EQ(placement.position(rank, local), rows[i]);
        ASSERT_EQ(positions.at(static_cast<std::size_t>(local)), rows[i]);
      }
    }
    ASSERT_EQ(placement.local_tokens(rank), local);
    ASSERT_EQ(static_cast<std::int64_t>(positions.size()), local);
    total += local;
  }
  ASSERT_EQ(total, tokens);
  for (std::size_t t = 0; t < holders.size(); ++t) ASSERT_EQ(holders[t], 1) << "token " << t;
}

std::pair<std::int64_t, std::int64_t> smallest_and_largest(
    const Placement& placement, const std::function<std::int64_t(int)>& measure) {
  std::int64_t smallest = std::numeric_limits<std::int64_t>::max();
  std::int64_t largest = std::numeric_limits<std::int64_t>::min();
  for (int rank = 0; rank < placement.ranks(); ++rank) {
    smallest = std::min(smallest, measure(rank));
    largest = std::max(largest, measure(rank));
  }
  return {smallest, largest};
}

std::int64_t size_spread(const Placement& placement) {
  const auto [smallest, largest] =
      smallest_and_largest(placement, [&](int rank) { return placement.local_tokens(rank); });
  return largest - smallest;
}

std::string error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "no ConfigError";
}

void expect_error(const std::function<void()>& action, const std::vector<std::string>& fragments) {
  const std::string message = error_of(action);
  for (const std::string& fragment : fragments) {
    EXPECT_NE(message.find(fragment), std::string::npos) << "'" << fragment << "' in: " << message;
  }
}

TEST(Placement, PutsEveryTokenOnExactlyOneRank) {
  std::mt19937_64 random(kSeed);
  for (int trial = 0; trial < 3000; ++trial) {
    const std::int64_t tokens = uniform(random, 1, trial % 10 == 0 ? 3000 : 200);
    const int ranks = static_cast<int>(uniform(random, 1, trial % 7 == 0 ? 300 : 20));
    const std::string name = kNames[trial % 4];
    SCOPED_TRACE(trace_of(name, tokens, ranks));
    const Placement placement = Placement::named(name, tokens, ranks);
    EXPECT_EQ(placement.name(), name);
    expect_sound(placement, tokens, ranks);
    EXPECT_LE(size_spread(placement), 1);
    if (HasFatalFailure()) return;
  }
}

TEST(Placement, ContiguousShardsAreOneAscendingRangeEach) {
  std::mt19937_64 random(kSeed);
  for (int trial = 0; trial < 3000; ++trial) {
    const std::int64_t tokens = uniform(random, 1, 500);
    const int ranks = static_cast<int>(uniform(random, 1, 40));
    const std::int64_t align = uniform(random, 1, trial % 2 == 0 ? 1 : 70);
    SCOPED_TRACE(trace_of("contiguous", tokens, ranks) + ", align " + std::to_string(align));
    const Placement placement = Placement::contiguous(tokens, ranks, align);
    expect_sound(placement, tokens, ranks);
    std::int64_t next = 0;
    for (int rank = 0; rank < ranks; ++rank) {
      ASSERT_LE(placement.ranges(rank).size(), 1U);
      for (const RowSet& rows : placement.ranges(rank)) {
        ASSERT_EQ(rows, (RowSet{next, placement.local_tokens(rank), 1}));
        next += rows.count;
      }
      // Only the shard that ends the sequence may be no multiple of `align`.
      if (next < tokens) {
        ASSERT_EQ(placement.local_tokens(rank) % align, 0);
      }
    }
    ASSERT_LE(size_spread(placement), align);
  }
}

TEST(Placement, AlignmentKeepsSegmentsLocal) {
  std::mt19937_64 random(kSeed);
  for (int trial = 0; trial < 2000; ++trial) {
    const std::int64_t segment = uniform(random, 1, 16);
    const std::int64_t align = segment * uniform(random, 1, 4);
    const std::int64_t tokens = uniform(random, 1, 600);
    const int ranks = static_cast<int>(uniform(random, 1, 12));
    SCOPED_TRACE(trace_of("contiguous", tokens, ranks) + ", align " + std::to_string(align));
    const Placement placement = Placement::contiguous(tokens, ranks, align);
    std::vector<int> rank_of_segment(static_cast<std::size_t>(tokens / segment + 1), -1);
    for (int rank = 0; rank < ranks; ++rank) {
      for (const std::int64_t position : placement.positions(rank)) {
        int& owner = rank_of_segment[static_cast<std::size_t>(position / segment)];
        ASSERT_TRUE(owner == -1 || owner == rank) << "segment " << position / segment;
        owner = rank;
      }
    }
  }
}

TEST(Placement, ContiguousGivesTheFirstRanksOneMore) {
  const Placement placement = Placement::contiguous(10, 4);
  EXPECT_EQ(placement.ranges(0)[0], (RowSet{0, 3, 1}));
  EXPECT_EQ(placement.ranges(1)[0], (RowSet{3, 3, 1}));
  EXPECT_EQ(placement.ranges(2)[0], (RowSet{6, 2, 1}));
  EXPECT_EQ(placement.ranges(3)[0], (RowSet{8, 2, 1}));
}

TEST(Placement, RaggedAlignedTailDoesNotFallBehindByMoreThanAlign) {
  // 6 blocks of 10 (the last of 1) on 4 ranks: 20, 10, 10, 11 and not 20, 20, 10, 1.
  const Placement placement = Placement::contiguous(51, 4, 10);
  EXPECT_EQ(placement.local_tokens(0), 20);
  EXPECT_EQ(placement.local_tokens(1), 10);
  EXPECT_EQ(placement.local_tokens(2), 10);
  EXPECT_EQ(placement.local_tokens(3), 11);
}

TEST(Placement, AlignLargerThanTheSequenceKeepsItOnOneRank) {
  const Placement placement =
      Placement::contiguous(100, 4, std::numeric_limits<std::int64_t>::max());
  EXPECT_EQ(placement.local_tokens(0), 100);
  EXPECT_EQ(size_spread(placement), 100);
}

TEST(Placement, ZigzagHoldsChunksFromBothEnds) {
  const Placement placement = Placement::zigzag(16, 4);
  for (int rank = 0; rank < 3; ++rank) {
    ASSERT_EQ(placement.ranges(rank).size(), 2U);
    EXPECT_EQ(placement.ranges(rank)[0], (RowSet{2 * rank, 2, 1}));
    EXPECT_EQ(placement.ranges(rank)[1], (RowSet{14 - 2 * rank, 2, 1}));
  }
  ASSERT_EQ(placement.ranges(3).size(), 1U);  // its chunks are neighbours
  EXPECT_EQ(placement.ranges(3)[0], (RowSet{6, 4, 1}));
}

// Token t attends t + 1 keys. With equal chunks the sums are equal; up to 2P - 1 chunks that are
// one token longer unbalance the ranks by less than the work of the last two tokens.
TEST(Placement, ZigzagBalancesCausalWork) {
  std::mt19937_64 random(kSeed);
  for (int trial = 0; trial < 3000; ++trial) {
    const int ranks = static_cast<int>(uniform(random, 1, 24));
    const std::int64_t tokens =
        trial % 3 == 0 ? 2 * ranks * uniform(random, 1, 40) : uniform(random, 1, 2000);
    SCOPED_TRACE(trace_of("zigzag", tokens, ranks));
    const Placement placement = Placement::zigzag(tokens, ranks);
    const auto [least, most] = smallest_and_largest(placement, [&](int rank) {
      std::int64_t work = 0;
      for (const std::int64_t position : placement.positions(rank)) work += position + 1;
      return work;
    });
    if (tokens % (2 * ranks) == 0) {
      ASSERT_EQ(most, least);
    }
    ASSERT_LE(most - least, 2 * tokens);
  }
}

TEST(Placement, StripedTokenLivesOnItsPositionModuloRanks) {
  const Placement placement = Placement::striped(10, 4);
  EXPECT_EQ(placement.ranges(0)[0], (RowSet{0, 3, 4}));
  EXPECT_EQ(placement.ranges(1)[0], (RowSet{1, 3, 4}));
  EXPECT_EQ(placement.ranges(2)[0], (RowSet{2, 2, 4}));
  EXPECT_EQ(placement.ranges(3)[0], (RowSet{3, 2, 4}));
}

TEST(Placement, FewerTokensThanRanksLeavesRanksEmpty) {
  for (const char* name : kNames) {
    SCOPED_TRACE(name);
    const Placement placement = Placement::named(name, 3, 8);
    expect_sound(placement, 3, 8);
    int empty = 0;
    for (int rank = 0; rank < 8; ++rank) {
      empty += placement.local_tokens(rank) == 0 ? 1 : 0;
      EXPECT_EQ(placement.ranges(rank).empty(), placement.local_tokens(rank) == 0);
    }
    EXPECT_EQ(empty, 5);
  }
}

TEST(Placement, FormulaPlacementsNeedNoMemoryPerToken) {
  constexpr std::int64_t kTokens = (std::int64_t{1} << 40) + 12345;
  for (const char* name : {"contiguous", "zigzag", "striped"}) {
    SCOPED_TRACE(name);
    const Placement placement = Placement::named(name, kTokens, 1000);
    std::int64_t total = 0;
    std::vector<std::vector<RowSet>> ranges;
    for (int rank = 0; rank < 1000; ++rank) {
      total += placement.local_tokens(rank);
      ranges.emplace_back(placement.ranges(rank).begin(), placement.ranges(rank).end());
    }
    EXPECT_EQ(total, kTokens);
    EXPECT_NO_THROW((void)Placement::explicit_ranges(kTokens, std::move(ranges)));
  }
}

TEST(Placement, ExplicitAcceptsWhatOtherPlacementsProduceInAnyOrder) {
  std::mt19937_64 random(kSeed);
  for (int trial = 0; trial < 1000; ++trial) {
    const std::int64_t tokens = uniform(random, 1, 400);
    const int ranks = static_cast<int>(uniform(random, 1, 12));
    const std::string name = kNames[trial % 4];
    SCOPED_TRACE(trace_of(name, tokens, ranks));
    const Placement original = Placement::named(name, tokens, ranks);
    std::vector<std::vector<RowSet>> ranges;
    for (int rank = 0; rank < ranks; ++rank) {
      std::vector<RowSet> mine(original.ranges(rank).begin(), original.ranges(rank).end());
      mine.push_back({uniform(random, 0, tokens), 0, 1});  // empty, hence not stored
      std::shuffle(mine.begin(), mine.end(), random);
      ranges.push_back(std::move(mine));
    }
    const Placement copy = Placement::explicit_ranges(tokens, ranges);
    EXPECT_EQ(copy.name(), "explicit");
    expect_sound(copy, tokens, ranks);
    for (int rank = 0; rank < ranks; ++rank) {
      EXPECT_EQ(copy.local_tokens(rank), original.local_tokens(rank));
    }
    if (HasFatalFailure()) return;
  }
}

TEST(Placement, ExplicitKeepsStorageOrder) {
  const Placement placement = Placement::explicit_ranges(6, {{{4, 2, 1}, {0, 2, 2}}, {{1, 2, 2}}});
  EXPECT_EQ(placement.name(), "explicit");
  EXPECT_EQ(Placement::explicit_ranges(1, {{{0, 1, 1}}}, "mine").name(), "mine");
  EXPECT_EQ(placement.positions(0), (std::vector<std::int64_t>{4, 5, 0, 2}));
  EXPECT_EQ(placement.positions(1), (std::vector<std::int64_t>{1, 3}));
}

TEST(Placement, ExplicitIgnoresTheStrideOfASingleRow) {
  constexpr std::int64_t kHuge = std::numeric_limits<std::int64_t>::max();
  const Placement placement =
      Placement::explicit_ranges(3, {{{2, 1, kHuge}, {0, 1, kHuge}}, {{1, 1, 7}}});
  EXPECT_EQ(placement.positions(0), (std::vector<std::int64_t>{2, 0}));
  EXPECT_EQ(placement.ranges(0)[0], (RowSet{2, 1, 1}));
}

// Random row sets against a plain count of holders per position: accepted iff every count is one,
// and the position that an error names really is held twice, by none, or lies outside.
TEST(Placement, ExplicitRejectsExactlyTheUnsoundRanges) {
  std::mt19937_64 random(kSeed);
  int accepted = 0;
  for (int trial = 0; trial < 6000; ++trial) {
    const std::int64_t tokens = uniform(random, 1, 40);
    const int ranks = static_cast<int>(uniform(random, 1, 5));
    const Placement sound = Placement::named(kNames[trial % 4], tokens, ranks);
    std::vector<std::vector<RowSet>> ranges;
    for (int rank = 0; rank < ranks; ++rank) {
      ranges.emplace_back(sound.ranges(rank).begin(), sound.ranges(rank).end());
    }
    // One change, which may also leave everything sound (a stride of a single row, say).
    std::vector<RowSet>& victim = ranges[static_cast<std::size_t>(uniform(random, 0, ranks - 1))];
    if (victim.empty()) victim.push_back({0, 0, 1});
    RowSet& rows = victim[static_cast<std::size_t>(
        uniform(random, 0, static_cast<std::int64_t>(victim.size()) - 1))];
    rows.first += uniform(random, -1, 1);
    rows.count = std::max<std::int64_t>(0, rows.count + uniform(random, -1, 1));
    rows.stride = std::max<std::int64_t>(1, rows.stride + uniform(random, -1, 1));

    std::vector<int> holders(static_cast<std::size_t>(tokens), 0);
    bool inside = true;
    for (const auto& rank_ranges : ranges) {
      for (const RowSet& each : rank_ranges) {
        for (std::int64_t i = 0; i < each.count; ++i) {
          const bool valid = each[i] >= 0 && each[i] < tokens;
          inside = inside && valid;
          if (valid) ++holders[static_cast<std::size_t>(each[i])];
        }
      }
    }
    const bool once =
        std::all_of(holders.begin(), holders.end(), [](int count) { return count == 1; });
    SCOPED_TRACE(trace_of("explicit", tokens, ranks) + ", trial " + std::to_string(trial));
    const std::string message = error_of([&] { (void)Placement::explicit_ranges(tokens, ranges); });
    if (inside && once) {
      ++accepted;
      ASSERT_EQ(message, "no ConfigError");
      continue;
    }
    const std::size_t at = message.find("position ");
    ASSERT_NE(at, std::string::npos) << message;
    const std::int64_t position = std::stoll(message.substr(at + 9));
    if (!inside) {
      ASSERT_TRUE(position < 0 || position >= tokens) << message;
      continue;
    }
    const int held = holders.at(static_cast<std::size_t>(position));
    ASSERT_EQ(message.find("held twice") != std::string::npos, held > 1) << message;
    ASSERT_EQ(message.find("held by none") != std::string::npos, held == 0) << message;
  }
  EXPECT_GT(accepted, 50);
}

TEST(Placement, ExplicitErrorsNameTheRankAndThePosition) {
  const auto with = [](std::vector<std::vector<RowSet>> ranges) {
    return [ranges = std::move(ranges)] { (void)Placement::explicit_ranges(10, ranges); };
  };
  constexpr std::int64_t kHuge = std::numeric_limits<std::int64_t>::max();
  expect_error(with({{{0, 5, 1}}, {{4, 6, 1}}}), {"position 4", "rank 0", "rank 1", "twice"});
  expect_error(with({{{0, 5, 1}, {2, 1, 1}}, {{5, 5, 1}}}), {"position 2", "rank 0", "twice"});
  expect_error(with({{{0, 5, 2}}, {{1, 4, 2}}}), {"position 9", "held by none"});
  expect_error(with({{{0, 5, 1}}, {{5, 6, 1}}}), {"rank 1", "position 10", "tokens is 10"});
  expect_error(with({{{-1, 5, 1}}, {{5, 5, 1}}}), {"rank 0", "position -1"});
  expect_error(with({{{0, 10, 1}}, {{10, 1, 1}}}), {"rank 1", "position 10"});
  expect_error(with({{{0, -3, 1}}, {{0, 10, 1}}}), {"rank 0", "negative count"});
  expect_error(with({{{0, 10, 1}}, {{0, 0, 0}}}), {"rank 1", "stride below 1"});
  expect_error(with({{{0, kHuge, kHuge}}}), {"rank 0", "position 9223372036854775807"});
  expect_error(with({{{9, 2, kHuge}}}), {"rank 0", "position 9223372036854775816"});
  expect_error(with({{}, {}}), {"position 0", "held by none"});
  expect_error(with({}), {"ranks is 0"});
}

TEST(Placement, RejectsCountsBelowOne) {
  for (const char* name : kNames) {
    SCOPED_TRACE(name);
    const std::string where = std::string("Placement::") + name;
    expect_error([&] { (void)Placement::named(name, 0, 2); }, {where, "tokens is 0", "at least 1"});
    expect_error([&] { (void)Placement::named(name, -4, 2); }, {where, "tokens is -4"});
    expect_error([&] { (void)Placement::named(name, 8, 0); }, {where, "ranks is 0", "at least 1"});
    expect_error([&] { (void)Placement::named(name, 8, -1); }, {where, "ranks is -1"});
  }
  expect_error([] { (void)Placement::contiguous(8, 2, 0); }, {"align is 0", "at least 1"});
  expect_error([] { (void)Placement::contiguous(8, 2, -8); }, {"align is -8"});
}

TEST(Placement, UnknownNameIsAnErrorThatListsTheKnownOnes) {
  expect_error([] { (void)Placement::named("Striped", 8, 2); },
               {"'Striped'", "'contiguous'", "'zigzag'", "'striped'", "'hilbert'"});
}

TEST(Placement, PositionOutsideTheShardIsAnError) {
  const Placement placement = Placement::contiguous(10, 4);
  EXPECT_EQ(placement.position(3, 1), 9);
  expect_error([&] { (void)placement.position(3, 2); }, {"rank 3", "local token 2", "[0, 2)"});
  expect_error([&] { (void)placement.position(0, -1); }, {"local token -1"});
  expect_error([&] { (void)placement.position(4, 0); }, {"rank 4", "[0, 4)"});
  expect_error([&] { (void)placement.position(-1, 0); }, {"rank -1"});
}

TEST(Placement, CopiesShareTheirDataAndOnlyCopiesAreTheSame) {
  const Placement one = Placement::zigzag(100, 4);
  const Placement copy = one;  // NOLINT(performance-unnecessary-copy-initialization): it is tested
  EXPECT_TRUE(copy.same_as(one));
  EXPECT_EQ(copy.ranges(2).data(), one.ranges(2).data());
  EXPECT_FALSE(Placement::zigzag(100, 4).same_as(one));
}

}  // namespace
}  // namespace annulus
