#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "annulus/error.h"
#include "annulus/placement.h"

namespace annulus {
namespace {

// An even cut near the middle, which the parity argument below needs; a side of 2 has none.
std::int64_t even_half(std::int64_t length) {
  const std::int64_t half = length / 2;
  return half % 2 != 0 && length > 2 ? half + 1 : half;
}

// Visits the cells of a block from `corner` to the corner at the far end of its `along` side
// (`length` cells), the other side, `across`, being `breadth` cells.
//
// Colour the grid like a chessboard: such a path of unit steps exists only if length is even or
// breadth is odd. Every cut below hands the condition down: the pieces that run `across` are as
// long as an even cut, the others keep the parity of both of their sides. The only odd cut, 2 = 1 +
// 1, leaves single cells and a line because a block of breadth 2 is at most 2 long by then. So a
// block that fulfils the condition is walked without a diagonal step. (The three-way split with
// even cuts is that of Cerveny's generalised Hilbert curve, github.com/jakubcerveny/gilbert, which
// accepts a diagonal step in blocks that do not; walk_grid never makes such a block.)
//
// The depth of the recursion is logarithmic: every cut halves a side, up to rounding.
template <typename Visit>
void walk_block(GridCell corner, GridCell along, std::int64_t length, GridCell across,
                std::int64_t breadth, Visit& visit) {
  const auto at = [&](std::int64_t i, std::int64_t j) -> GridCell {
    return {corner.row + i * along.row + j * across.row,
            corner.col + i * along.col + j * across.col};
  };
  if (breadth == 1) {
    for (std::int64_t i = 0; i < length; ++i) visit(at(i, 0));
    return;
  }
  if (2 * length > 3 * breadth) {
    const std::int64_t cut = even_half(length);
    walk_block(corner, along, cut, across, breadth, visit);
    walk_block(at(cut, 0), along, length - cut, across, breadth, visit);
    return;
  }
  // Out along `across` on the near part, over the whole length, and back: on a square of side 2^k
  // the middle piece is cut in two next, which gives the four quadrants of the classical curve.
  const std::int64_t near = even_half(breadth);
  const std::int64_t left = length / 2;
  const GridCell back_along{-along.row, -along.col};
  const GridCell back_across{-across.row, -across.col};
  walk_block(corner, across, near, along, left, visit);
  walk_block(at(0, near), along, length, across, breadth - near, visit);
  walk_block(at(length - 1, near - 1), back_across, near, back_along, length - left, visit);
}

template <typename Visit>
void walk_grid(std::int64_t rows, std::int64_t cols, Visit visit) {
  const bool wide = cols >= rows;
  const GridCell along = wide ? GridCell{0, 1} : GridCell{1, 0};
  const GridCell across = wide ? GridCell{1, 0} : GridCell{0, 1};
  const std::int64_t length = wide ? cols : rows;
  const std::int64_t breadth = wide ? rows : cols;
  if (length % 2 == 0 || breadth % 2 != 0) {
    walk_block({0, 0}, along, length, across, breadth, visit);
    return;
  }
  // An odd length over an even breadth cannot end at the far corner without a diagonal step, but
  // nothing says that it must end there: the last, about square piece runs across instead.
  const std::int64_t tail = length < 2 * breadth ? length : breadth + 1;
  const std::int64_t head = length - tail;
  if (head > 0) walk_block({0, 0}, along, head, across, breadth, visit);
  walk_block({head * along.row, head * along.col}, across, breadth, along, tail, visit);
}

// Neighbouring runs of one row each, as a stretch of the curve that is one column wide has them,
// become progressions. Only whole runs of length one take part, so all longer runs stay contiguous.
std::vector<RowSet> merge_single_rows(const std::vector<RowSet>& runs) {
  std::vector<RowSet> merged;
  bool last_is_open = false;  // the last entry is made of single rows only
  for (const RowSet& run : runs) {
    if (run.count == 1 && last_is_open) {
      RowSet& last = merged.back();
      const std::int64_t gap = run.first - last.last();
      if (last.count == 1 || gap == last.stride) {
        last = {last.first, last.count + 1, gap};
        continue;
      }
    }
    merged.push_back(run);
    last_is_open = run.count == 1;
  }
  return merged;
}

std::int64_t ceil_sqrt(std::int64_t value) {
  // Bitwise, because a double does not hold every 64-bit integer.
  std::int64_t root = 0;
  for (std::int64_t bit = std::int64_t{1} << 31; bit > 0; bit >>= 1) {
    const std::int64_t candidate = root + bit;
    if (candidate <= (value - 1) / candidate) root = candidate;
  }
  return root + 1;  // `root` is the largest integer whose square is below `value`
}

}  // namespace

std::vector<GridCell> hilbert_curve(std::int64_t rows, std::int64_t cols) {
  std::vector<GridCell> cells;
  if (rows < 1 || cols < 1 || rows > static_cast<std::int64_t>(cells.max_size()) / cols) {
    throw ConfigError("hilbert_curve: the grid is " + std::to_string(rows) + " x " +
                      std::to_string(cols) +
                      ", expected at least one row and one column and a number of cells that fits "
                      "into memory");
  }
  cells.reserve(static_cast<std::size_t>(rows * cols));
  walk_grid(rows, cols, [&](GridCell cell) { cells.push_back(cell); });
  return cells;
}

Placement Placement::hilbert(std::int64_t tokens, int ranks, std::int64_t rows, std::int64_t cols) {
  check_counts("Placement::hilbert", tokens, ranks);
  if (rows == 0 && cols == 0) {
    cols = ceil_sqrt(tokens);
  } else if (rows < 1 || cols < 1) {
    throw ConfigError("Placement::hilbert: the grid is " + std::to_string(rows) + " x " +
                      std::to_string(cols) +
                      ", expected at least one row and one column, or 0 x 0 for the squarest grid");
  } else if (cols <= (tokens - 1) / rows) {  // rows * cols < tokens, without the product
    throw ConfigError("Placement::hilbert: the grid is " + std::to_string(rows) + " x " +
                      std::to_string(cols) + ", too few cells for " + std::to_string(tokens) +
                      " tokens: enlarge it, or pass 0 x 0 for the squarest grid that fits");
  }
  // Only the part of the grid that holds tokens is walked: a generous grid costs nothing, and at
  // most the last row has cells to skip.
  cols = std::min(cols, tokens);
  rows = (tokens - 1) / cols + 1;

  // The owner of every position first, then one pass in ascending order: linear, and each shard
  // comes out sorted.
  std::vector<int> owner(static_cast<std::size_t>(tokens));
  const std::int64_t base = tokens / ranks;
  const std::int64_t longer = tokens % ranks;
  int rank = 0;
  std::int64_t room = base + (longer > 0 ? 1 : 0);
  walk_grid(rows, cols, [&](GridCell cell) {
    const std::int64_t position = cell.row * cols + cell.col;
    if (position >= tokens) return;
    if (room == 0) {
      ++rank;
      room = base + (rank < longer ? 1 : 0);
    }
    --room;
    owner[static_cast<std::size_t>(position)] = rank;
  });

  std::vector<std::vector<RowSet>> ranges(static_cast<std::size_t>(ranks));
  for (std::int64_t position = 0; position < tokens; ++position) {
    std::vector<RowSet>& runs =
        ranges[static_cast<std::size_t>(owner[static_cast<std::size_t>(position)])];
    if (!runs.empty() && runs.back().last() + 1 == position) {
      ++runs.back().count;
    } else {
      runs.push_back({position, 1, 1});
    }
  }
  for (std::vector<RowSet>& runs : ranges) runs = merge_single_rows(runs);
  return {"hilbert", tokens, std::move(ranges)};
}

}  // namespace annulus
