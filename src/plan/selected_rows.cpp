#include "plan/selected_rows.h"

#include <numeric>

#include "pattern/division.h"

namespace annulus {

Crossing::Crossing(const RowSet& base, const SelectedRows& selected)
    : base_{base.first, base.count, base.count > 1 ? base.stride : 1}, selected_(selected) {
  common_ = std::gcd(base_.stride, selected.dilation);
  stride_ = selected.dilation / common_;
  // Extended Euclid: inverse * (stride / common) == 1 modulo stride_.
  std::int64_t a = stride_;
  std::int64_t b = base_.stride / common_ % stride_;
  std::int64_t x = 0;
  std::int64_t y = 1;
  while (b > 0) {
    const std::int64_t quotient = a / b;
    a = std::exchange(b, a - quotient * b);
    x = std::exchange(y, x - quotient * y);
  }
  inverse_ = positive_mod(x, stride_);
}

std::pair<std::int64_t, std::int64_t> Crossing::whole_segments() const {
  if (base_.stride != 1) return {0, 0};
  const auto inside = [&](std::int64_t segment) {
    const Segments::Part part = selected_.part(segment);
    return part.begin >= base_.first && part.end <= base_.first + base_.count;
  };
  std::int64_t begin = first_segment();
  std::int64_t end = end_segment();
  if (begin < end && !inside(begin)) ++begin;
  if (begin < end && !inside(end - 1)) --end;
  return {begin, end};
}

Crossing::Rows Crossing::in_segment(std::int64_t segment) const {
  const Segments::Part part = selected_.part(segment);
  const std::int64_t to_begin = part.begin - base_.first;
  const std::int64_t to_end = part.end - base_.first;
  Rows rows;
  rows.begin = std::clamp<std::int64_t>(ceil_div(to_begin, base_.stride), 0, base_.count);
  rows.end = std::clamp<std::int64_t>(ceil_div(to_end, base_.stride), 0, base_.count);
  rows.elements = {rows.begin, 0, stride_};
  // base[i] == origin + offset modulo the dilation, solved for i.
  const std::int64_t distance = part.origin + selected_.offset - base_.first;
  if (selected_.offset >= selected_.segments->length() || distance % common_ != 0) return rows;
  const std::int64_t residue = positive_mod(distance / common_, stride_) * inverse_ % stride_;
  rows.elements.first = rows.begin + positive_mod(residue - rows.begin, stride_);
  if (rows.elements.first < rows.end) {
    rows.elements.count = (rows.end - rows.elements.first - 1) / stride_ + 1;
  }
  return rows;
}

}  // namespace annulus
