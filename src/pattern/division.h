#pragma once

#include <cstdint>

namespace annulus {

// Quotients rounded up and down and the remainder in [0, b), for a of any sign: positions relative
// to a range that starts later are negative.
[[nodiscard]] inline std::int64_t ceil_div(std::int64_t a, std::int64_t b) {
  return a > 0 ? (a - 1) / b + 1 : -(-a / b);
}
[[nodiscard]] inline std::int64_t floor_div(std::int64_t a, std::int64_t b) {
  return -ceil_div(-a, b);
}
[[nodiscard]] inline std::int64_t positive_mod(std::int64_t a, std::int64_t b) {
  const std::int64_t m = a % b;
  return m < 0 ? m + b : m;
}

}  // namespace annulus
