#include "support/problem.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdio>
#include <limits>
#include <map>
#include <mutex>
#include <random>
#include <utility>

#include "annulus/half.h"
#include "support/test_device.h"

namespace annulus::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kFloatLimit = 1e-6;
constexpr double kCudaFloatLimit = 2e-6;
constexpr double kLseLimit = 2e-6;
constexpr double kHalfLimit = 2.0;
constexpr double kHalfSinkLimit = 5.0;  // standard deviations of a few numbers
// A typical rounding error is 0.4 of half a unit in the last place, relative to the result; the
// scale is two to three times the result.
constexpr double kLeastRounding = 0.1;

float round_to(DType dtype, double value) {
  const auto narrow = static_cast<float>(value);
  switch (dtype) {
    case DType::bf16:
      return bf16_to_float(float_to_bf16(narrow));
    case DType::f16:
      return f16_to_float(float_to_f16(narrow));
    default:
      return narrow;
  }
}

// Sums of squares over elements where both sides are finite. Infinite if only one of them is.
double difference_rms(std::span<const float> actual, std::span<const double> expected) {
  if (actual.size() != expected.size()) return kInfinity;
  double sum = 0;
  double count = 0;
  for (std::size_t i = 0; i < actual.size(); ++i) {
    const double a = actual[i];
    const double e = expected[i];
    if (!std::isfinite(e)) {
      if (std::isnan(e) ? !std::isnan(a) : a != e) return kInfinity;
      continue;
    }
    if (!std::isfinite(a)) return kInfinity;
    sum += (a - e) * (a - e);
    count += 1;
  }
  return count > 0 ? std::sqrt(sum / count) : 0.0;
}

double ratio(double numerator, double denominator) {
  if (numerator == 0) return 0;
  return denominator > 0 ? numerator / denominator : kInfinity;
}

struct Worst {
  std::mutex mutex;
  std::map<std::string, std::pair<double, std::string>> values;
};

Worst& worst() {
  static Worst instance;
  return instance;
}

class PrintWorst : public ::testing::Environment {
 public:
  void TearDown() override {
    for (const auto& [what, entry] : worst().values) {
      std::printf("[  WORST   ] %s: %.3g (%s)\n", what.c_str(), entry.first, entry.second.c_str());
    }
  }
};

const ::testing::Environment* const kPrintWorst =
    ::testing::AddGlobalTestEnvironment(new PrintWorst);

}  // namespace

Inputs random_inputs(const Problem& problem, std::uint64_t seed, double deviation) {
  std::mt19937_64 engine(seed);
  std::normal_distribution<double> normal(0.0, deviation);
  const reference::Shape& s = problem.shape;
  const auto make = [&](std::int64_t tokens, int heads) {
    std::vector<double> values(static_cast<std::size_t>(s.batch * tokens * heads * s.head_dim));
    for (double& x : values) x = round_to(problem.dtype, normal(engine));
    return values;
  };
  Inputs inputs;
  inputs.q = make(s.tokens, s.q_heads);
  inputs.k = make(s.keys(), s.kv_heads);
  inputs.v = make(s.keys(), s.kv_heads);
  inputs.dout = make(s.tokens, s.q_heads);
  for (int h = 0; problem.sinks && h < s.q_heads; ++h) {
    const double draw = normal(engine) / deviation;
    // Some heads without one, and some where it outweighs most keys.
    inputs.sinks.push_back(
        std::fabs(draw) > 1.5 ? -kInfinity : static_cast<double>(static_cast<float>(4 * draw)));
  }
  inputs.dropout_seed = problem.softmax.dropout_seed;
  return inputs;
}

