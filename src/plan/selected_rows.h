#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

#include "annulus/pattern.h"
#include "annulus/row_set.h"

namespace annulus {

// Quotient rounded up and remainder in [0, b), for a of any sign: positions relative to a range
// that starts later are negative.
[[nodiscard]] inline std::int64_t ceil_div(std::int64_t a, std::int64_t b) {
  return a > 0 ? (a - 1) / b + 1 : -(-a / b);
}
[[nodiscard]] inline std::int64_t positive_mod(std::int64_t a, std::int64_t b) {
  const std::int64_t m = a % b;
  return m < 0 ? m + b : m;
}

// One (branch, offset) of a pattern. Segment length and dilation are cut down to the sequence,
// which changes no row and keeps every product below tokens^2: no overflow up to 3e9 tokens,
// whatever the pattern says.
struct SelectedRows {
  SelectedRows(const Branch& branch, std::int64_t branch_offset, std::int64_t sequence_tokens)
      : tokens(sequence_tokens),
        segment_length(
            std::clamp<std::int64_t>(branch.segment_length, 1, std::max<std::int64_t>(1, tokens))),
        dilation(std::min(branch.dilation, segment_length)),
        offset(branch_offset) {}

  [[nodiscard]] std::int64_t segments() const { return ceil_div(tokens, segment_length); }
  [[nodiscard]] std::int64_t segment_begin(std::int64_t segment) const {
    return segment * segment_length;
  }
  [[nodiscard]] std::int64_t segment_end(std::int64_t segment) const {
    return std::min(tokens, (segment + 1) * segment_length);
  }
  // Number of selected positions of a segment; the last one may be ragged.
  [[nodiscard]] std::int64_t count(std::int64_t segment) const {
    const std::int64_t length = segment_end(segment) - segment_begin(segment);
    return offset < length ? (length - offset - 1) / dilation + 1 : 0;
  }

  std::int64_t tokens;
  std::int64_t segment_length;
  std::int64_t dilation;
  std::int64_t offset;
};

// A progression of positions (a range of a shard, a row set of a parcel) seen through a selection:
// which of its elements are selected in a segment. Again a progression, in indices into the base,
// so it is a strided view of whatever stores the base.
class Crossing {
 public:
  struct Rows {
    RowSet elements;  // indices into the base
    std::int64_t begin = 0,
                 end = 0;  // indices of the base that lie in the segment, selected or not
  };

  Crossing(const RowSet& base, const SelectedRows& selected);

  // Segments that the base reaches: [first_segment, end_segment).
  [[nodiscard]] std::int64_t first_segment() const {
    return base_.first / selected_.segment_length;
  }
  [[nodiscard]] std::int64_t end_segment() const {
    return base_.last() / selected_.segment_length + 1;
  }
  // Segments of which the base holds every position: [first, second), empty when first >= second.
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
