#include "kernels/reference/error.h"

#include <limits>

namespace annulus::reference {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kFloatUnit = 0x1p-24;  // fp32: half a unit in the last place, relative

// Below 2^-126 fp32 loses its relative precision: an error of 2^-126 is 2^-26 of this.
constexpr double kSmallest = 0x1p-100;
constexpr double kLargestFloat = 0x1.fffffep127;

double smallest_normal(DType dtype) { return dtype == DType::f16 ? 0x1p-14 : kSmallest; }
double largest(DType dtype) { return dtype == DType::f16 ? 65504.0 : kLargestFloat; }
double unit_of(DType dtype) {
  return dtype == DType::bf16 ? 0x1p-8 : dtype == DType::f16 ? 0x1p-11 : kFloatUnit;
}

}  // namespace

Sized sized_dot(std::span<const double> a, std::span<const double> b) {
  Sized sum;
  double squares = 0.0;
  for (std::size_t d = 0; d < a.size(); ++d) {
    const double term = a[d] * b[d];
    sum.value += term;
    squares += term * term;
    sum.absolute += std::fabs(term);
  }
  sum.scale = std::fabs(sum.value) + std::sqrt(squares) + kSmallest;
  sum.absolute += kSmallest;
  return sum;
}

void SizedRow::add(double probability, const Sized& factor, std::span<const double> vector) {
  const double weight = probability * factor.value;
  // A probability below the range of fp32 counts as the least one in range.
  const double least = std::fmax(probability, kSmallest);  // NaN is no size
  const double scale = least * factor.scale;
  const double absolute = least * factor.absolute;
  for (std::size_t d = 0; d < vector.size(); ++d) {
    value_[d] += weight * vector[d];
    squares_[d] += scale * vector[d] * scale * vector[d];
    absolute_[d] += absolute * std::fabs(vector[d]);
  }
}

void SizedRow::add_common(double scale, std::span<const double> mean) {
  for (std::size_t d = 0; d < mean.size(); ++d) common_[d] += scale * std::fabs(mean[d]);
}

void SizedRow::multiply(double by) {
  for (std::size_t d = 0; d < value_.size(); ++d) {
    value_[d] *= by;
    squares_[d] *= by * by;
    absolute_[d] *= std::fabs(by);
    common_[d] *= std::fabs(by);
  }
}

void ErrorMeasure::add(double found, double expected, double scale, double absolute, DType dtype) {
  if (found == expected ? !std::isfinite(found) : std::isnan(found) && std::isnan(expected)) return;
  // Where the result or an intermediate value overflows, anything that is not finite is right.
  const bool overflows = std::fabs(expected) > 0.99 * largest(dtype) ||
                         !(absolute < 0.25 * kLargestFloat);  // NaN: so does the sum
  if (!std::isfinite(found) && std::isfinite(expected) && overflows) return;
  ++count_;
  const double error = found - expected;
  error_ += std::isfinite(error) ? error * error : kInfinity;
  scale = std::fmax(scale, smallest_normal(dtype));
  scale_ += scale * scale;
  absolute_ += absolute * absolute;
}

double ErrorMeasure::relative() const {
  if (count_ == 0 || error_ == 0.0) return 0.0;
  return std::isfinite(error_) ? std::sqrt(error_ / scale_) : kInfinity;
}

double ErrorMeasure::cancellation() const {
  return scale_ > 0.0 ? std::sqrt(absolute_ / scale_) : 0.0;
}

void ScoreSizes::add(const Sized& dot, double scale, double lse, double probability) {
  overflows_ = overflows_ || !(std::fabs(scale) * dot.absolute < 0.25 * kLargestFloat);
  entries_.push_back({probability, std::fmax(std::fabs(scale) * dot.scale, std::fabs(lse))});
}

double ScoreSizes::largest() const {
  if (overflows_) return kInfinity;
  constexpr double kLeast = 0x1p-40;  // of the largest probability: far below any rounding
  double most = 0.0;
  for (const Entry& entry : entries_) most = std::fmax(most, entry.probability);
  double size = 0.0;
  for (const Entry& entry : entries_) {
    if (entry.probability >= kLeast * most) size = std::fmax(size, entry.size);
  }
  return size;
}

double allowed_error(DType dtype, double score, double cancellation) {
  // Several times the largest errors of random and adversarial inputs (sample_check_test.cpp). This
  // limit finds wrong results; `annulus verify` has tighter limits for accuracy.
  constexpr double kRoundings = 3.0;  // of the result; of P or dS, or of o in delta
  constexpr double kFloatRoundings = 32.0;
  constexpr double kScoreRoundings = 24.0;
  constexpr double kPartialSums = 4.0;
  const double rounding =
      dtype == DType::f32 ? kFloatRoundings * kFloatUnit : kRoundings * unit_of(dtype);
  // Above 2^24 a score has no fractional digits, and its probability no correct digit.
  const double allowed = rounding + std::expm1(kScoreRoundings * kFloatUnit * score) +
                         kPartialSums * kFloatUnit * cancellation;
  return std::isnan(allowed) ? kInfinity : allowed;
}

}  // namespace annulus::reference
