#include "kernels/cuda/work/lists.h"

#include <algorithm>
#include <limits>

namespace annulus::cuda {
namespace {

// Number of rows of the run with an index of at most `last`.
std::int64_t rows_up_to(const Run& run, std::int64_t last) {
  if (last < run.index) return 0;
  return std::min<std::int64_t>(run.count, (last - run.index) / run.index_stride + 1);
}

// Number of rows of an ascending list with an index of at most `last`.
std::int64_t rows_up_to(std::span<const Run> runs, std::int64_t last) {
  const auto behind =
      std::upper_bound(runs.begin(), runs.end(), last,
                       [](std::int64_t index, const Run& run) { return index < run.index; });
  if (behind == runs.begin()) return 0;
  const Run& run = *(behind - 1);
  return run.before + rows_up_to(run, last);
}

bool meet(const Stretch& a, const Stretch& b) { return a.first <= b.last && b.first <= a.last; }

}  // namespace

std::span<const Run> runs_from(const Tables& tables, const RowList& list, std::int32_t row) {
  const std::span<const Run> runs = runs_of(tables, list);
  const auto first =
      std::upper_bound(runs.begin(), runs.end(), row,
                       [](std::int32_t of, const Run& run) { return of < run.before + run.count; });
  return {first, runs.end()};
}

Stretch indices_of(const Tables& tables, const RowList& list, std::int32_t begin,
                   std::int32_t rows) {
  if (list.ascending != 0 && begin == 0 && rows == list.rows) {
    const std::span<const Run> runs = runs_of(tables, list);
    const Run& last = runs.back();
    return {runs.front().index, last.index + (last.count - 1) * std::int64_t{last.index_stride}};
  }
  Stretch out{std::numeric_limits<std::int64_t>::max(), std::numeric_limits<std::int64_t>::min()};
  for (const Run& run : runs_from(tables, list, begin)) {
    if (run.before >= begin + rows) break;
    const std::int64_t first = std::max(0, begin - run.before);
    const std::int64_t last = std::min(run.count, begin + rows - run.before) - 1;
    out.first = std::min(out.first, run.index + first * run.index_stride);
    out.last = std::max(out.last, run.index + last * run.index_stride);
  }
  return out;
}

Stretch indices_of(const Tables& tables, const RowList& list) {
  return indices_of(tables, list, 0, list.rows);
}

std::int64_t count_rows(const Tables& tables, const RowList& list, const Stretch& indices) {
  if (indices.first > indices.last) return 0;
  const std::span<const Run> runs = runs_of(tables, list);
  if (list.ascending != 0)
    return rows_up_to(runs, indices.last) - rows_up_to(runs, indices.first - 1);
  std::int64_t rows = 0;
  for (const Run& run : runs)
    rows += rows_up_to(run, indices.last) - rows_up_to(run, indices.first - 1);
  return rows;
}

std::int64_t count_tiles(const Tables& tables, const RowList& list, const Stretch& indices,
                         int tile) {
  if (list.ascending != 0) {
    const std::span<const Run> runs = runs_of(tables, list);
    const std::int64_t begin = rows_up_to(runs, indices.first - 1);
    const std::int64_t end = rows_up_to(runs, indices.last);
    return begin < end ? (end - 1) / tile - begin / tile + 1 : 0;
  }
  std::int64_t tiles = 0;
  for (std::int32_t begin = 0; begin < list.rows; begin += tile) {
    const std::int32_t rows = std::min<std::int32_t>(tile, list.rows - begin);
    tiles += meet(indices_of(tables, list, begin, rows), indices) ? 1 : 0;
  }
  return tiles;
}

}  // namespace annulus::cuda
