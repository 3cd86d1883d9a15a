#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>

#include "kernels/cpu/kernel.h"

namespace annulus::cpu {

inline constexpr std::int32_t kMaskedIndex = std::numeric_limits<std::int32_t>::max();

// A query sees the keys with before < index <= last. Padding has kMaskedIndex, which no query sees.
struct KeyLimits {
  std::int32_t before = -1;
  std::int32_t last = kMaskedIndex - 1;
};
inline constexpr KeyLimits kSeesNothing{kMaskedIndex, -1};

inline KeyLimits key_limits(const Band& band, std::int32_t index) {
  const auto clamped = [&](std::int64_t limit) {
    return static_cast<std::int32_t>(
        std::clamp<std::int64_t>(limit, -1, std::int64_t{kMaskedIndex} - 1));
  };
  if (band.empty()) return kSeesNothing;
  return {clamped(index + band.least - 1), clamped(index + band.most)};
}

// A pair counts once, and once more for every repeat that contains both of its rows. The class of a
// key is the set of repeats that contain it; a query has one weight per class.
inline std::int32_t repeat_class(std::span<const Repeat> repeats, std::int32_t key) {
  std::int32_t out = 0;
  for (std::size_t i = 0; i < repeats.size(); ++i) out |= repeats[i].contains(key) ? 1 << i : 0;
  return out;
}
// weights[c * step] for every class c of keys; nothing without repeats.
inline void repeat_weights(std::span<const Repeat> repeats, std::int32_t query, float* weights,
                           int step) {
  if (repeats.empty()) return;
  const auto mine = static_cast<std::uint32_t>(repeat_class(repeats, query));
  for (std::uint32_t c = 0; c < 1U << repeats.size(); ++c)
    weights[static_cast<std::ptrdiff_t>(c) * step] =
        1.0F + static_cast<float>(std::popcount(c & mine));
}

// Iterates over the rows of a list of runs, block by block. In canonical order, the blocks are
// stretches of indices in [0, end) that begin at multiples of `block`; rows that no run has are
// null.
class RowStream {
 public:
  struct Canonical {
    bool on = false;
    IndexGap gap;  // rows after it move up to fill it
    int block = 0;
  };

  RowStream(std::span<const RowRun> runs, std::int64_t begin, std::int64_t end)
      : RowStream(runs, begin, end, Canonical{}) {}
  RowStream(std::span<const RowRun> runs, std::int64_t begin, std::int64_t end,
            const Canonical& canonical)
      : runs_(runs), remaining_(end - begin), canonical_(canonical) {
    if (canonical_.on) {
      std::int32_t last = -1;
      next_place_ = kMaskedIndex;
      for (const RowRun& run : runs_) {
        next_place_ = std::min(next_place_, place(run));
        last = std::max(last, place(run) + (run.count - 1) * run.index_stride);
      }
      next_place_ -= next_place_ % canonical_.block;
      remaining_ = std::max(0, last + 1 - next_place_);
      return;
    }
    while (run_ < runs_.size() && begin >= runs_[run_].count) begin -= runs_[run_++].count;
    row_ = static_cast<std::int32_t>(begin);
  }

  [[nodiscard]] std::int64_t remaining() const { return remaining_; }

  // A reference to a row.
  struct Ref {
    const RowRun* run;
    std::int32_t row;

    [[nodiscard]] std::byte* at(int channel) const {
      const auto c = static_cast<std::size_t>(channel);
      return run->base[c] + run->step[c] * row;
    }
    [[nodiscard]] std::int32_t index() const { return run->index + run->index_stride * row; }
  };

  // Writes references to the next rows, at most `limit`, and returns their number. In canonical
  // order `limit` is the block length and missing rows count, as null references; blocks without
  // any row are skipped.
  int take(int limit, Ref* refs) {
    for (int wanted = 0; canonical_.on;) {
      wanted = static_cast<int>(std::min<std::int64_t>(limit, remaining_));
      remaining_ -= wanted;
      if (take_canonical(wanted, refs) > 0 || wanted == 0) return wanted;
    }
    const int wanted = static_cast<int>(std::min<std::int64_t>(limit, remaining_));
    remaining_ -= wanted;
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
  // Runs ascend by first index but may interleave (striped shards): each writes its rows within the
  // window of indices. Returns the number of rows.
  int take_canonical(int wanted, Ref* refs) {
    const std::int32_t begin = next_place_;
    const std::int32_t end = begin + wanted;
    std::fill_n(refs, wanted, Ref{nullptr, 0});
    int found = 0;
    for (std::size_t i = run_; i < runs_.size() && place(runs_[i]) < end; ++i) {
      const RowRun& run = runs_[i];
      const std::int32_t first = place(run);
      const std::int32_t last = first + (run.count - 1) * run.index_stride;
      if (last < begin) {
        if (i == run_) ++run_;  // skips finished runs at the front from now on
        continue;
      }
      std::int32_t row =
          first >= begin ? 0 : (begin - first + run.index_stride - 1) / run.index_stride;
      for (; row < run.count; ++row) {
        const std::int32_t index = first + row * run.index_stride;
        if (index >= end) break;
        refs[index - begin] = {&run, row};
        ++found;
      }
    }
    next_place_ = end;
    return found;
  }

  // A run never contains the gap.
  [[nodiscard]] std::int32_t place(const RowRun& run) const {
    return run.index - (run.index >= canonical_.gap.end ? canonical_.gap.rows() : 0);
  }

  std::span<const RowRun> runs_;
  std::int64_t remaining_;
  Canonical canonical_;
  std::size_t run_ = 0;
  std::int32_t row_ = 0;
  std::int32_t next_place_ = 0;
};

}  // namespace annulus::cpu
