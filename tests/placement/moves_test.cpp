#include "annulus/moves.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "annulus/error.h"

namespace annulus {
namespace {

constexpr std::uint64_t kSeed = 20261116;

std::int64_t uniform(std::mt19937_64& random, std::int64_t low, std::int64_t high) {
  return std::uniform_int_distribution<std::int64_t>(low, high)(random);
}

// Ranks hold random tokens in a random order, some of them none.
Placement scattered(std::mt19937_64& random, std::int64_t tokens, int ranks) {
  std::vector<std::vector<RowSet>> ranges(static_cast<std::size_t>(ranks));
  std::vector<RowSet> pieces;
  for (std::int64_t first = 0; first < tokens;) {
    const std::int64_t stride = uniform(random, 1, 3);
    const std::int64_t periods =
        std::min(uniform(random, 1, 5), std::max<std::int64_t>(1, (tokens - first) / stride));
    const std::int64_t block = std::min(periods * stride, tokens - first);
    for (std::int64_t o = 0; o < std::min(stride, block); ++o) {
      pieces.push_back({first + o, (block - o + stride - 1) / stride, stride});
    }
    first += block;
  }
  std::shuffle(pieces.begin(), pieces.end(), random);
  for (const RowSet& piece : pieces) {
    ranges[static_cast<std::size_t>(uniform(random, 0, ranks - 1))].push_back(piece);
  }
  return Placement::explicit_ranges(tokens, std::move(ranges));
}

Placement any_placement(std::mt19937_64& random, std::int64_t tokens, int ranks) {
  const char* const names[] = {"contiguous", "zigzag", "striped", "hilbert"};
  const std::int64_t kind = uniform(random, 0, 4);
  return kind == 4 ? scattered(random, tokens, ranks)
                   : Placement::named(names[kind], tokens, ranks);
}

std::vector<std::int64_t> positions(const Placement& placement, int rank) {
  return rank < placement.ranks() ? placement.positions(rank) : std::vector<std::int64_t>{};
}

std::vector<std::int64_t> expanded(const std::vector<RowSet>& rows) {
  std::vector<std::int64_t> all;
  for (const RowSet& set : rows) {
    EXPECT_GT(set.stride, 0) << "no row set, though its rows may be right";
    for (std::int64_t i = 0; i < set.count; ++i) all.push_back(set[i]);
  }
  return all;
}

// Shards as lists of positions, moved as the ranks' moves say, each message by itself.
void expect_moved(const Placement& from, const Placement& to) {
  const int ranks = std::max(from.ranks(), to.ranks());
  std::vector<Moves> all;
  for (int rank = 0; rank < ranks; ++rank) all.push_back(moves(from, to, rank));
  for (int rank = 0; rank < ranks; ++rank) {
    const Moves& mine = all[static_cast<std::size_t>(rank)];
    const std::vector<std::int64_t> before = positions(from, rank);
    const std::vector<std::int64_t> after = positions(to, rank);
    std::vector<std::int64_t> found(after.size(), -1);
    const auto put = [&](std::int64_t local, std::int64_t position) {
      ASSERT_GE(local, 0);
      ASSERT_LT(local, static_cast<std::int64_t>(found.size()));
      ASSERT_EQ(found[static_cast<std::size_t>(local)], -1) << "written twice";
      found[static_cast<std::size_t>(local)] = position;
    };
    ASSERT_EQ(mine.old_rows.size(), mine.new_rows.size());
    for (std::size_t i = 0; i < mine.old_rows.size(); ++i) {
      ASSERT_EQ(mine.old_rows[i].count, mine.new_rows[i].count);
      for (std::int64_t j = 0; j < mine.old_rows[i].count; ++j) {
        put(mine.new_rows[i][j], before[static_cast<std::size_t>(mine.old_rows[i][j])]);
      }
    }
    std::int64_t received = 0;
    for (const Move& receive : mine.receives) {
      const Moves& theirs = all[static_cast<std::size_t>(receive.peer)];
      const auto send = std::find_if(theirs.sends.begin(), theirs.sends.end(),
                                     [&](const Move& move) { return move.peer == rank; });
      ASSERT_NE(send, theirs.sends.end()) << "nobody sends what is received";
      const std::vector<std::int64_t> out = expanded(send->rows);
      const std::vector<std::int64_t> in = expanded(receive.rows);
      ASSERT_EQ(out.size(), in.size());
      ASSERT_EQ(static_cast<std::int64_t>(in.size()), receive.count);
      ASSERT_EQ(send->count, receive.count);
      const std::vector<std::int64_t> held = positions(from, receive.peer);
      for (std::size_t i = 0; i < in.size(); ++i) {
        put(in[i], held[static_cast<std::size_t>(out[i])]);
      }
      received += receive.count;
    }
    ASSERT_EQ(found, after);
    // The lower bound: what a rank is to hold and does not hold has to come, and no more comes.
    std::vector<std::int64_t> a = before;
    std::vector<std::int64_t> b = after;
    std::sort(a.begin(), a.end());
    std::sort(b.begin(), b.end());
    std::vector<std::int64_t> missing;
    std::set_difference(b.begin(), b.end(), a.begin(), a.end(), std::back_inserter(missing));
    ASSERT_EQ(received, static_cast<std::int64_t>(missing.size()));
    for (const Move& send : mine.sends) {
      ASSERT_NE(send.peer, rank);
      ASSERT_GT(send.count, 0) << "an empty message";
    }
  }
}

TEST(Moves, MovesEveryRowToItsNewPlaceWithTheFewestBytes) {
  std::mt19937_64 random(kSeed);
  for (int round = 0; round < 400; ++round) {
    const std::int64_t tokens = uniform(random, 1, 90);
    const Placement from = any_placement(random, tokens, static_cast<int>(uniform(random, 1, 7)));
    const Placement to = any_placement(random, tokens, static_cast<int>(uniform(random, 1, 7)));
    SCOPED_TRACE("seed " + std::to_string(kSeed) + ", round " + std::to_string(round) + ": " +
                 from.name() + " on " + std::to_string(from.ranks()) + " to " + to.name() + " on " +
                 std::to_string(to.ranks()) + ", tokens " + std::to_string(tokens));
    expect_moved(from, to);
    if (HasFatalFailure()) return;
  }
}

// The ranges that may meet others are found by bisection, though a long one ends behind all that
// begin after it.
TEST(Moves, FindsRowsOfALongRangeAmongManyShortOnes) {
  std::vector<std::vector<RowSet>> ranges(2);
  ranges[0].push_back({0, 50, 2});
  for (std::int64_t odd = 1; odd < 100; odd += 2) ranges[odd < 80 ? 0 : 1].push_back({odd, 1, 1});
  const Placement from = Placement::explicit_ranges(100, std::move(ranges));
  expect_moved(from, Placement::contiguous(100, 3));
  expect_moved(Placement::contiguous(100, 3), from);
}

TEST(Moves, SamePlacementMovesNothing) {
  const Placement placement = Placement::zigzag(100, 4);
  for (int rank = 0; rank < 4; ++rank) {
    const Moves nothing = moves(placement, Placement::zigzag(100, 4), rank);
    EXPECT_TRUE(nothing.sends.empty() && nothing.receives.empty());
    EXPECT_EQ(expanded(nothing.old_rows), expanded(nothing.new_rows));
  }
}

// A rank's moves follow ranges, not tokens.
TEST(Moves, ABillionTokensAreAFewRuns) {
  const std::int64_t tokens = 1'000'000'000;
  const Moves mine = moves(Placement::contiguous(tokens, 64), Placement::striped(tokens, 48), 7);
  EXPECT_EQ(mine.sends.size(), 47);
  for (const Move& send : mine.sends) EXPECT_EQ(send.rows.size(), 1);
  std::int64_t sent = 0;
  for (const Move& send : mine.sends) sent += send.count;
  EXPECT_EQ(sent, 15'625'000 - mine.old_rows.front().count);
}

TEST(Moves, RefusesOtherTokensAndRanksThatThereAreNot) {
  const Placement four = Placement::contiguous(10, 4);
  EXPECT_THROW((void)moves(four, Placement::contiguous(11, 4), 0), ConfigError);
  EXPECT_THROW((void)moves(four, Placement::contiguous(10, 2), 4), ConfigError);
  EXPECT_THROW((void)moves(four, four, -1), ConfigError);
}

}  // namespace
}  // namespace annulus