namespace {

// Backward's delta = rowsum(dO * O) comes from the o that forward has written. An error e of delta
// changes dS by -P e; the reference itself gives the sums over P that this changes: O with V = K,
// and dV with dO = e Q.
//
// Those of sinks are a handful of numbers, whose errors are no statistic: they are given the size
// that errors of o have in them.
reference::Gradients gradients_from_rounded_output(const Problem& p, const Inputs& in,
                                                   const Expected& expected) {
  reference::Gradients gradients = expected.gradients;
  const std::size_t heads = in.sinks.size();
  std::vector<double> squares(heads, 0.0);
  for (std::size_t i = 0; heads > 0 && i < in.q.size(); ++i) {
    const std::size_t row = i / static_cast<std::size_t>(p.shape.head_dim);
    const double rounding = round_to(p.dtype, expected.output.o[i]) - expected.output.o[i];
    if (rounding == 0) continue;
    const double weight = std::exp(in.sinks[row % heads] - expected.output.lse[row]);
    squares[row % heads] += std::pow(weight * in.dout[i] * rounding, 2);
  }
  for (std::size_t h = 0; h < heads; ++h) gradients.dsinks[h] += std::sqrt(squares[h]);
  if (p.mix == MixGradient::detached)
    return gradients;  // its deltas come from the outputs of the branches
  const auto dim = static_cast<std::size_t>(p.shape.head_dim);
  const double scale = p.scale.value_or(1.0 / std::sqrt(p.shape.head_dim));
  // Delta is subtracted from every pair, whatever dropout does to it. A softcap takes a bit off,
  // which is left out.
  const reference::SoftmaxOptions softmax{.softcap = p.softmax.softcap};
  const std::vector<double> mean_key =
      reference::forward(p.pattern, p.shape, in.q, in.k, in.k, p.scale, in.sinks, softmax).o;
  std::vector<double> error_times_q = in.q;
  for (std::size_t row = 0; row < in.q.size(); row += dim) {
    double error = 0;
    for (std::size_t i = row; i < row + dim; ++i) {
      error += in.dout[i] * (round_to(p.dtype, expected.output.o[i]) - expected.output.o[i]);
    }
    for (std::size_t i = row; i < row + dim; ++i) {
      gradients.dq[i] -= scale * error * mean_key[i] / p.pattern.output_scale;
      error_times_q[i] *= scale * error / p.pattern.output_scale;
    }
  }
  const reference::Gradients change = reference::backward(
      p.pattern, p.shape, in.q, in.k, in.v, error_times_q, p.mix, p.scale, in.sinks, softmax);
  for (std::size_t i = 0; i < gradients.dk.size(); ++i) gradients.dk[i] -= change.dv[i];
  return gradients;
}

}  // namespace

Expected reference_of(const Problem& p, const Inputs& in) {
  Expected expected{
      reference::forward(p.pattern, p.shape, in.q, in.k, in.v, p.scale, in.sinks, p.softmax),
      reference::backward(p.pattern, p.shape, in.q, in.k, in.v, in.dout, p.mix, p.scale, in.sinks,
                          p.softmax),
      reference::error_scales(p.pattern, p.shape, in.q, in.k, in.v, in.dout, p.mix, p.scale,
                              in.sinks, p.softmax),
      {}};
  if (p.dtype == DType::f32) return expected;
  const reference::Gradients gradients = gradients_from_rounded_output(p, in, expected);
  expected.one_piece = {rounded(expected.output.o, p.dtype),
                        rounded(expected.output.lse, DType::f32),
                        rounded(gradients.dq, p.dtype),
                        rounded(gradients.dk, p.dtype),
                        rounded(gradients.dv, p.dtype),
                        rounded(gradients.dsinks, DType::f32),
                        {}};
  return expected;
}

std::vector<const std::vector<float>*> members(const Results& r) {
  return {&r.o, &r.lse, &r.dq, &r.dk, &r.dv, &r.dsinks};
}

std::vector<const std::vector<double>*> members(const Expected& e) {
  return {&e.output.o,     &e.output.lse,   &e.gradients.dq,
          &e.gradients.dk, &e.gradients.dv, &e.gradients.dsinks};
}

std::string first_difference(const Results& a, const Results& b) {
  const auto left = members(a);
  const auto right = members(b);
  for (std::size_t m = 0; m < left.size(); ++m) {
    const std::string name = kResultNames[m];
    if (left[m]->size() != right[m]->size()) return name + " has another size";
    std::size_t different = 0;
    std::size_t first = 0;
    for (std::size_t i = 0; i < left[m]->size(); ++i) {
      const float x = (*left[m])[i];
      const float y = (*right[m])[i];
      if (std::bit_cast<std::uint32_t>(x) == std::bit_cast<std::uint32_t>(y) ||
          (std::isnan(x) && std::isnan(y)))
        continue;
      if (different++ == 0) first = i;
    }
    if (different == 0) continue;
    char text[160];
    std::snprintf(text, sizeof(text),
                  "%s differs in %zu of %zu elements, first [%zu]: %.9g and %.9g", name.c_str(),
                  different, left[m]->size(), first, static_cast<double>((*left[m])[first]),
                  static_cast<double>((*right[m])[first]));
    return text;
  }
  return "";
}

