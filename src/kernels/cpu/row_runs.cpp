#include "kernels/cpu/row_runs.h"

#include <algorithm>
#include <cstddef>
#include <limits>

#include "annulus/row_set.h"

namespace annulus::cpu {

void keep_rows(std::vector<RowRun>& runs, const Stretch& indices) {
  std::size_t kept = 0;
  for (RowRun run : runs) {
    const RowSet all{run.index, run.count, run.index_stride};
    const RowSet rows = clip(all, indices.first, indices.last + 1);
    if (rows.count == 0) continue;
    const auto skip = static_cast<std::int32_t>((rows.first - all.first) / all.stride);
    for (std::size_t c = 0; c < run.base.size(); ++c) run.base[c] += run.step[c] * skip;
    run.index = static_cast<std::int32_t>(rows.first);
    run.count = static_cast<std::int32_t>(rows.count);
    runs[kept++] = run;
  }
  runs.resize(kept);
  sort_by_index(runs);
}

void sort_by_index(std::vector<RowRun>& runs) {
  std::sort(runs.begin(), runs.end(),
            [](const RowRun& a, const RowRun& b) { return a.index < b.index; });
}

Stretch index_span(const std::vector<RowRun>& runs, std::int64_t begin, std::int64_t end) {
  Stretch span{std::numeric_limits<std::int32_t>::max(), -1};
  std::int64_t row = 0;
  for (const RowRun& run : runs) {
    const std::int64_t first = std::max<std::int64_t>(0, begin - row);
    const std::int64_t last = std::min<std::int64_t>(run.count, end - row) - 1;
    if (first <= last) {
      span.first = std::min(span.first, run.index + first * run.index_stride);
      span.last = std::max(span.last, run.index + last * run.index_stride);
    }
    row += run.count;
  }
  return span;
}

std::int64_t row_count(const std::vector<RowRun>& runs) {
  std::int64_t rows = 0;
  for (const RowRun& run : runs) rows += run.count;
  return rows;
}

}  // namespace annulus::cpu
