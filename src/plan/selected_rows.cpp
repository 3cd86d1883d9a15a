#include "plan/selected_rows.h"

#include <numeric>

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
  const std::int64_t end = base_.first + base_.count;
  return {ceil_div(base_.first, selected_.segment_length),
          end == selected_.tokens ? selected_.segments() : end / selected_.segment_length};
}

Crossing::Rows Crossing::in_segment(std::int64_t segment) const {
  const std::int64_t segment_begin = selected_.segment_begin(segment);
  const std::int64_t to_begin = segment_begin - base_.first;
  const std::int64_t to_end = selected_.segment_end(segment) - base_.first;
  Rows rows;
  rows.begin = std::clamp<std::int64_t>(ceil_div(to_begin, base_.stride), 0, base_.count);
  rows.end = std::clamp<std::int64_t>(ceil_div(to_end, base_.stride), 0, base_.count);
  rows.elements = {rows.begin, 0, stride_};
  // base[i] == segment_begin + offset modulo the dilation, solved for i.
  const std::int64_t distance = to_begin + selected_.offset;
  if (selected_.offset >= selected_.segment_length || distance % common_ != 0) return rows;
  const std::int64_t residue = positive_mod(distance / common_, stride_) * inverse_ % stride_;
  rows.elements.first = rows.begin + positive_mod(residue - rows.begin, stride_);
  if (rows.elements.first < rows.end) {
    rows.elements.count = (rows.end - rows.elements.first - 1) / stride_ + 1;
  }
  return rows;
}

}  // namespace annulus
