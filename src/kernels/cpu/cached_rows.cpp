#include "kernels/cpu/cached_rows.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "core/memory.h"
#include "kernels/cpu/sink.h"

namespace annulus::cpu {
namespace {

// Keys of an item. Fixed, and not a share for each thread: the order of sums is then the same for
// any number of threads. 8,192 bf16 rows of 128 are 4 MiB of K and V, which takes longer to read
// than an item costs to start.
constexpr std::int64_t kItemKeys = 8192;
// Rows of O of an item: a key tile that is in L1 serves all of them.
constexpr std::int64_t kItemRows = 64;

// Some queries of a run that share a K/V head.
struct Group {
  const QueryRun* run = nullptr;
  int kv_head = 0;
  std::int64_t first_token = 0;
  std::int64_t tokens = 0;
  RowInterval keys;  // that any of them sees
  std::int64_t items = 0;
  std::int64_t first_part = 0;  // rows of `parts`, where there are several items
};

struct Item {
  std::size_t group = 0;
  std::int64_t number = 0;  // within the group
};

// One softmax over all parts; returns its log-sum-exp. part(i) has members o and lse.
template <typename Part>
float merge_parts(std::size_t parts, const Part& part, int head_dim, float* o) {
  float highest = -INFINITY;
  bool poisoned = false;
  for (std::size_t i = 0; i < parts; ++i) {
    const float lse = *part(i).lse;
    poisoned = poisoned || std::isnan(lse);
    highest = std::max(highest, lse);
  }
  std::fill_n(o, head_dim, 0.0F);
  if (poisoned) {
    std::fill_n(o, head_dim, NAN);
    return NAN;
  }
  if (highest == -INFINITY) return highest;
  double sum = 0;
  for (std::size_t i = 0; i < parts; ++i)
    sum += std::exp(static_cast<double>(*part(i).lse) - highest);
  for (std::size_t i = 0; i < parts; ++i) {
    const PartialRows rows = part(i);
    if (*rows.lse == -INFINITY) continue;  // changes nothing, whatever its O
    const auto weight =
        static_cast<float>(std::exp(static_cast<double>(*rows.lse) - highest) / sum);
    for (int d = 0; d < head_dim; ++d) o[d] = std::fma(weight, rows.o[d], o[d]);
  }
  return static_cast<float>(highest + std::log(sum));
}

class CpuCacheKernels final : public CacheKernels {
 public:
  CpuCacheKernels(const CacheShape& shape, const Kernels& kernels, std::shared_ptr<ThreadPool> pool)
      : shape_(shape),
        problem_{shape.dtype, shape.head_dim, static_cast<float>(shape.scale)},
        ratio_(shape.heads / shape.kv_heads),
        kernels_(kernels),
        pool_(std::move(pool)) {}

  void copy(const TensorRows& from, const TensorRows& to, int heads, std::int64_t row_bytes,
            std::span<const RowCopy> copies, Queue&) override {
    constexpr std::int64_t kRows = 512;
    pool_->run_parallel(std::ssize(copies) * heads, [&](std::int64_t index, int) {
      const RowCopy& copy = copies[static_cast<std::size_t>(index / heads)];
      const int head = static_cast<int>(index % heads);
      const std::int64_t pieces = (copy.count + kRows - 1) / kRows;
      pool_->run_parallel(pieces, [&](std::int64_t piece, int) {
        const std::int64_t first = piece * kRows;
        const std::byte* source =
            from.at(copy.from_batch, head) + (copy.from_row + first) * from.row_step;
        std::byte* target = to.at(copy.to_batch, head) + (copy.to_row + first) * to.row_step;
        const std::int64_t rows = std::min(kRows, copy.count - first);
        for (std::int64_t i = 0; i < rows; ++i) {
          std::memcpy(target + i * to.row_step, source + i * from.row_step,
                      static_cast<std::size_t>(row_bytes));
        }
      });
    });
  }

  void reserve(const CachedKeys& keys, std::span<const QueryRun> runs, Queue& queue) override {
    std::size_t groups = 0;
    std::size_t items = 0;
    std::int64_t part_rows = 0;
    for_each_group(keys, runs, [&](const Group& group) {
      ++groups;
      items += static_cast<std::size_t>(group.items);
      part_rows += part_rows_of(group);
    });
    const std::int64_t bytes = part_rows * part_floats() * 4;
    if (groups <= groups_.capacity() && items <= items_.capacity() && bytes <= parts_.bytes())
      return;
    queue.record().wait();  // earlier calls use what there is
    groups_.reserve(groups);
    items_.reserve(items);
    if (bytes <= parts_.bytes()) return;
    parts_ = {};
    parts_ = allocate_host(bytes, "partial results of a cache");
  }

