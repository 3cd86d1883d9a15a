#include "kernels/kept_rows.h"

#include <map>

#include "pattern/division.h"
#include "pattern/segments.h"
#include "plan/selected_rows.h"

namespace annulus {

KeptRows::KeptRows(const Pattern& pattern, const Placement& placement, int rank, std::int64_t batch)
    : branch_heads_(pattern.heads),
      batch_(batch),
      heads_(pattern.branches.size() * static_cast<std::size_t>(pattern.heads)) {
  const std::int64_t words = ceil_div(placement.local_tokens(rank), kWordTokens);
  // Rows are queries, so the number of keys does not matter.
  const std::int64_t tokens = placement.tokens();
  Head* head = heads_.data();
  for (const Branch& branch : pattern.branches) {
    struct Bitmap {
      std::int64_t first_word = 0;
      std::int64_t rows = 0;
    };
    const Segments segments(pattern, branch, tokens, tokens);
    std::map<std::int64_t, Bitmap> by_offset;
    for (const std::int64_t offset : branch.offset) {
      head->first = batch_rows_;
      if (offset >= 0) {
        const auto [found, is_new] = by_offset.try_emplace(offset);
        Bitmap& bitmap = found->second;
        if (is_new) {
          bitmap.first_word = static_cast<std::int64_t>(words_.size());
          bitmap.rows = add_bitmap({segments, Side::queries, branch.dilation, offset},
                                   placement.ranges(rank), words);
        }
        head->first_word = bitmap.first_word;
        batch_rows_ += bitmap.rows;
      }
      ++head;
    }
  }
  words_.shrink_to_fit();
}

std::int64_t KeptRows::add_bitmap(const SelectedRows& selected, std::span<const RowSet> ranges,
                                  std::int64_t words) {
  const std::size_t begin = words_.size();
  words_.resize(begin + static_cast<std::size_t>(words));
  std::int64_t first_token = 0;
  for (const RowSet& range : ranges) {
    const Crossing crossing(range, selected);
    for (std::int64_t s = crossing.first_segment(); s < crossing.end_segment(); ++s) {
      const RowSet elements = crossing.in_segment(s).elements;
      for (std::int64_t i = 0; i < elements.count; ++i) {
        const std::int64_t token = first_token + elements[i];
        words_[begin + static_cast<std::size_t>(token / kWordTokens)].selected |=
            std::uint64_t{1} << (token % kWordTokens);
      }
    }
    first_token += range.count;
  }
  std::int64_t rows = 0;
  for (std::size_t w = begin; w < words_.size(); ++w) {
    words_[w].before = rows;
    rows += std::popcount(words_[w].selected);
  }
  return rows;
}

std::int64_t KeptRows::bytes() const {
  return static_cast<std::int64_t>(heads_.capacity() * sizeof(Head) +
                                   words_.capacity() * sizeof(Word));
}

}  // namespace annulus
