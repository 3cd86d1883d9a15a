#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "annulus/row_set.h"

namespace annulus {

struct Pattern;

// Which rank holds which tokens, and in which order. A rank's local token i is the i-th position of
// its ranges, taken range by range. Every token is held by exactly one rank. Results never depend
// on the placement. An immutable value whose copies share their data: copying costs nothing.
class Placement {
 public:
  // Neighbouring tokens stay together. Shard sizes are multiples of `align` (except the last one
  // that holds tokens) and differ by at most `align`, so that segments of a length that divides
  // `align` stay local.
  [[nodiscard]] static Placement contiguous(std::int64_t tokens, int ranks, std::int64_t align = 1);
  // 2P chunks; rank r holds chunks r and 2P-1-r: causal work is balanced.
  [[nodiscard]] static Placement zigzag(std::int64_t tokens, int ranks);
  // Token t lives on rank t mod P.
  [[nodiscard]] static Placement striped(std::int64_t tokens, int ranks);
  // Tokens are the cells of a rows x cols grid in row-major order (the last row may be ragged); a
  // rank holds the cells of one stretch of a Hilbert curve over the grid, stored in ascending
  // position. rows = cols = 0: the squarest grid.
  [[nodiscard]] static Placement hilbert(std::int64_t tokens, int ranks, std::int64_t rows = 0,
                                         std::int64_t cols = 0);
  // Equal shares of the tokens, in as few stretches per rank (1 to 16) as give every rank nearly
  // equal shares of the pattern's allowed pairs, by query: zigzag for plain causal attention, and
  // as balanced for packed documents and padding.
  [[nodiscard]] static Placement balanced(const Pattern& pattern, std::int64_t tokens, int ranks);
  // Anything else: ranges[r] are the positions of rank r in storage order. `name` is for messages.
  [[nodiscard]] static Placement explicit_ranges(std::int64_t tokens,
                                                 std::vector<std::vector<RowSet>> ranges,
                                                 std::string name = "explicit");
  // "contiguous", "zigzag", "striped" or "hilbert"; ConfigError on anything else.
  [[nodiscard]] static Placement named(const std::string& name, std::int64_t tokens, int ranks);

  [[nodiscard]] const std::string& name() const { return data_->name; }
  [[nodiscard]] std::int64_t tokens() const { return data_->tokens; }
  [[nodiscard]] int ranks() const { return static_cast<int>(data_->ranges.size()); }
  [[nodiscard]] std::span<const RowSet> ranges(int rank) const {
    return data_->ranges[static_cast<std::size_t>(rank)];
  }
  [[nodiscard]] std::int64_t local_tokens(int rank) const {
    return data_->local_tokens[static_cast<std::size_t>(rank)];
  }
  // Whether one is a copy of the other. Placements that were made separately are never the same,
  // even if they place all tokens alike.
  [[nodiscard]] bool same_as(const Placement& other) const { return data_ == other.data_; }
  // Global position of a rank's local token, for example for rotary embeddings.
  [[nodiscard]] std::int64_t position(int rank, std::int64_t local) const;
  [[nodiscard]] std::vector<std::int64_t> positions(int rank) const;

 private:
  Placement(std::string name, std::int64_t tokens, std::vector<std::vector<RowSet>> ranges);
  static void check_counts(const char* where, std::int64_t tokens, std::int64_t ranks);

  struct Data {
    std::string name;
    std::int64_t tokens = 0;
    std::vector<std::vector<RowSet>> ranges;  // no empty row sets
    std::vector<std::int64_t> local_tokens;
    std::vector<std::vector<std::int64_t>> range_begins;  // local token at which a range begins
  };
  std::shared_ptr<const Data> data_;
};

struct GridCell {
  std::int64_t row = 0;
  std::int64_t col = 0;
};

// The cells of a rows x cols grid along a Hilbert curve that starts at (0, 0). On 2^k x 2^k grids
// it is the classical curve up to symmetry, on any other rectangle a generalised one. Every step
// goes to one of the four neighbours, on every rectangle: there are no diagonal steps. It ends at
// the other end of the longer side, except where that side is odd and the other even: parity rules
// that corner out, and the curve ends somewhere on the opposite long side.
[[nodiscard]] std::vector<GridCell> hilbert_curve(std::int64_t rows, std::int64_t cols);

}  // namespace annulus
