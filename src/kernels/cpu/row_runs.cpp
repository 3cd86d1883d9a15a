#include "kernels/cpu/row_runs.h"

namespace annulus::cpu {

void drop_keys_after(std::vector<RowRun>& keys, std::int32_t last_query) {
  std::size_t kept = 0;
  for (RowRun run : keys) {
    if (run.index > last_query) continue;
    run.count = std::min(run.count, (last_query - run.index) / run.index_stride + 1);
    keys[kept++] = run;
  }
  keys.resize(kept);
}

void drop_queries_before(std::vector<RowRun>& queries, std::int32_t first_key) {
  std::size_t kept = 0;
  for (RowRun run : queries) {
    if (run.index < first_key) {
      const std::int32_t skip = (first_key - run.index + run.index_stride - 1) / run.index_stride;
      if (skip >= run.count) continue;
      for (std::size_t c = 0; c < run.base.size(); ++c) run.base[c] += run.step[c] * skip;
      run.index += skip * run.index_stride;
      run.count -= skip;
    }
    queries[kept++] = run;
  }
  queries.resize(kept);
  sort_by_index(queries);
}

void sort_by_index(std::vector<RowRun>& runs) {
  std::sort(runs.begin(), runs.end(),
            [](const RowRun& a, const RowRun& b) { return a.index < b.index; });
}

IndexSpan index_span(const std::vector<RowRun>& runs, std::int64_t begin, std::int64_t end) {
  IndexSpan span{std::numeric_limits<std::int32_t>::max(), -1};
  std::int64_t row = 0;
  for (const RowRun& run : runs) {
    const auto first = static_cast<std::int32_t>(std::max<std::int64_t>(0, begin - row));
    const auto last = static_cast<std::int32_t>(std::min<std::int64_t>(run.count, end - row) - 1);
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
