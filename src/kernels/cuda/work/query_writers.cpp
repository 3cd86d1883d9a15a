#include "kernels/cuda/work/query_writers.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "kernels/cuda/work/lists.h"

namespace annulus::cuda {
namespace {

// Calls f(row of the item, token). False if some rows are not in the shard.
template <typename F>
bool for_each_row(const Tables& tables, const Item& item, const F& f) {
  for (const Run& run : runs_from(tables, group_of(tables, item).queries, item.begin)) {
    if (run.before >= item.begin + item.rows) break;
    if (run.source >= 0) return false;
    const std::int32_t begin = std::max(run.before, item.begin);
    const std::int32_t end = std::min(run.before + run.count, item.begin + item.rows);
    for (std::int32_t row = begin; row < end; ++row) {
      f(row - item.begin, run.first + static_cast<std::int64_t>(row - run.before) * run.stride);
    }
  }
  return true;
}

}  // namespace

bool find_later_launches(Tables& tables, const Computation& computation) {
  const std::int64_t tokens = computation.query_tokens;
  std::vector<bool> taken(static_cast<std::size_t>(computation.query_rows()));  // by later launches
  std::vector<std::uint32_t> later(tables.items.size());
  for (auto launch = tables.launches.rbegin(); launch != tables.launches.rend(); ++launch) {
    for (std::int32_t i = launch->first_item; i < launch->first_item + launch->items; ++i) {
      const Item& item = tables.items[static_cast<std::size_t>(i)];
      if (item.rows == 0) continue;
      const std::int32_t head = tables.members[static_cast<std::size_t>(item.member)].head;
      const std::int64_t first = (item.batch * computation.heads() + head) * tokens;
      std::uint32_t known = 0;
      std::uint32_t word = 0;
      bool even = true;
      const bool local = for_each_row(tables, item, [&](std::int32_t row, std::int64_t token) {
        const auto at = static_cast<std::size_t>(first + token);
        const std::uint32_t bit = 1U << static_cast<unsigned>(row % 32);
        if ((known & bit) != 0 && ((word & bit) != 0) != taken[at]) even = false;
        known |= bit;
        if (taken[at]) word |= bit;
        taken[at] = true;  // no other item of the launch has the row
      });
      if (!local || !even) return false;
      later[static_cast<std::size_t>(i)] = word;
    }
  }
  tables.later = std::move(later);
  return true;
}

}  // namespace annulus::cuda
