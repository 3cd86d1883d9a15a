#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "kernels/cpu/kernel.h"

namespace annulus::cpu {

inline constexpr std::int32_t kMaskedIndex = std::numeric_limits<std::int32_t>::max();

// Hands out the rows of a list of runs block by block.
class RowStream {
 public:
  RowStream(std::span<const RowRun> runs, std::int64_t begin, std::int64_t end, bool canonical)
      : runs_(runs), remaining_(end - begin), canonical_(canonical) {
    if (canonical_) {
      next_index_ = std::numeric_limits<std::int32_t>::max();
      for (const RowRun& run : runs_) next_index_ = std::min(next_index_, run.index);
      next_index_ += static_cast<std::int32_t>(begin);
      return;
    }
    while (run_ < runs_.size() && begin >= runs_[run_].count) begin -= runs_[run_++].count;
    row_ = static_cast<std::int32_t>(begin);
  }

  [[nodiscard]] std::int64_t remaining() const { return remaining_; }
  // In canonical order: the index of the next row.
  [[nodiscard]] std::int32_t next_index() const { return next_index_; }

  // Fills run/row references of the next rows, at most `limit` of them.
  struct Ref {
    const RowRun* run;
    std::int32_t row;

    [[nodiscard]] std::byte* at(int channel) const {
      const auto c = static_cast<std::size_t>(channel);
      return run->base[c] + run->step[c] * row;
    }
    [[nodiscard]] std::int32_t index() const { return run->index + run->index_stride * row; }
  };

  int take(int limit, Ref* refs) {
    const int wanted = static_cast<int>(std::min<std::int64_t>(limit, remaining_));
    remaining_ -= wanted;
    if (canonical_) {
      take_canonical(wanted, refs);
      return wanted;
    }
    for (int filled = 0; filled < wanted;) {
      const RowRun& run = runs_[run_];
      const int count = std::min(wanted - filled, run.count - row_);
      for (int i = 0; i < count; ++i) refs[filled + i] = {&run, row_ + i};
      filled += count;
      row_ += count;
      if (row_ == run.count) {
        ++run_;
        row_ = 0;
      }
    }
    return wanted;
  }

 private:
  // Runs ascend by first index but may interleave (striped shards): each puts its rows of the index
  // window in place.
  void take_canonical(int wanted, Ref* refs) {
    const std::int32_t begin = next_index_;
    const std::int32_t end = begin + wanted;
    for (std::size_t i = run_; i < runs_.size() && runs_[i].index < end; ++i) {
      const RowRun& run = runs_[i];
      const std::int32_t last = run.index + (run.count - 1) * run.index_stride;
      if (last < begin) {
        if (i == run_) ++run_;  // exhausted runs at the front are never looked at again
        continue;
      }
      std::int32_t row =
          run.index >= begin ? 0 : (begin - run.index + run.index_stride - 1) / run.index_stride;
      for (; row < run.count; ++row) {
        const std::int32_t index = run.index + row * run.index_stride;
        if (index >= end) break;
        refs[index - begin] = {&run, row};
      }
    }
    next_index_ = end;
  }

  std::span<const RowRun> runs_;
  std::int64_t remaining_;
  bool canonical_;
  std::size_t run_ = 0;
  std::int32_t row_ = 0;
  std::int32_t next_index_ = 0;
};

}  // namespace annulus::cpu
