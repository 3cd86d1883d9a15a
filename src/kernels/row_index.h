#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

// Rows of a segment by their index: the row's number within the segment's progression (first row
// selected = 0). Bands, gaps and weights of pairs go by it, on every device.
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

// Indices that a list of rows jumps over.
struct IndexGap {
  std::int32_t begin = 0;
  std::int32_t end = 0;

  [[nodiscard]] std::int32_t rows() const { return end - begin; }
};

// Rows of a tile group as the kernels see them, for no head in particular yet.
struct RunTemplate {
  int parcel = -1;  // < 0: the local shard
  std::int64_t store_first = 0;
  std::int64_t store_stride = 1;
  std::int32_t index = 0;  // within the segment's progression
  std::int32_t index_stride = 1;
  std::int32_t count = 0;
  // Forward's query rows where branches are kept apart: the first one's rank among the kept rows of
  // its branch and head. Those of the others follow: what lies between is not selected.
  std::int32_t kept = 0;

  [[nodiscard]] std::int32_t last_index() const { return index + (count - 1) * index_stride; }
};

// Which rows of a list count: those with begin <= index < end, except gap.begin <= index < gap.end.
struct IndexFilter {
  std::int32_t begin = 0;
  std::int32_t end = std::numeric_limits<std::int32_t>::max();
  IndexGap gap;

  [[nodiscard]] bool keeps_all() const {
    return begin == 0 && end == std::numeric_limits<std::int32_t>::max() && gap.rows() == 0;
  }
  // Calls use(first row, rows) for each of the at most two stretches of `run` that count.
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
