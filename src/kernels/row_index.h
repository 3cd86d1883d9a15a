#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

// Rows of a segment by index: the selected rows of a segment are numbered 0, 1, ... On every
// device, bands, gaps and weights of pairs are in terms of this index.
namespace annulus {

// The tokens of a segment's rows.
struct IndexTokens {
  std::int64_t first_query = 0;  // of index 0
  std::int64_t first_key = 0;
  std::int64_t step = 1;

  [[nodiscard]] constexpr std::int64_t query(std::int32_t index) const {
    return first_query + step * index;
  }
  [[nodiscard]] constexpr std::int64_t key(std::int32_t index) const {
    return first_key + step * index;
  }
};

// Indices that a list of rows skips.
struct IndexGap {
  std::int32_t begin = 0;
  std::int32_t end = 0;

  [[nodiscard]] std::int32_t rows() const { return end - begin; }
};

// Evenly spaced rows of a tile group, for all of its heads.
struct RunTemplate {
  int parcel = -1;  // < 0: the local shard
  std::int64_t store_first = 0;
  std::int64_t store_stride = 1;
  std::int32_t index = 0;  // within the segment's progression
  std::int32_t index_stride = 1;
  std::int32_t count = 0;
  // For query rows in forward with detached mixing: the rank of the first row among the kept rows
  // of its branch and head. The other rows have the next ranks, because rows between them are not
  // selected.
  std::int32_t kept = 0;

  [[nodiscard]] std::int32_t last_index() const { return index + (count - 1) * index_stride; }
};

// Selects the rows with begin <= index < end, except gap.begin <= index < gap.end.
struct IndexFilter {
  std::int32_t begin = 0;
  std::int32_t end = std::numeric_limits<std::int32_t>::max();
  IndexGap gap;

  [[nodiscard]] bool keeps_all() const {
    return begin == 0 && end == std::numeric_limits<std::int32_t>::max() && gap.rows() == 0;
  }
  // Calls use(first row, rows) for each of the at most two stretches of selected rows of `run`.
  template <typename Use>
  void apply(const RunTemplate& run, const Use& use) const {
    const auto row = [&](std::int32_t index) {  // the first row at or after `index`
      if (index <= run.index) return 0;
      const std::int64_t steps =
          (static_cast<std::int64_t>(index) - run.index + run.index_stride - 1) / run.index_stride;
      return static_cast<std::int32_t>(std::min<std::int64_t>(run.count, steps));
    };
    const auto stretch = [&](std::int32_t first, std::int32_t last) {
      if (first < last) use(first, last - first);
    };
    if (gap.rows() == 0) {
      stretch(row(begin), row(end));
    } else {
      stretch(row(begin), row(std::min(end, gap.begin)));
      stretch(row(std::max(begin, gap.end)), row(end));
    }
  }
};

}  // namespace annulus