double rms(std::span<const double> values) {
  double sum = 0;
  double count = 0;
  for (const double x : values) {
    if (!std::isfinite(x)) continue;
    sum += x * x;
    count += 1;
  }
  return count > 0 ? std::sqrt(sum / count) : 0.0;
}

double relative_rms(std::span<const float> actual, std::span<const double> expected, double floor) {
  return ratio(difference_rms(actual, expected), std::max(rms(expected), floor));
}

std::vector<float> rounded(std::span<const double> values, DType dtype) {
  std::vector<float> out(values.size());
  for (std::size_t i = 0; i < values.size(); ++i) out[i] = round_to(dtype, values[i]);
  return out;
}

namespace {

// A log-sum-exp is a logarithm: 1 is its natural unit.
std::array<double, 6> scales_of(const Expected& expected) {
  const reference::Scales& s = expected.scales;
  return {rms(s.o),     std::max(1.0, rms(expected.output.lse)), rms(s.dq), rms(s.dk), rms(s.dv),
          rms(s.dsinks)};
}

}  // namespace

Errors errors_of(const Results& results, const Expected& expected) {
  const auto actual = members(results);
  const auto wanted = members(expected);
  const std::array<double, 6> scales = scales_of(expected);
  Errors errors;
  for (std::size_t m = 0; m < 6; ++m) {
    errors.value[m] = ratio(difference_rms(*actual[m], *wanted[m]), scales[m]);
  }
  return errors;
}

Errors error_ratios(const Problem& problem, const Results& results, const Expected& expected) {
  const auto actual = members(results);
  const auto one_piece = members(expected.one_piece);
  const auto wanted = members(expected);
  const std::array<double, 6> scales = scales_of(expected);
  // For problems whose gradients vanish or happen to be representable.
  const double least = kLeastRounding * (problem.dtype == DType::bf16 ? 0x1p-8 : 0x1p-11);
  Errors errors;
  for (std::size_t m = 0; m < 6; ++m) {
    const double error = difference_rms(*actual[m], *wanted[m]);
    // lse is always fp32.
    errors.value[m] =
        m == 1
            ? ratio(error, scales[m])
            : ratio(error, std::max(difference_rms(*one_piece[m], *wanted[m]), least * scales[m]));
  }
  return errors;
}

void expect_matches(const Problem& problem, const Results& results, const Expected& expected) {
  const bool wide = problem.dtype == DType::f32;
  const Errors errors =
      wide ? errors_of(results, expected) : error_ratios(problem, results, expected);
  for (std::size_t m = 0; m < 6; ++m) {
    const bool is_lse = m == 1;
    const double float_limit =
        test_device().kind == Device::Kind::cpu ? kFloatLimit : kCudaFloatLimit;
    const double half_limit = m == 5 ? kHalfSinkLimit : kHalfLimit;
    const double limit = is_lse ? kLseLimit : wide ? float_limit : half_limit;
    const char* const measure = wide || is_lse ? "relative RMS error" : "error / one-piece error";
    EXPECT_LE(errors.value[m], limit) << kResultNames[m] << ": " << measure;
    if (members(results)[m]->empty()) continue;
    note_worst(std::string(name_of(problem.dtype)) + " " + kResultNames[m] + " " + measure,
               errors.value[m]);
  }
}

void note_worst(const std::string& what, double value) {
  const std::lock_guard lock(worst().mutex);
  auto& entry = worst().values[what];
  if (!(value > entry.first)) return;
  entry.first = value;
  const auto* info = ::testing::UnitTest::GetInstance()->current_test_info();
  entry.second = info != nullptr ? info->name() : "";
}

Problem make_problem(std::string name, Pattern pattern, int kv_heads, std::int64_t tokens,
                     int head_dim, std::int64_t batch, MixGradient mix) {
  Problem problem;
  problem.name = std::move(name);
  problem.shape = {batch, tokens, pattern.heads, kv_heads, head_dim};
  problem.pattern = std::move(pattern);
  problem.mix = mix;
  return problem;
}

std::uint64_t seed_of(const std::string& name) {
  std::uint64_t hash = 14695981039346656037U;  // FNV-1a
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211U;
  return hash % 1'000'000;
}

}  // namespace annulus::test
