#pragma once

#include <cmath>
#include <cstddef>
#include <span>
#include <vector>

#include "annulus/tensor.h"

// How far a result may be from the definition: the one measure of the tool's checks and of the
// ring's tests. Where no sum cancels, tests and benches take the plain relative root mean square of
// the results (relative_rms, and named so).
//
// A result is a sum of terms. Rounding errors are proportional to the terms, not to what they add
// up to: dQ of a row with one key is exactly 0, the difference of two equal numbers, and no
// arithmetic but exact one gets that. So an error is measured against a scale made of
//   |result|           rounding the result; factors common to all terms, such as 1 / sum(P)
//   sqrt(sum(terms^2)) errors of single terms, which are independent of each other
//   |common|           an error that all terms share: in dQ that of delta, times scale * sum(P K)
// where a term is as large as what it is made of: P (|dP| + |delta|) |K|, and dP and delta
// themselves count with the scale of *their* sums. Partial sums can be as large as sum(|terms|);
// what rounding them costs is allowed for on top (`allowed`), as are errors of scores, which are
// proportional to the scores and multiply P = exp(score - L).
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

// Found against expected. NaN and equal infinities where they are due are right, and say nothing
// about accuracy; anything else that is not finite is an infinite error.
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

// How large the scores of a row are whose probabilities matter beside the others': their rounding
// errors, and those of their log-sum-exps, are proportional to that.
class ScoreSizes {
 public:
  void add(const Sized& dot, double scale, double lse, double probability);
  [[nodiscard]] double largest() const;  // infinite if fp32 cannot hold one

 private:
  struct Entry {
    double probability;
    double size;
  };
  std::vector<Entry> entries_;
  bool overflows_ = false;
};

// The largest relative error that correct results of a dtype can have in a row whose
// ScoreSizes::largest is `score`. Infinite where fp32 cannot tell.
[[nodiscard]] double allowed_error(DType dtype, double score, double cancellation);

}  // namespace annulus::reference
