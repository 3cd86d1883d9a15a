#pragma once

#include <cmath>

namespace annulus::cpu {

// In backward, rows whose log-sum-exp L (in units of log 2) exceeds this get corrected exponents S
// - L. fp32 rounds L by up to 2^-24 of its value, which becomes a relative error of every weight.
// The exact value is lost, but with scores that large one key usually has all the weight, and its
// weight is known to be 1.
inline constexpr float kLargeLse = 2048.0F;
// Bound of the relative error of L in such a row: it is rounded in the caller's tensor, in
// forward's sum, and in some steps of a ring.
inline constexpr double kLseError = 0x1p-22;

// S - L of such a pair, which counts `repeats` times. A weight never exceeds 1. If it is 1 within
// the error of L, no other key has any weight, so it is exactly 1. The exception: another branch
// may have the same pair, so that the weight is 1/2, and L is too inexact to tell.
inline double settled_exponent(double score, double lse, double repeats, bool only_branch) {
  const double highest = -std::log2(repeats);
  double x = score - lse;
  const double error = std::abs(lse) * kLseError;
  const double known = only_branch || error < 0.25 ? error : 0;
  x = x >= highest - known ? highest : x;  // NaN stays
  return x < -200 ? -200 : x;              // 2^x is 0 all the same
}

}  // namespace annulus::cpu
