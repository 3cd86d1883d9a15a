#include "kernels/kept_rows.h"

#include <algorithm>
#include <map>

#include "pattern/division.h"
#include "pattern/entry_groups.h"
#include "pattern/segments.h"
#include "plan/selected_rows.h"

namespace annulus {

KeptRows::KeptRows(const Pattern& pattern, const Placement& placement, int rank, std::int64_t batch)
    : branch_heads_(pattern.heads), batch_(batch) {
  const std::int64_t words = ceil_div(placement.local_tokens(rank), kWordTokens);
  // Rows are queries, so the number of keys does not matter.
  const std::int64_t tokens = placement.tokens();
  const std::size_t entry_heads = pattern.branches.size() * static_cast<std::size_t>(pattern.heads);
  if (pattern.by_entry()) entry_heads_ = static_cast<std::int64_t>(entry_heads);
  heads_.resize(entry_heads * static_cast<std::size_t>(pattern.by_entry() ? batch : 1));
  std::vector<std::int64_t> most_rows(entry_heads, 0);
  for (const EntryGroup& group : entry_groups(pattern)) {
    std::vector<Head> of_group;
    for (const Branch& branch : pattern.branches) {
      struct Bitmap {
        std::int64_t first_word = -1;
        std::int64_t rows = 0;
      };
      const Segments segments(group.documents, branch, tokens, tokens);
      std::map<std::int64_t, Bitmap> by_offset;
      for (const std::int64_t offset : branch.offset) {
        Bitmap& bitmap = by_offset[offset];
        if (offset >= 0 && bitmap.first_word < 0) {
          bitmap.first_word = static_cast<std::int64_t>(words_.size());
          bitmap.rows = add_bitmap({segments, Side::queries, branch.dilation, offset},
                                   placement.ranges(rank), words);
        }
        std::int64_t& most = most_rows[of_group.size()];
        most = std::max(most, bitmap.rows);
        of_group.push_back({0, bitmap.first_word});
      }
    }
    for (std::int64_t entry = group.entries.begin;
         entry < (pattern.by_entry() ? group.entries.end_in(batch) : 1); ++entry)
      std::ranges::copy(of_group, heads_.begin() + entry * entry_heads_);
  }
  for (std::size_t i = 0; i < heads_.size(); ++i) {
    const std::size_t head = i % entry_heads;
    if (i == head) batch_rows_ += most_rows[head];
    heads_[i].first = i == head ? batch_rows_ - most_rows[head] : heads_[head].first;
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
