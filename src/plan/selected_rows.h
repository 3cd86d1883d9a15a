#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

#include "annulus/band.h"
#include "annulus/row_set.h"
#include "pattern/segments.h"

namespace annulus {

// One (branch, offset) of a pattern, on one side. A dilation beyond the segment length selects at
// most one row of a segment. It is reduced to the segment length, so that no product of positions
// overflows. Keeps a pointer to the segments, which must outlive it.
struct SelectedRows {
  SelectedRows(const Segments& segments_in, Side side_in, std::int64_t branch_dilation,
               std::int64_t branch_offset)
      : segments(&segments_in),
        side(side_in),
        dilation(std::min(branch_dilation, segments_in.length())),
        offset(branch_offset) {}
  SelectedRows(const Segments&& temporary, Side, std::int64_t, std::int64_t) = delete;

  [[nodiscard]] Segments::Part part(std::int64_t segment) const {
    return segments->part(side, segment);
  }
  // Empty if the offset is beyond the segment, which is possible because the dilation may be
  // reduced.
  [[nodiscard]] Stretch indices(std::int64_t segment) const {
    if (offset >= segments->length()) return {0, -1};
    return selected_indices(part(segment), dilation, offset);
  }

  const Segments* segments;
  Side side;
  std::int64_t dilation;
  std::int64_t offset;
};

// The selected elements, in each segment, of a progression of positions (a range of a shard, a row
// set of a parcel). They are a progression of indices into this base, and so a strided view of
// whatever stores the base.
class Crossing {
 public:
  struct Rows {
    RowSet elements;  // indices into the base
    std::int64_t begin = 0,
                 end = 0;  // all indices of the base in the segment, selected or not
  };

  Crossing(const RowSet& base, const SelectedRows& selected);

  // The base has rows only in segments [first_segment, end_segment).
  [[nodiscard]] std::int64_t first_segment() const {
    return selected_.segments->at_or_after(selected_.side, base_.first);
  }
  [[nodiscard]] std::int64_t end_segment() const {
    return selected_.segments->at_or_before(selected_.side, base_.last()) + 1;
  }
  // Segments whose tokens are all in the base: [first, second), empty if first >= second.
  [[nodiscard]] std::pair<std::int64_t, std::int64_t> whole_segments() const;
  [[nodiscard]] Rows in_segment(std::int64_t segment) const;

 private:
  RowSet base_;
  SelectedRows selected_;
  std::int64_t common_ = 1;   // gcd(stride of the base, dilation)
  std::int64_t stride_ = 1;   // of the selected elements, in indices: dilation / common
  std::int64_t inverse_ = 0;  // of stride / common modulo stride_
};

}  // namespace annulus
