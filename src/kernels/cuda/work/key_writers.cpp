#include "kernels/cuda/work/key_writers.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/cuda/work/lists.h"

namespace annulus::cuda {
namespace {

constexpr std::uint32_t kAll = ~0U;

// The rows of the shard that earlier launches have written.
class Written {
 public:
  Written(std::int64_t batch, std::int64_t tokens, std::int64_t heads)
      : tokens_(tokens), heads_(heads), rows_(static_cast<std::size_t>(batch * tokens * heads)) {}

  // Whether the row had been written before.
  bool write(std::int64_t batch, int head, std::int64_t token) {
    const auto at = static_cast<std::size_t>((batch * heads_ + head) * tokens_ + token);
    const bool before = rows_[at];
    rows_[at] = true;
    if (!before) ++count_;
    return before;
  }
  [[nodiscard]] bool all() const { return count_ == rows_.size(); }

 private:
  std::int64_t tokens_;
  std::int64_t heads_;
  std::vector<bool> rows_;
  std::size_t count_ = 0;
};

// Which rows of an item were written before, as a mask of 32 bits; returns false if rows 32 apart
// differ. Rows of parcels count as written, because the return courier clears them. Adds the rows
// of the shard to `local`.
bool mark_item(const Tables& tables, const Item& item, Written& written, std::uint32_t& earlier,
               std::int64_t& local) {
  const Member& member = tables.members[static_cast<std::size_t>(item.member)];
  std::uint32_t known = 0;
  earlier = 0;
  bool even = true;
  for (const Run& run : runs_from(tables, group_of(tables, item).keys, item.begin)) {
    if (run.before >= item.begin + item.rows) break;
    const std::int32_t begin = std::max(run.before, item.begin);
    const std::int32_t end = std::min(run.before + run.count, item.begin + item.rows);
    for (std::int32_t row = begin; row < end; ++row) {
      bool before = true;
      if (run.source < 0) {
        const std::int64_t token =
            run.first + static_cast<std::int64_t>(row - run.before) * run.stride;
        before = written.write(item.batch, member.kv_head, token);
        ++local;
      }
      const std::uint32_t bit = 1U << static_cast<unsigned>((row - item.begin) % 32);
      if ((known & bit) != 0 && ((earlier & bit) != 0) != before) even = false;
      known |= bit;
      if (before) earlier |= bit;
    }
  }
  return even;
}

}  // namespace

KeyWriters find_key_writers(std::span<Tables* const> stages, const Computation& computation,
                            bool returned) {
  Written written(computation.batch, computation.key_tokens, computation.kv_heads);
  KeyWriters out;
  out.begin = true;
  for (std::size_t s = 0; s < stages.size(); ++s) {
    Tables& tables = *stages[s];
    tables.earlier.assign(tables.items.size(), kAll);
    for (const Launch& launch : tables.launches) {
      std::int64_t local = 0;
      for (std::int32_t i = 0; i < launch.items; ++i) {
        const auto at = static_cast<std::size_t>(launch.first_item + i);
        const bool even = mark_item(tables, tables.items[at], written, tables.earlier[at], local);
        out.begin = out.begin && even;
      }
      out.end = !returned && local == computation.key_rows();
      out.last_stage = s;
    }
    if (s == 0 && returned) out.begin = out.begin && written.all();
  }
  out.begin = out.begin && written.all();
  if (!out.begin) {
    for (Tables* tables : stages) tables->earlier.assign(tables->items.size(), kAll);
  }
  return out;
}

}  // namespace annulus::cuda
