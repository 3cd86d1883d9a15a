#include "plan/row_partition.h"

#include <algorithm>
#include <cstddef>
#include <functional>
#include <map>
#include <utility>

namespace annulus {
namespace {

// Smallest prime factor of n >= 2.
std::int64_t smallest_factor(std::int64_t n) {
  for (std::int64_t p = 2; p * p <= n; ++p) {
    if (n % p == 0) return p;
  }
  return n;
}

// Every q-th row of `rows`, starting with row j.
RowSet every(const RowSet& rows, std::int64_t q, std::int64_t j) {
  return {rows[j], j < rows.count ? (rows.count - j - 1) / q + 1 : 0, rows.stride * q};
}

// emit(RowSet) gets disjoint, non-empty row sets that together are `whole` without `part`, a
// progression inside it.
template <typename Emit>
void subtract(const RowSet& whole, const RowSet& part, Emit emit) {
  const auto run = [&](std::int64_t from, std::int64_t to) {  // rows [from, to) of the whole
    if (from < to) emit(RowSet{whole[from], to - from, whole.stride});
  };
  const std::int64_t first = (part.first - whole.first) / whole.stride;
  const std::int64_t q = part.count > 1 ? part.stride / whole.stride : 1;
  const std::int64_t last = first + (part.count - 1) * q;
  if (q == 1) {
    run(0, first);
    run(last + 1, whole.count);
    return;
  }
  std::int64_t residues = 0;  // number of row sets after the split by residues below
  for (std::int64_t rest = q; rest > 1;) {
    const std::int64_t p = smallest_factor(rest);
    residues += p - 1;
    rest /= p;
  }
  if (part.count + 1 <= residues) {
    for (std::int64_t i = 0, from = 0; i <= part.count; ++i) {
      run(from, i < part.count ? first + i * q : whole.count);
      from = first + i * q + 1;
    }
    return;
  }
  // One prime factor of q at a time: dropping 1 row in 16 leaves row sets of strides 2, 4, 8 and
  // 16, not fifteen of stride 16.
  const std::int64_t begin = std::max<std::int64_t>(0, first - q + 1);
  const std::int64_t end = std::min(whole.count, last + q);
  run(0, begin);
  RowSet rest{whole[begin], end - begin, whole.stride};
  for (std::int64_t factor = q, residue = first - begin; factor > 1;) {
    const std::int64_t p = smallest_factor(factor);
    for (std::int64_t j = 0; j < p && j < rest.count; ++j) {
      if (j != residue % p) emit(every(rest, p, j));
    }
    rest = every(rest, p, residue % p);
    residue /= p;
    factor /= p;
  }
  run(end, whole.count);
}

}  // namespace

void join_interleaved(std::vector<RowSet>& sets) {
  std::map<std::int64_t, std::vector<RowSet>, std::greater<>> by_stride;
  for (const RowSet& rows : sets) by_stride[rows.stride].push_back(rows);
  sets.clear();
  const auto by_first = [](const RowSet& a, const RowSet& b) { return a.first < b.first; };
  // Joining only adds smaller strides, which come later in this order.
  for (auto& [stride, same] : by_stride) {
    std::sort(same.begin(), same.end(), by_first);
    for (std::int64_t rest = stride; rest > 1 && same.size() > 1;) {
      const std::int64_t p = smallest_factor(rest);
      while (rest % p == 0) rest /= p;
      const std::int64_t finer = stride / p;
      for (RowSet& leader : same) {
        RowSet joined{leader.first, leader.count, finer};
        std::vector<RowSet*> others;
        for (std::int64_t j = 1; j < p && leader.count > 0; ++j) {
          const auto next = std::lower_bound(same.begin(), same.end(),
                                             RowSet{leader.first + j * finer, 0, 1}, by_first);
          if (next == same.end() || next->first != leader.first + j * finer || next->count == 0 ||
              next->count > leader.count || next->count + 1 < leader.count) {
            break;
          }
          joined.count += next->count;
          others.push_back(&*next);
        }
        if (leader.count == 0 || static_cast<std::int64_t>(others.size()) + 1 < p) continue;
        // Counts must be equal up to some row set and one less after it. Otherwise rows are missing
        // in between.
        if (!std::is_sorted(others.rbegin(), others.rend(),
                            [](const RowSet* a, const RowSet* b) { return a->count < b->count; })) {
          continue;
        }
        by_stride[finer].push_back(joined);
        leader.count = 0;  // joined; its position stays for the search
        for (RowSet* other : others) other->count = 0;
      }
      std::erase_if(same, [](const RowSet& rows) { return rows.count == 0; });
    }
    sets.insert(sets.end(), same.begin(), same.end());
  }
}

void join_single_rows(std::vector<RowSet>& sets) {
  std::sort(sets.begin(), sets.end(),
            [](const RowSet& a, const RowSet& b) { return a.first < b.first; });
  const auto others =
      std::stable_partition(sets.begin(), sets.end(), [](const RowSet& r) { return r.count == 1; });
  std::vector<RowSet> joined;
  for (auto it = sets.begin(); it != others; ++it) {
    RowSet* last = joined.empty() ? nullptr : &joined.back();
    if (last != nullptr && last->count == 1) last->stride = it->first - last->first;
    if (last != nullptr && it->first == last->last() + last->stride) {
      ++last->count;
    } else {
      joined.push_back({it->first, 1, 1});
    }
  }
  joined.insert(joined.end(), others, sets.end());
  std::swap(sets, joined);
}

void RowPartition::add(const RowSet& rows, int needed_by) {
  if (rows.count == 0) return;
  rest_.assign(1, rows);  // the part of `rows` that is in no piece yet
  const std::size_t old_pieces = pieces_.size();
  for (std::size_t i = 0; i < old_pieces && !rest_.empty(); ++i) {
    const LabelledRows piece = pieces_[i];
    const RowSet common = intersect(piece.rows, rows);
    if (common.count == 0) continue;
    const int both = sets_->unite(piece.needed_by, needed_by);
    if (both != piece.needed_by) {
      pieces_[i] = {common, both};
      subtract(piece.rows, common, [&](const RowSet& r) {
        pieces_.push_back({r, piece.needed_by});
      });
    }
    next_rest_.clear();
    for (const RowSet& part : rest_) {
      const RowSet gone = intersect(part, common);
      if (gone.count == 0) {
        next_rest_.push_back(part);
      } else {
        subtract(part, gone, [&](const RowSet& r) { next_rest_.push_back(r); });
      }
    }
    std::swap(rest_, next_rest_);
  }
  for (const RowSet& part : rest_) pieces_.push_back({part, needed_by});
}

void RowPartition::join() {
  if (pieces_.size() < 2) return;
  std::stable_sort(
      pieces_.begin(), pieces_.end(),
      [](const LabelledRows& a, const LabelledRows& b) { return a.needed_by < b.needed_by; });
  next_pieces_.clear();
  for (std::size_t i = 0, end = 0; i < pieces_.size(); i = end) {
    const int label = pieces_[i].needed_by;
    rest_.clear();
    for (end = i; end < pieces_.size() && pieces_[end].needed_by == label; ++end) {
      rest_.push_back(pieces_[end].rows);
    }
    if (rest_.size() > 1) join_interleaved(rest_);
    for (const RowSet& rows : rest_) next_pieces_.push_back({rows, label});
  }
  std::swap(pieces_, next_pieces_);
}

}  // namespace annulus
