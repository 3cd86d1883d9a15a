#pragma once

#include <algorithm>
#include <cstdint>

namespace annulus {

// The unit of everything that is computed or moved: the positions first, first + stride, ... (count
// of them, count may be 0, stride >= 1). Dilated rows are arithmetic progressions, and so are their
// intersections with a rank's ranges.
struct RowSet {
  std::int64_t first = 0;
  std::int64_t count = 0;
  std::int64_t stride = 1;

  [[nodiscard]] std::int64_t last() const { return first + (count - 1) * stride; }
  [[nodiscard]] std::int64_t operator[](std::int64_t i) const { return first + i * stride; }
  [[nodiscard]] bool contains(std::int64_t position) const {
    return count > 0 && position >= first && position <= last() && (position - first) % stride == 0;
  }
  bool operator==(const RowSet&) const = default;
};

// The rows of `a` within [begin, end).
[[nodiscard]] inline RowSet clip(const RowSet& a, std::int64_t begin, std::int64_t end) {
  const std::int64_t skip = begin > a.first ? (begin - a.first + a.stride - 1) / a.stride : 0;
  const std::int64_t stop =
      end > a.first ? std::min(a.count, (end - a.first + a.stride - 1) / a.stride) : 0;
  return {a.first + skip * a.stride, std::max<std::int64_t>(0, stop - skip), a.stride};
}

// Two progressions meet in a progression (Chinese remainder theorem); empty when they never do.
[[nodiscard]] RowSet intersect(const RowSet& a, const RowSet& b);

}  // namespace annulus
