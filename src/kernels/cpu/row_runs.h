#pragma once

#include <cstdint>
#include <vector>

#include "kernels/cpu/kernel.h"

// Cutting lists of row runs by index.
namespace annulus::cpu {

// Keeps the rows with these indices, in the order of their indices.
void keep_rows(std::vector<RowRun>& runs, const Stretch& indices);
// The order that canonical streams need.
void sort_by_index(std::vector<RowRun>& runs);
// Smallest and largest index among rows [begin, end) of the concatenated runs; empty: first > last.
[[nodiscard]] Stretch index_span(const std::vector<RowRun>& runs, std::int64_t begin,
                                 std::int64_t end);
[[nodiscard]] std::int64_t row_count(const std::vector<RowRun>& runs);

}  // namespace annulus::cpu
