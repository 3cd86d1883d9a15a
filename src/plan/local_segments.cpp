#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "annulus/plan.h"
#include "plan/selected_rows.h"

namespace annulus {
namespace {

// Segments [first, end) that lie in one range of a shard as a whole.
struct WholeSegments {
  std::int64_t first = 0;
  std::int64_t end = 0;
  std::int64_t to_local = 0;  // local row minus position
};

std::vector<WholeSegments> whole_segments(std::span<const RowSet> ranges, const SelectedRows& all) {
  std::vector<WholeSegments> whole;
  std::int64_t local = 0;
  for (const RowSet& range : ranges) {
    if (range.count == 0) continue;
    const auto [first, end] = Crossing(range, all).whole_segments();
    if (first < end) whole.push_back({first, end, local - range.first});
    local += range.count;
  }
  std::sort(whole.begin(), whole.end(),
            [](const auto& a, const auto& b) { return a.first < b.first; });
  return whole;
}

std::int64_t length_of(const SelectedRows& side, std::int64_t segment) {
  return side.segment_end(segment) - side.segment_begin(segment);
}

}  // namespace

std::vector<SegmentRun> Plan::local_segments() const {
  std::vector<SegmentRun> runs;
  for (std::size_t b = 0; b < pattern().branches.size(); ++b) {
    // Offset and dilation do not matter: a whole segment has all of its positions here.
    const Branch every{pattern().branches[b].segment_length, 1, {}};
    const SelectedRows queries(every, 0, query_placement().tokens());
    const SelectedRows keys(every, 0, key_placement().tokens());
    const auto query_whole = whole_segments(query_placement().ranges(rank_), queries);
    const auto key_whole = whole_segments(key_placement().ranges(rank_), keys);
    const auto add = [&](const WholeSegments& q, const WholeSegments& k, std::int64_t first,
                         std::int64_t end) {
      const std::int64_t length = length_of(queries, first);
      if (first >= end || length != length_of(keys, first)) return;
      const std::int64_t begin = queries.segment_begin(first);
      runs.push_back({static_cast<int>(b), first, end - first, length, begin + q.to_local,
                      begin + k.to_local});
    };
    for (std::size_t i = 0, j = 0; i < query_whole.size() && j < key_whole.size();) {
      const WholeSegments& q = query_whole[i];
      const WholeSegments& k = key_whole[j];
      const std::int64_t first = std::max(q.first, k.first);
      const std::int64_t end = std::min(q.end, k.end);
      if (first < end) {
        // The last segment of a side may be ragged: it makes a run of its own.
        add(q, k, first, end - 1);
        const bool uniform = !runs.empty() && runs.back().branch == static_cast<int>(b) &&
                             runs.back().first_segment == first && end - first > 1 &&
                             runs.back().length == length_of(queries, end - 1) &&
                             runs.back().length == length_of(keys, end - 1);
        if (uniform) {
          ++runs.back().segments;
        } else {
          add(q, k, end - 1, end);
        }
      }
      ++(q.end < k.end ? i : j);
    }
  }
  return runs;
}

}  // namespace annulus
