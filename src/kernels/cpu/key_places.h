#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "kernels/cpu/row_stream.h"

namespace annulus::cpu {

// The places of packed keys: consecutive rows in the order of the runs or, if canonical, each at
// its index. Canonical blocks of keys then do not depend on which keys are missing.
class KeyPlaces {
 public:
  KeyPlaces(std::span<const RowRun> runs, bool canonical) : runs_(runs), canonical_(canonical) {
    for (const RowRun& run : runs_) {
      const std::int64_t last = run.index + std::int64_t{run.count - 1} * run.index_stride;
      count_ = canonical_ ? std::max(count_, last + 1) : count_ + run.count;
    }
  }

  [[nodiscard]] std::int64_t count() const { return count_; }

  // The rows at the kPackBlock places from `first` on; a null run if a place is empty.
  void fill(std::int64_t first, RowStream::Ref* refs) const {
    for (int i = 0; i < kPackBlock; ++i) refs[i] = {nullptr, 0};
    std::int64_t place = 0;  // of a run's first row
    for (const RowRun& run : runs_) {
      const std::int64_t stride = canonical_ ? run.index_stride : 1;
      if (canonical_) place = run.index;
      std::int64_t row = place >= first ? 0 : (first - place + stride - 1) / stride;
      for (; row < run.count && place + row * stride < first + kPackBlock; ++row)
        refs[place + row * stride - first] = {&run, static_cast<std::int32_t>(row)};
      place += run.count;
    }
  }

 private:
  std::span<const RowRun> runs_;
  bool canonical_;
  std::int64_t count_ = 0;
};

}  // namespace annulus::cpu
