#pragma once

#include <cmath>
#include <cstddef>
#include <span>
#include <vector>

#include "annulus/tensor.h"

// How far a result may be from the definition, for the checks of the tool and the tests of the
// ring. Where no sum cancels, tests and benchmarks use the plain relative root mean square of the
// results, called relative_rms.
//
// A result is a sum of terms. Rounding errors are proportional to the terms, not to their sum: dQ
// of a row with one key is exactly 0, the difference of two equal numbers, which only exact
// arithmetic computes. So errors are relative to a scale, the sum of
//   |result|           rounding of the result; factors of all terms, such as 1 / sum(P)
//   sqrt(sum(terms^2)) independent errors of single terms
//   |common|           an error that all terms share: in dQ that of delta, times scale * sum(P K)
// The size of a term is that of its parts: P (|dP| + |delta|) |K|, where dP and delta count with
// the scale of their own sums. `allowed_error` adds the rounding of partial sums, which can be as
// large as sum(|terms|), and errors of scores, which are proportional to the scores and multiply P
// = exp(score - L).
namespace annulus::reference {

// A number that is a sum: its value and its sizes.
struct Sized {
  double value = 0.0;
  double scale = 0.0;     // |value| + sqrt(sum(terms^2))
  double absolute = 0.0;  // sum(|terms|)
};

// a.b and its sizes.
[[nodiscard]] Sized sized_dot(std::span<const double> a, std::span<const double> b);

// A row of results, sum(weight * vector), and its sizes.
class SizedRow {
 public:
  explicit SizedRow(std::size_t width)
      : value_(width, 0.0), squares_(width, 0.0), absolute_(width, 0.0), common_(width, 0.0) {}

  // Adds probability * factor * vector.
  void add(double probability, const Sized& factor, std::span<const double> vector);
  // A factor of this scale has an error that is common to all terms: sum(probability * vector).
  void add_common(double scale, std::span<const double> mean);
  void multiply(double by);

  [[nodiscard]] std::span<const double> value() const { return value_; }
  [[nodiscard]] double scale(std::size_t d) const {
    return std::fabs(value_[d]) + std::sqrt(squares_[d]) + common_[d];
  }
  [[nodiscard]] double absolute(std::size_t d) const { return absolute_[d] + common_[d]; }

 private:
  std::vector<double> value_, squares_, absolute_, common_;
};

// Compares found with expected values. Expected NaNs and infinities are right and do not count. Any
// other value that is not finite is an infinite error.
class ErrorMeasure {
 public:
  void add(double found, double expected, double scale, double absolute, DType dtype);
  void add(std::span<const double> found, const SizedRow& expected, DType dtype) {
    for (std::size_t d = 0; d < found.size(); ++d) {
      add(found[d], expected.value()[d], expected.scale(d), expected.absolute(d), dtype);
    }
  }

  [[nodiscard]] bool empty() const { return count_ == 0; }  // nothing finite was compared
  [[nodiscard]] double relative() const;                    // root mean squares: error / scale
  // How much larger sum(|terms|) is than the scale.
  [[nodiscard]] double cancellation() const;

 private:
  std::size_t count_ = 0;
  double error_ = 0.0;  // these are sums of squares
  double scale_ = 0.0;
  double absolute_ = 0.0;
};

// The largest score of a row among those with a relevant probability: rounding errors of scores and
// of their log-sum-exp are proportional to it.
class ScoreSizes {
 public:
  void add(const Sized& dot, double scale, double lse, double probability);
  [[nodiscard]] double largest() const;  // infinite if one overflows fp32

 private:
  struct Entry {
    double probability;
    double size;
  };
  std::vector<Entry> entries_;
  bool overflows_ = false;
};

// The largest relative error that correct results of a dtype can have in a row whose
// ScoreSizes::largest is `score`. Infinite if fp32 has no precision left there.
[[nodiscard]] double allowed_error(DType dtype, double score, double cancellation);

}  // namespace annulus::reference
