#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "annulus/error.h"
#include "annulus/placement.h"

namespace annulus {
namespace {

constexpr std::uint64_t kSeed = 20240612;

std::int64_t steps_between(const GridCell& a, const GridCell& b) {
  return std::abs(a.row - b.row) + std::abs(a.col - b.col);
}

// Every cell once, all of them inside, every step to one of the four neighbours.
void expect_walks_every_cell_by_unit_steps(std::int64_t rows, std::int64_t cols) {
  SCOPED_TRACE(std::to_string(rows) + " x " + std::to_string(cols));
  const std::vector<GridCell> curve = hilbert_curve(rows, cols);
  ASSERT_EQ(static_cast<std::int64_t>(curve.size()), rows * cols);
  std::vector<bool> seen(curve.size(), false);
  for (std::size_t i = 0; i < curve.size(); ++i) {
    const GridCell& cell = curve[i];
    ASSERT_TRUE(cell.row >= 0 && cell.row < rows && cell.col >= 0 && cell.col < cols);
    const auto index = static_cast<std::size_t>(cell.row * cols + cell.col);
    ASSERT_FALSE(seen[index]) << "row " << cell.row << ", col " << cell.col;
    seen[index] = true;
    if (i > 0) {
      ASSERT_EQ(steps_between(curve[i - 1], cell), 1) << "step " << i;
    }
  }
  ASSERT_EQ(steps_between(curve.front(), {0, 0}), 0);
}

// The textbook conversion of a distance along the curve into coordinates (Warren, Hacker's
// Delight).
GridCell classical_cell(std::int64_t side, std::int64_t distance) {
  std::int64_t x = 0;
  std::int64_t y = 0;
  for (std::int64_t s = 1; s < side; s *= 2) {
    const std::int64_t flip_x = 1 & (distance / 2);
    const std::int64_t flip_y = 1 & (distance ^ flip_x);
    if (flip_y == 0) {
      if (flip_x == 1) {
        x = s - 1 - x;
        y = s - 1 - y;
      }
      std::swap(x, y);
    }
    x += s * flip_x;
    y += s * flip_y;
    distance /= 4;
  }
  return {y, x};
}

TEST(HilbertCurve, StepsToANeighbourOnEveryRectangleUpTo24) {
  for (std::int64_t rows = 1; rows <= 24; ++rows) {
    for (std::int64_t cols = 1; cols <= 24; ++cols) {
      expect_walks_every_cell_by_unit_steps(rows, cols);
    }
  }
}

TEST(HilbertCurve, StepsToANeighbourOnLargeAndLongRectangles) {
  std::mt19937_64 random(kSeed);
  SCOPED_TRACE("seed " + std::to_string(kSeed));
  std::uniform_int_distribution<std::int64_t> side(25, 300);
  std::uniform_int_distribution<std::int64_t> thin(1, 12);
  std::uniform_int_distribution<std::int64_t> lengthy(100, 5000);
  for (int trial = 0; trial < 100; ++trial) {
    expect_walks_every_cell_by_unit_steps(side(random), side(random));
    expect_walks_every_cell_by_unit_steps(thin(random), lengthy(random));
    expect_walks_every_cell_by_unit_steps(lengthy(random), thin(random));
  }
}

TEST(HilbertCurve, EndsAtTheFarEndOfTheLongerSideUnlessParityForbids) {
  for (std::int64_t rows = 1; rows <= 24; ++rows) {
    for (std::int64_t cols = 1; cols <= 24; ++cols) {
      SCOPED_TRACE(std::to_string(rows) + " x " + std::to_string(cols));
      const GridCell last = hilbert_curve(rows, cols).back();
      const bool wide = cols >= rows;
      const std::int64_t length = wide ? cols : rows;
      const std::int64_t breadth = wide ? rows : cols;
      const std::int64_t last_along = wide ? last.col : last.row;
      const std::int64_t last_across = wide ? last.row : last.col;
      if (length % 2 == 0 || breadth % 2 == 1) {
        EXPECT_EQ(last_along, length - 1);
        EXPECT_EQ(last_across, 0);
      } else {
        EXPECT_EQ(last_across, breadth - 1);
      }
    }
  }
}

TEST(HilbertCurve, IsTheClassicalCurveOnPowerOfTwoSquares) {
  for (std::int64_t side = 1; side <= 256; side *= 2) {
    const std::vector<GridCell> curve = hilbert_curve(side, side);
    int matching_symmetries = 0;
    for (int symmetry = 0; symmetry < 8; ++symmetry) {
      bool matches = true;
      for (std::size_t i = 0; i < curve.size() && matches; ++i) {
        GridCell expected = classical_cell(side, static_cast<std::int64_t>(i));
        if ((symmetry & 1) != 0) expected.row = side - 1 - expected.row;
        if ((symmetry & 2) != 0) expected.col = side - 1 - expected.col;
        if ((symmetry & 4) != 0) std::swap(expected.row, expected.col);
        matches = steps_between(curve[i], expected) == 0;
      }
      matching_symmetries += matches ? 1 : 0;
    }
    EXPECT_EQ(matching_symmetries, side == 1 ? 8 : 1) << "side " << side;
  }
}

TEST(HilbertCurve, VisitsEveryAlignedBlockOfAPowerOfTwoSquareInOneStretch) {
  constexpr std::int64_t kSide = 128;
  const std::vector<GridCell> curve = hilbert_curve(kSide, kSide);
  for (std::int64_t block = 1; block <= kSide; block *= 2) {
    const std::int64_t blocks_per_side = kSide / block;
    std::vector<bool> left(static_cast<std::size_t>(blocks_per_side * blocks_per_side), false);
    std::int64_t previous = -1;
    for (const GridCell& cell : curve) {
      const std::int64_t index = cell.row / block * blocks_per_side + cell.col / block;
      if (index == previous) continue;
      ASSERT_FALSE(left[static_cast<std::size_t>(index)]) << "block " << block << " entered twice";
      if (previous >= 0) left[static_cast<std::size_t>(previous)] = true;
      previous = index;
    }
  }
}

// What the curve is for: a stretch of n cells stays within a region of about n cells. On 2^k
// squares the squared distance after n steps is below 6 n (the known constant of the classical
// curve); the generalised one is somewhat looser (7.1 is the worst of these).
TEST(HilbertCurve, StaysLocalOnEveryRectangle) {
  std::mt19937_64 random(kSeed);
  SCOPED_TRACE("seed " + std::to_string(kSeed));
  std::uniform_int_distribution<std::int64_t> side(2, 90);
  for (int trial = 0; trial < 150; ++trial) {
    const bool square = trial < 6;
    const std::int64_t rows = square ? std::int64_t{2} << trial : side(random);
    const std::int64_t cols = square ? rows : side(random);
    const std::vector<GridCell> curve = hilbert_curve(rows, cols);
    double worst = 0;
    for (std::size_t i = 0; i < curve.size(); ++i) {
      for (std::size_t j = i + 1; j < curve.size(); j += 1 + (j - i) / 8) {
        const auto down = static_cast<double>(curve[j].row - curve[i].row);
        const auto right = static_cast<double>(curve[j].col - curve[i].col);
        // A thin strip is a line: there n steps do lead n cells away.
        const auto steps = static_cast<double>(j - i);
        const auto breadth = static_cast<double>(std::min(rows, cols));
        const double reach = std::max(steps, steps * steps / (breadth * breadth));
        worst = std::max(worst, (down * down + right * right) / reach);
      }
    }
    EXPECT_LT(worst, square ? 6.0 : 8.0) << rows << " x " << cols;
  }
}

TEST(HilbertCurve, RejectsEmptyAndImpossibleGrids) {
  EXPECT_THROW((void)hilbert_curve(0, 4), ConfigError);
  EXPECT_THROW((void)hilbert_curve(4, 0), ConfigError);
  EXPECT_THROW((void)hilbert_curve(-1, -1), ConfigError);
  EXPECT_THROW((void)hilbert_curve(std::int64_t{1} << 40, std::int64_t{1} << 40), ConfigError);
}

TEST(HilbertPlacement, RanksHoldStretchesOfTheCurveInAscendingOrder) {
  std::mt19937_64 random(kSeed);
  for (int trial = 0; trial < 1000; ++trial) {
    const auto pick = [&](std::int64_t low, std::int64_t high) {
      return std::uniform_int_distribution<std::int64_t>(low, high)(random);
    };
    const std::int64_t rows = pick(1, 30);
    const std::int64_t cols = pick(1, 30);
    const std::int64_t tokens = rows * cols - pick(0, cols - 1);  // ragged last row
    const int ranks = static_cast<int>(pick(1, 20));
    SCOPED_TRACE("seed " + std::to_string(kSeed) + ": " + std::to_string(tokens) + " tokens on " +
                 std::to_string(rows) + " x " + std::to_string(cols) + ", ranks " +
                 std::to_string(ranks));
    const Placement placement = Placement::hilbert(tokens, ranks, rows, cols);
    std::vector<std::int64_t> along_curve;
    for (const GridCell& cell : hilbert_curve(rows, cols)) {
      if (cell.row * cols + cell.col < tokens) along_curve.push_back(cell.row * cols + cell.col);
    }
    auto next = along_curve.begin();
    for (int rank = 0; rank < ranks; ++rank) {
      ASSERT_EQ(placement.local_tokens(rank), tokens / ranks + (rank < tokens % ranks ? 1 : 0));
      std::vector<std::int64_t> expected(next, next + placement.local_tokens(rank));
      next += placement.local_tokens(rank);
      std::sort(expected.begin(), expected.end());
      ASSERT_EQ(placement.positions(rank), expected);
      // Maximal runs: no range could have been part of its predecessor.
      const auto ranges = placement.ranges(rank);
      for (std::size_t i = 1; i < ranges.size(); ++i) {
        ASSERT_GT(ranges[i].first, ranges[i - 1].last() + 1);
        const bool singles = ranges[i].count == 1 && ranges[i - 1].count == 1;
        ASSERT_FALSE(singles) << "two single rows are a progression";
      }
    }
  }
}

TEST(HilbertPlacement, QuadrantsOfAPowerOfTwoSquareAreRanks) {
  const Placement placement = Placement::hilbert(64, 4);
  for (int rank = 0; rank < 4; ++rank) {
    ASSERT_EQ(placement.ranges(rank).size(), 4U);
    for (const RowSet& run : placement.ranges(rank)) {
      EXPECT_EQ(run.count, 4);
      EXPECT_EQ(run.first % 4, 0);
    }
  }
}

TEST(HilbertPlacement, CellsAboveEachOtherBecomeOneProgression) {
  // Stretches of two cells: side by side they are a run, one above the other a stride of one row.
  const Placement placement = Placement::hilbert(16, 8, 4, 4);
  int vertical = 0;
  for (int rank = 0; rank < 8; ++rank) {
    ASSERT_EQ(placement.ranges(rank).size(), 1U) << "rank " << rank;
    const RowSet& rows = placement.ranges(rank)[0];
    EXPECT_EQ(rows.count, 2);
    EXPECT_TRUE(rows.stride == 1 || rows.stride == 4) << rows.stride;
    vertical += rows.stride == 4 ? 1 : 0;
  }
  EXPECT_GT(vertical, 0);
}

TEST(HilbertPlacement, DefaultGridIsTheSquarestForEveryTokenCount) {
  for (std::int64_t tokens = 1; tokens <= 1200; ++tokens) {
    std::int64_t cols = 1;
    while (cols * cols < tokens) ++cols;
    const std::int64_t rows = (tokens + cols - 1) / cols;
    const Placement by_default = Placement::hilbert(tokens, 5);
    const Placement given = Placement::hilbert(tokens, 5, rows, cols);
    for (int rank = 0; rank < 5; ++rank) {
      ASSERT_EQ(by_default.positions(rank), given.positions(rank)) << tokens << " tokens";
    }
  }
}

TEST(HilbertPlacement, RowsAndColumnsWithoutTokensCostNothing) {
  constexpr std::int64_t kHuge = std::int64_t{1} << 50;
  EXPECT_EQ(Placement::hilbert(10, 3, kHuge, 4).positions(1),
            Placement::hilbert(10, 3, 3, 4).positions(1));
  EXPECT_EQ(Placement::hilbert(10, 3, kHuge, kHuge).positions(1),
            Placement::hilbert(10, 3, 1, 10).positions(1));
}

TEST(HilbertPlacement, RejectsAGridThatIsTooSmallOrHalfGiven) {
  EXPECT_NO_THROW((void)Placement::hilbert(12, 2, 3, 4));
  EXPECT_THROW((void)Placement::hilbert(13, 2, 3, 4), ConfigError);
  EXPECT_THROW((void)Placement::hilbert(12, 2, 3, 0), ConfigError);
  EXPECT_THROW((void)Placement::hilbert(12, 2, 0, 4), ConfigError);
  EXPECT_THROW((void)Placement::hilbert(12, 2, -3, -4), ConfigError);
  EXPECT_THROW((void)Placement::hilbert(0, 2), ConfigError);
  EXPECT_THROW((void)Placement::hilbert(12, 0), ConfigError);
}

TEST(HilbertPlacement, AMillionTokensAreFewRanges) {
  const Placement placement = Placement::hilbert(std::int64_t{1} << 20, 64);
  for (int rank = 0; rank < 64; ++rank) EXPECT_EQ(placement.ranges(rank).size(), 128U);
}

// Cell by cell, as the header defines it.
std::vector<std::vector<std::int64_t>> stretches(std::int64_t tokens, int ranks, std::int64_t rows,
                                                 std::int64_t cols) {
  std::vector<std::vector<std::int64_t>> held(static_cast<std::size_t>(ranks));
  std::int64_t placed = 0;
  std::size_t rank = 0;
  for (const GridCell& cell : hilbert_curve(rows, cols)) {
    const std::int64_t position = cell.row * cols + cell.col;
    if (position >= tokens) continue;
    const auto size = [&] {
      return tokens / ranks + (static_cast<std::int64_t>(rank) < tokens % ranks ? 1 : 0);
    };
    if (placed == size()) {
      ++rank;
      placed = 0;
    }
    ++placed;
    held[rank].push_back(position);
  }
  for (auto& positions : held) std::sort(positions.begin(), positions.end());
  return held;
}

TEST(HilbertPlacement, BlocksAreTheStretchesOfTheCurve) {
  std::mt19937_64 random(kSeed);
  const auto between = [&](std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(random);
  };
  for (int trial = 0; trial < 400; ++trial) {
    std::int64_t cols = between(1, trial % 2 == 0 ? 12 : 80);
    const std::int64_t tokens = between(1, 3000);
    const int ranks = static_cast<int>(between(1, trial % 3 == 0 ? 3100 : 20));
    cols = std::min(cols, tokens);
    const std::int64_t rows = (tokens - 1) / cols + 1;
    SCOPED_TRACE(std::to_string(tokens) + " tokens on " + std::to_string(ranks) + " ranks, " +
                 std::to_string(rows) + " x " + std::to_string(cols));
    const Placement placement = Placement::hilbert(tokens, ranks, rows, cols);
    const auto expected = stretches(tokens, ranks, rows, cols);
    for (int rank = 0; rank < ranks; ++rank) {
      ASSERT_EQ(placement.positions(rank), expected[static_cast<std::size_t>(rank)]) << rank;
    }
  }
}

TEST(HilbertPlacement, CostsTheOutlinesOfTheShardsNotTheirTokens) {
  // A trillion tokens would not fit into memory one by one.
  const std::int64_t tokens = std::int64_t{1} << 40;
  const Placement placement = Placement::hilbert(tokens, 4);
  std::int64_t held = 0;
  for (int rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(placement.local_tokens(rank), tokens / 4);
    held += placement.local_tokens(rank);
  }
  EXPECT_EQ(held, tokens);
}

}  // namespace
}  // namespace annulus
