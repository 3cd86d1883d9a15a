#include "annulus/row_set.h"

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <utility>

namespace annulus {
namespace {

// The least common multiple of two strides, and products on the way to it, need up to 126 bits.
__extension__ using Wide = __int128;

// A result of one row keeps the common stride as long as that fits. Beyond this bound the
// difference is not observable, and clip() must still be able to add a stride to a position.
constexpr Wide kMaxStride = Wide{1} << 61;

// The x in [0, m) with a * x = 1 (mod m), for coprime a and m.
std::int64_t inverse_modulo(std::int64_t a, std::int64_t m) {
  // Extended Euclid. The coefficients never exceed m in magnitude, so 64 bits are enough.
  std::int64_t previous = m;
  std::int64_t current = a % m;
  std::int64_t x_previous = 0;
  std::int64_t x_current = 1;
  while (current != 0) {
    const std::int64_t quotient = previous / current;
    previous = std::exchange(current, previous - quotient * current);
    x_previous = std::exchange(x_current, x_previous - quotient * x_current);
  }
  return x_previous < 0 ? x_previous + m : x_previous;
}

// All empty results compare equal.
RowSet without_empty_first(const RowSet& rows) { return rows.count > 0 ? rows : RowSet{}; }

}  // namespace

RowSet intersect(const RowSet& a, const RowSet& b) {
  if (a.count <= 0 || b.count <= 0) return {};
  const std::int64_t begin = std::max(a.first, b.first);
  const std::int64_t last = std::min(a.last(), b.last());
  if (begin > last) return {};

  // Plans intersect millions of pairs. Nearly all of them have a contiguous range or rows of the
  // same branch and need no number theory.
  if (b.stride == 1) return without_empty_first(clip(a, begin, last + 1));
  if (a.stride == 1) return without_empty_first(clip(b, begin, last + 1));
  const std::int64_t distance = b.first - a.first;
  if (a.stride == b.stride) {
    return distance % a.stride == 0 ? without_empty_first(clip(a, begin, last + 1)) : RowSet{};
  }

  const std::int64_t common = std::gcd(a.stride, b.stride);
  if (distance % common != 0) return {};
  // a[i] lies on b's (endless) progression iff i * a.stride = distance (mod b.stride); dividing by
  // the common divisor makes a.stride invertible, so i is known modulo b.stride / common.
  const std::int64_t modulus = b.stride / common;
  Wide i = 0;
  if (modulus > 1) {
    const std::int64_t inverse = inverse_modulo(a.stride / common, modulus);
    i = Wide{distance / common} % modulus * inverse % modulus;
    if (i < 0) i += modulus;
  }
  const Wide step = Wide{a.stride} * modulus;
  Wide first = Wide{a.first} + i * a.stride;
  if (first < begin) first += (begin - first + step - 1) / step * step;
  if (first > last) return {};
  const Wide count = (last - first) / step + 1;
  return {static_cast<std::int64_t>(first), static_cast<std::int64_t>(count),
          static_cast<std::int64_t>(count > 1 ? step : std::min(step, kMaxStride))};
}

}  // namespace annulus
