#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "annulus/error.h"
#include "annulus/placement.h"

namespace annulus {
namespace {

// An even cut near the middle, as the parity argument below needs. A side of 2 has none.
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
// The depth of the recursion is logarithmic: every cut halves a side, up to rounding. A block that
// `walker.take` accepts as a whole is not walked: whole blocks of one rank cost nothing.
template <typename Walker>
void walk_block(GridCell corner, GridCell along, std::int64_t length, GridCell across,
                std::int64_t breadth, Walker& walker) {
  const auto at = [&](std::int64_t i, std::int64_t j) -> GridCell {
    return {corner.row + i * along.row + j * across.row,
            corner.col + i * along.col + j * across.col};
  };
  if (walker.take(corner, at(length - 1, breadth - 1))) return;
  if (breadth == 1) {
    const std::int64_t half = length / 2;
    walk_block(corner, along, half, across, 1, walker);
    walk_block(at(half, 0), along, length - half, across, 1, walker);
    return;
  }
  if (2 * length > 3 * breadth) {
    const std::int64_t cut = even_half(length);
    walk_block(corner, along, cut, across, breadth, walker);
    walk_block(at(cut, 0), along, length - cut, across, breadth, walker);
    return;
  }
  // Out along `across` on the near part, over the whole length, and back: on a square of side 2^k
  // the middle piece is cut in two next, which gives the four quadrants of the classical curve.
  const std::int64_t near = even_half(breadth);
  const std::int64_t left = length / 2;
  const GridCell back_along{-along.row, -along.col};
  const GridCell back_across{-across.row, -across.col};
  walk_block(corner, across, near, along, left, walker);
  walk_block(at(0, near), along, length, across, breadth - near, walker);
  walk_block(at(length - 1, near - 1), back_across, near, back_along, length - left, walker);
}

template <typename Walker>
void walk_grid(std::int64_t rows, std::int64_t cols, Walker& walker) {
  const bool wide = cols >= rows;
  const GridCell along = wide ? GridCell{0, 1} : GridCell{1, 0};
  const GridCell across = wide ? GridCell{1, 0} : GridCell{0, 1};
  const std::int64_t length = wide ? cols : rows;
  const std::int64_t breadth = wide ? rows : cols;
  if (length % 2 == 0 || breadth % 2 != 0) {
    walk_block({0, 0}, along, length, across, breadth, walker);
    return;
  }
  // An odd length over an even breadth cannot end at the far corner without a diagonal step, but
  // nothing says that it must end there: the last, about square piece runs across instead.
  const std::int64_t tail = length < 2 * breadth ? length : breadth + 1;
  const std::int64_t head = length - tail;
  if (head > 0) walk_block({0, 0}, along, head, across, breadth, walker);
  walk_block({head * along.row, head * along.col}, across, breadth, along, tail, walker);
}

// Merges neighbouring runs of one row each, which occur where the curve is one column wide, into
// progressions. Only whole runs of length one take part, so longer runs stay contiguous.
std::vector<RowSet> merge_single_rows(const std::vector<RowSet>& runs) {
  std::vector<RowSet> merged;
  bool last_is_open = false;  // true if the last entry consists of single rows only
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

// Walks single cells: the curve itself.
class CurveWalker {
 public:
  explicit CurveWalker(std::vector<GridCell>& cells) : cells_(&cells) {}

  bool take(GridCell first, GridCell last) {
    if (first.row != last.row || first.col != last.col) return false;
    cells_->push_back(first);
    return true;
  }

 private:
  std::vector<GridCell>* cells_;
};

// Deals the curve out to the ranks in stretches, in blocks as large as the owner's remaining room.
// The cost depends on the outlines of the shards, not on the number of tokens.
class ShardWalker {
 public:
  ShardWalker(std::int64_t tokens, std::int64_t rows, std::int64_t cols, int ranks)
      : tokens_(tokens),
        rows_(rows),
        cols_(cols),
        longer_(tokens % ranks),
        base_(tokens / ranks),
        room_(base_ + (longer_ > 0 ? 1 : 0)),
        runs_(static_cast<std::size_t>(ranks)) {}

  bool take(GridCell first, GridCell last) {
    const std::int64_t top = std::min(first.row, last.row);
    const std::int64_t bottom = std::max(first.row, last.row);
    const std::int64_t left = std::min(first.col, last.col);
    const std::int64_t right = std::max(first.col, last.col);
    std::int64_t held = (bottom - top + 1) * (right - left + 1);
    if (bottom == rows_ - 1) {  // the last row of the grid may be ragged
      const std::int64_t filled = tokens_ - bottom * cols_;
      held -= std::max<std::int64_t>(0, right + 1 - std::max(left, filled));
    }
    if (held == 0) return true;
    if (room_ == 0) {
      ++rank_;
      room_ = base_ + (rank_ < longer_ ? 1 : 0);
    }
    if (held > room_) return false;
    room_ -= held;
    for (std::int64_t row = top; row <= bottom; ++row) {
      const std::int64_t begin = row * cols_ + left;
      const std::int64_t end = std::min(tokens_, row * cols_ + right + 1);
      if (begin < end) runs_[static_cast<std::size_t>(rank_)].push_back({begin, end - begin, 1});
    }
    return true;
  }

  // Every rank's positions, ascending, in runs as long as possible.
  std::vector<std::vector<RowSet>> take_runs() {
    for (std::vector<RowSet>& runs : runs_) {
      std::sort(runs.begin(), runs.end(),
                [](const RowSet& a, const RowSet& b) { return a.first < b.first; });
      std::size_t kept = 0;
      for (const RowSet& run : runs) {
        if (kept > 0 && runs[kept - 1].last() + 1 == run.first) {
          runs[kept - 1].count += run.count;
        } else {
          runs[kept++] = run;
        }
      }
      runs.resize(kept);
    }
    return std::move(runs_);
  }

 private:
  std::int64_t tokens_;
  std::int64_t rows_;
  std::int64_t cols_;
  std::int64_t longer_;  // ranks that hold one token more
  std::int64_t base_;
  int rank_ = 0;
  std::int64_t room_;  // of the current rank
  std::vector<std::vector<RowSet>> runs_;
};

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
  CurveWalker walker(cells);
  walk_grid(rows, cols, walker);
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
  // Walk only the part of the grid that holds tokens, so that a larger grid costs nothing. At most
  // the last row has cells to skip.
  cols = std::min(cols, tokens);
  rows = (tokens - 1) / cols + 1;

  ShardWalker walker(tokens, rows, cols, ranks);
  walk_grid(rows, cols, walker);
  std::vector<std::vector<RowSet>> ranges = walker.take_runs();
  for (std::vector<RowSet>& runs : ranges) runs = merge_single_rows(runs);
  return {"hilbert", tokens, std::move(ranges)};
}

}  // namespace annulus
