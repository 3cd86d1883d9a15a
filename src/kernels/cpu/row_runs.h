#pragma once

#include <cstdint>
#include <vector>

#include "kernels/cpu/kernel.h"

// Cutting lists of row runs by index.
namespace annulus::cpu {

// Rows of a causal task that none of its other rows can be paired with: they would be packed for
// nobody, and in canonical order they may leave gaps (a row can be here for another branch's sake).
void drop_keys_after(std::vector<RowRun>& keys, std::int32_t last_query);
void drop_queries_before(std::vector<RowRun>& queries, std::int32_t first_key);
// Cutting the front of runs can change their order, on which canonical streams rely.
void sort_by_index(std::vector<RowRun>& runs);
// Smallest and largest index among rows [begin, end) of the concatenated runs; empty: first > last.
struct IndexSpan {
  std::int32_t first;
  std::int32_t last;
};
[[nodiscard]] IndexSpan index_span(const std::vector<RowRun>& runs, std::int64_t begin,
                                   std::int64_t end);
[[nodiscard]] std::int64_t row_count(const std::vector<RowRun>& runs);

}  // namespace annulus::cpu
