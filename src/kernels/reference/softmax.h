#pragma once

#include <cmath>
#include <cstdint>

#include "annulus/reference.h"
#include "kernels/dropout.h"

// SoftmaxOptions, applied to single pairs.
namespace annulus::reference {

// The score of s = scale * q.k, and its derivative by s.
[[nodiscard]] inline double capped(const SoftmaxOptions& options, double s) {
  const double c = options.softcap;
  return c == 0.0 ? s : c * std::tanh(s / c);
}
[[nodiscard]] inline double cap_slope(const SoftmaxOptions& options, double s) {
  const double c = options.softcap;
  return c == 0.0 ? 1.0 : 1.0 - std::tanh(s / c) * std::tanh(s / c);
}

// What dropout multiplies a pair's probability with: 0, or 1 / (1 - p).
[[nodiscard]] inline double kept(const SoftmaxOptions& options, std::int64_t batch, int head,
                                 std::int64_t query, std::int64_t key) {
  if (options.dropout_p == 0.0) return 1.0;
  const dropout::Head words = dropout::head_of({options.dropout_seed}, batch, head);
  const std::int32_t number = dropout::pair_number(words.row(query), words.key(key));
  const bool keeps = number >= DropoutRate::of(options.dropout_p).threshold;
  return keeps ? 1.0 / (1.0 - options.dropout_p) : 0.0;
}

}  // namespace annulus::reference
