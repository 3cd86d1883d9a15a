#pragma once

#include <cmath>

namespace annulus::cpu {

// Backward's rows with a log-sum-exp L beyond this (in units of log 2) get their exponents S - L
// settled: fp32 has rounded L by up to 2^-24 of it, which is an error of so much in every weight.
// What forward saw is lost, but scores that large mostly leave a row one key with weight 1, which
// is known.
inline constexpr float kLargeLse = 2048.0F;
// By how much L of such a row may be off, per unit: rounded in the caller's tensor, in forward's
// sum, and in some steps of a ring.
inline constexpr double kLseError = 0x1p-22;

// S - L of such a pair, which counts `repeats` times. A weight never exceeds 1. Where it is 1 but
// for what L may be off, the row has no other key that counts, and it is 1; unless other branches
// may have the same pair, which halves it, and L is not even known to that.
inline double settled_exponent(double score, double lse, double repeats, bool only_branch) {
  const double highest = -std::log2(repeats);
  double x = score - lse;
  const double error = std::abs(lse) * kLseError;
  const double known = only_branch || error < 0.25 ? error : 0;
  x = x >= highest - known ? highest : x;  // NaN stays
  return x < -200 ? -200 : x;              // 2^x is 0 all the same
}

}  // namespace annulus::cpu