  void attend(const TensorRows& q, const CachedKeys& keys, std::span<const QueryRun> runs,
              Queue&) override {
    const bool in_parts = find_items(keys, runs);
    pool_->run_parallel(std::ssize(items_), [&](std::int64_t index, int slot) {
      attend_item(q, keys, items_[static_cast<std::size_t>(index)], pool_->scratch(slot));
    });
    if (!in_parts) return;
    pool_->run_parallel(std::ssize(groups_), [&](std::int64_t index, int) {
      merge_items(groups_[static_cast<std::size_t>(index)]);
    });
  }

  void merge(std::span<const PartialRows> parts, const HeadNumbers& sinks,
             std::span<const RowCopy> copies, const TensorRows& o, const TensorRows& lse,
             Queue&) override {
    constexpr std::int64_t kRows = 16;
    pool_->run_parallel(std::ssize(copies), [&](std::int64_t index, int) {
      const RowCopy& copy = copies[static_cast<std::size_t>(index)];
      pool_->run_parallel((copy.count + kRows - 1) / kRows, [&](std::int64_t piece, int) {
        const std::int64_t end = std::min(copy.count, (piece + 1) * kRows);
        for (std::int64_t i = piece * kRows; i < end; ++i)
          merge_row(parts, sinks, copy.from_row + i, copy.to_batch, copy.to_row + i, o, lse);
      });
    });
  }

  [[nodiscard]] std::int64_t workspace_bytes() const override {
    return parts_.bytes() + static_cast<std::int64_t>(groups_.capacity() * sizeof(Group) +
                                                      items_.capacity() * sizeof(Item));
  }

 private:
  [[nodiscard]] std::int64_t part_floats() const { return shape_.head_dim + 1; }

  [[nodiscard]] std::int64_t part_rows_of(const Group& group) const {
    return group.items > 1 ? group.items * group.tokens * ratio_ : 0;
  }

  template <typename Use>
  void for_each_group(const CachedKeys& keys, std::span<const QueryRun> runs,
                      const Use& use) const {
    const std::int64_t most_tokens = std::max<std::int64_t>(1, kItemRows / ratio_);
    for (const QueryRun& run : runs) {
      for (int kv_head = 0; kv_head < shape_.kv_heads; ++kv_head) {
        for (std::int64_t token = 0; token < run.tokens; token += most_tokens) {
          Group group{&run, kv_head, token, std::min(most_tokens, run.tokens - token)};
          const std::int64_t first = run.position + token;
          group.keys.begin = keys.seen_from(first, run.length).begin;
          group.keys.end = keys.seen_from(first + group.tokens - 1, run.length).end;
          const std::int64_t count = std::max<std::int64_t>(0, group.keys.end - group.keys.begin);
          group.items = std::max<std::int64_t>(1, (count + kItemKeys - 1) / kItemKeys);
          use(group);
        }
      }
    }
  }

  // Returns whether any group has several items.
  bool find_items(const CachedKeys& keys, std::span<const QueryRun> runs) {
    groups_.clear();
    items_.clear();
    std::int64_t part_rows = 0;
    for_each_group(keys, runs, [&](Group& group) {
      group.first_part = part_rows;
      part_rows += part_rows_of(group);
      for (std::int64_t i = 0; i < group.items; ++i) items_.push_back({groups_.size(), i});
      groups_.push_back(group);
    });
    return part_rows > 0;
  }

  // Where an item leaves O of a row (token of the group, query head of the K/V head).
  struct RowOut {
    float* o;
    float* lse;
  };
  [[nodiscard]] RowOut result_row(const Group& group, std::int64_t row) const {
    const std::int64_t token = group.first_token + row / ratio_;
    const std::int64_t at = token * shape_.heads + group.kv_head * ratio_ + row % ratio_;
    return {group.run->o + at * shape_.head_dim, group.run->lse + at};
  }
  [[nodiscard]] RowOut part_row(const Group& group, std::int64_t item, std::int64_t row) {
    float* at =
        parts_.floats() + (group.first_part + item * group.tokens * ratio_ + row) * part_floats();
    return {at + 1, at};
  }

