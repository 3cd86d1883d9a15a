#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "annulus/pattern.h"
#include "annulus/placement.h"

namespace annulus {

struct SelectedRows;

// Indices of the rows of single branches in `BranchOutputs`, which has only rows that the branch
// selects. The rows of one branch and head are contiguous, in the order of the shard's tokens:
//
//   row = batch * batch_rows() + first(branch, head) + rank of the token
//
// The rank of a token is the number of earlier tokens of the shard that the branch selects for this
// head. It comes from a bitmap with counts, shared by all heads of a branch with the same offset in
// all batch entries with the same documents: a quarter of a byte per token. Entries with documents
// of their own may select fewer rows than batch_rows(), which is enough for any of them. Tables are
// plain memory that a device can copy.
class KeptRows {
 public:
  static constexpr std::int64_t kWordTokens = 64;
  struct Word {
    std::uint64_t selected = 0;  // bit i: token i of these 64
    std::int64_t before = 0;     // selected tokens of all earlier words
  };

  KeptRows(const Pattern& pattern, const Placement& placement, int rank, std::int64_t batch);

  [[nodiscard]] std::int64_t rows() const { return batch_ * batch_rows_; }
  [[nodiscard]] std::int64_t batch_rows() const { return batch_rows_; }
  // The same for every batch entry.
  [[nodiscard]] std::int64_t first(int branch, int head) const { return of(branch, 0, head).first; }
  // For heads that are in the branch. The token need not be selected.
  [[nodiscard]] std::int64_t rank(int branch, std::int64_t batch, int head,
                                  std::int64_t token) const {
    const Word& word = word_of(of(branch, batch, head), token);
    return word.before + std::popcount(word.selected & (bit_of(token) - 1));
  }
  // -1: the branch does not select the token.
  [[nodiscard]] std::int64_t row(int branch, std::int64_t batch, int head,
                                 std::int64_t token) const {
    const Head& kept = of(branch, batch, head);
    if (kept.first_word < 0) return -1;
    const Word& word = word_of(kept, token);
    const std::uint64_t bit = bit_of(token);
    if ((word.selected & bit) == 0) return -1;
    return batch * batch_rows_ + kept.first + word.before +
           std::popcount(word.selected & (bit - 1));
  }

  // The tables: words of all bitmaps, and first row and first word of each [batch entry][branch]
  // [head]. If all entries have the same documents, there is only one entry in the table.
  struct Head {
    std::int64_t first = 0;
    std::int64_t first_word = -1;  // -1: the head is not in the branch
  };
  [[nodiscard]] const std::vector<Word>& words() const { return words_; }
  [[nodiscard]] const std::vector<Head>& heads() const { return heads_; }
  [[nodiscard]] std::int64_t entry_heads() const { return entry_heads_; }  // 0: there is one
  [[nodiscard]] std::int64_t bytes() const;

 private:
  [[nodiscard]] const Head& of(int branch, std::int64_t batch, int head) const {
    return heads_[static_cast<std::size_t>(batch * entry_heads_ +
                                           std::int64_t{branch} * branch_heads_ + head)];
  }
  [[nodiscard]] const Word& word_of(const Head& head, std::int64_t token) const {
    return words_[static_cast<std::size_t>(head.first_word + token / kWordTokens)];
  }
  [[nodiscard]] static std::uint64_t bit_of(std::int64_t token) {
    return std::uint64_t{1} << (token % kWordTokens);
  }
  // Returns the number of selected tokens.
  std::int64_t add_bitmap(const SelectedRows& selected, std::span<const RowSet> ranges,
                          std::int64_t words);

  int branch_heads_;
  std::int64_t entry_heads_ = 0;
  std::int64_t batch_;
  std::int64_t batch_rows_ = 0;
  std::vector<Head> heads_;
  std::vector<Word> words_;
};

}  // namespace annulus
