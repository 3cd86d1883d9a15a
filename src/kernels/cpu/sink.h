#pragma once

#include <algorithm>
#include <cmath>

namespace annulus::cpu {

// The result of merging a sink into a row: L' = log(exp(L) + exp(sink)), and O' = O * kept.
struct WithSink {
  float lse;
  float kept;  // exp(L - L'); 0 for a row without keys
};

// A sink of -inf changes no bit. NaN or +inf makes every row NaN, even without keys, as a score of
// +inf does.
inline WithSink with_sink(float lse, float sink) {
  if (sink == -INFINITY) return {lse, lse == -INFINITY ? 0.0F : 1.0F};
  if (!(sink < INFINITY)) return {NAN, NAN};
  if (lse == -INFINITY) return {sink, 0.0F};
  const float above = sink - lse;
  const float less = std::exp(-std::abs(above));  // the smaller of the two over the larger
  const float sum = 1.0F + less;
  // Not log1p, which takes several times as long: lse is exact to 2^-24 anyway.
  return {std::max(lse, sink) + std::log(sum), (above > 0 ? less : 1.0F) / sum};
}

}  // namespace annulus::cpu
