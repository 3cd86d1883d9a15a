#pragma once

#include <cstdint>
#include <span>

#include "annulus/band.h"
#include "kernels/cuda/work/tables.h"

// Searches the rows of lists by index, on the host.
namespace annulus::cuda {

[[nodiscard]] inline std::span<const Run> runs_of(const Tables& tables, const RowList& list) {
  return {tables.runs.data() + list.begin, static_cast<std::size_t>(list.runs)};
}
[[nodiscard]] inline std::span<const Item> items_of(const Tables& tables, const Launch& launch) {
  return {tables.items.data() + launch.first_item, static_cast<std::size_t>(launch.items)};
}
[[nodiscard]] inline const Group& group_of(const Tables& tables, const Item& item) {
  return tables.groups[static_cast<std::size_t>(item.group)];
}

// The runs of a list, from the one that contains this row.
[[nodiscard]] std::span<const Run> runs_from(const Tables& tables, const RowList& list,
                                             std::int32_t row);

// Lowest and highest index of rows [begin, begin + rows) of a list; rows > 0.
[[nodiscard]] Stretch indices_of(const Tables& tables, const RowList& list, std::int32_t begin,
                                 std::int32_t rows);
[[nodiscard]] Stretch indices_of(const Tables& tables, const RowList& list);

// Number of rows of a list with an index in this range, and number of its tiles of `tile` rows that
// may contain one.
[[nodiscard]] std::int64_t count_rows(const Tables& tables, const RowList& list,
                                      const Stretch& indices);
[[nodiscard]] std::int64_t count_tiles(const Tables& tables, const RowList& list,
                                       const Stretch& indices, int tile);

}  // namespace annulus::cuda