  void attend_item(const TensorRows& q, const CachedKeys& keys, const Item& item,
                   std::span<std::byte> scratch) {
    const Group& group = groups_[item.group];
    const QueryRun& run = *group.run;
    const std::int64_t rows = group.tokens * ratio_;
    const int padded = padded_head_dim(shape_.head_dim);
    std::byte* const queries = scratch.data();
    auto* const o = reinterpret_cast<float*>(queries + rows * kFewQueryBytes);
    float* const highest = o + rows * padded;
    float* const sum = highest + rows;
    for (std::int64_t row = 0; row < rows; ++row) {
      const std::byte* from =
          q.at(run.batch, group.kv_head * ratio_ + static_cast<int>(row % ratio_)) +
          (run.row + group.first_token + row / ratio_) * q.row_step;
      kernels_.load_few_query(problem_, from, queries + row * kFewQueryBytes);
    }
    std::fill_n(o, rows * padded, 0.0F);
    std::fill_n(highest, rows, -INFINITY);
    std::fill_n(sum, rows, 0.0F);

    FewRowsTask task;
    task.row_step = keys.k.row_step;
    const std::byte* const k = keys.k.at(run.entry, group.kv_head);
    const std::byte* const v = keys.v.at(run.entry, group.kv_head);
    // Tokens [first, end) of the group see keys [begin, begin + count), and no other rows are
    // touched by them: what a query does not see is not even multiplied by 0.
    const auto attend = [&](std::int64_t first, std::int64_t end, std::int64_t begin, int count) {
      const std::int64_t at = begin % keys.ring_rows * task.row_step;
      task.k = k + at;
      task.v = v + at;
      task.keys = count;
      task.q = queries + first * ratio_ * kFewQueryBytes;
      task.rows = static_cast<int>((end - first) * ratio_);
      task.o = o + first * ratio_ * padded;
      task.highest = highest + first * ratio_;
      task.sum = sum + first * ratio_;
      kernels_.few_rows(problem_, task);
      task.next_keys = 0;
    };
    const std::int64_t last =
        std::min(group.keys.end, group.keys.begin + (item.number + 1) * kItemKeys);
    int count = 0;
    for (std::int64_t key = group.keys.begin + item.number * kItemKeys; key < last; key += count) {
      count = static_cast<int>(
          std::min({std::int64_t{kFewKeys}, last - key, keys.ring_rows - key % keys.ring_rows}));
      const std::int64_t next = (key + count) % keys.ring_rows;
      task.next_k = k + next * task.row_step;
      task.next_keys = static_cast<int>(
          std::min({std::int64_t{kFewKeys}, last - key - count, keys.ring_rows - next}));
      std::int64_t alike = 0;  // first of the tokens before this one that see the whole tile
      for (std::int64_t token = 0; token < group.tokens; ++token) {
        const RowInterval seen =
            keys.seen_from(run.position + group.first_token + token, run.length);
        const std::int64_t begin = std::max(key, seen.begin);
        const std::int64_t end = std::min(key + count, seen.end);
        if (begin == key && end == key + count) continue;
        if (alike < token) attend(alike, token, key, count);
        alike = token + 1;
        if (begin < end) attend(token, token + 1, begin, static_cast<int>(end - begin));
      }
      if (alike < group.tokens) attend(alike, group.tokens, key, count);
    }

    constexpr double kLn2 = 0.69314718055994530942;
    for (std::int64_t row = 0; row < rows; ++row) {
      const RowOut out =
          group.items == 1 ? result_row(group, row) : part_row(group, item.number, row);
      const bool empty = sum[row] == 0.0F;
      *out.lse = empty ? -INFINITY
                       : static_cast<float>((static_cast<double>(highest[row]) +
                                             std::log2(static_cast<double>(sum[row]))) *
                                            kLn2);
      const float factor = empty ? 0.0F : 1.0F / sum[row];
      const float* from = o + row * padded;
      for (int d = 0; d < shape_.head_dim; ++d) out.o[d] = empty ? 0.0F : from[d] * factor;
    }
  }

  void merge_items(const Group& group) {
    if (group.items == 1) return;
    for (std::int64_t row = 0; row < group.tokens * ratio_; ++row) {
      const RowOut out = result_row(group, row);
      *out.lse = merge_parts(
          static_cast<std::size_t>(group.items),
          [&](std::size_t i) {
            const RowOut part = part_row(group, static_cast<std::int64_t>(i), row);
            return PartialRows{part.o, part.lse};
          },
          shape_.head_dim, out.o);
    }
  }

  void merge_row(std::span<const PartialRows> parts, const HeadNumbers& sinks, std::int64_t from,
                 std::int64_t batch, std::int64_t row, const TensorRows& o,
                 const TensorRows& lse) const {
    alignas(64) float merged[kMaxHeadDim];
    for (int head = 0; head < shape_.heads; ++head) {
      const std::int64_t at = from * shape_.heads + head;
      const float all = merge_parts(
          parts.size(),
          [&](std::size_t i) {
            return PartialRows{parts[i].o + at * shape_.head_dim, parts[i].lse + at};
          },
          shape_.head_dim, merged);
      const WithSink end = with_sink(all, sinks.base == nullptr ? -INFINITY : *sinks.at(head));
      *reinterpret_cast<float*>(lse.at(batch, head) + row * lse.row_step) = end.lse;
      kernels_.store_row(shape_.dtype, merged, end.kept, o.at(batch, head) + row * o.row_step,
                         shape_.head_dim);
    }
  }

  const CacheShape shape_;
  const Problem problem_;
  const int ratio_;  // query heads of a K/V head
  const Kernels& kernels_;
  const std::shared_ptr<ThreadPool> pool_;
  std::vector<Group> groups_;
  std::vector<Item> items_;
  Memory parts_;  // fp32 [group][item][row]: log-sum-exp and O
};

}  // namespace

std::unique_ptr<CacheKernels> make_cache_kernels(const CacheShape& shape, const Kernels& kernels,
                                                 std::shared_ptr<ThreadPool> pool) {
  return std::make_unique<CpuCacheKernels>(shape, kernels, std::move(pool));
}

}  // namespace annulus::cpu
