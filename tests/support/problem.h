#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "annulus/pattern.h"
#include "annulus/reference.h"
#include "annulus/ring_attention.h"
#include "annulus/tensor.h"
#include "kernels/reference/scales.h"

// The problem of a test as global tensors: random inputs, the oracle's results, and the measures
// that compare results with them.
namespace annulus::test {

using List = std::vector<std::int64_t>;
inline constexpr DType kDTypes[] = {DType::f32, DType::bf16, DType::f16};

// The problem, independent of the ring.
struct Problem {
  std::string name;
  Pattern pattern;
  reference::Shape shape;
  DType dtype = DType::f32;
  MixGradient mix = MixGradient::full;
  std::optional<double> scale;
  bool sinks = false;
  reference::SoftmaxOptions softmax;
};

// Global [batch, tokens, heads, head_dim]; every value is representable in the problem's dtype.
struct Inputs {
  std::vector<double> q, k, v, dout;
  std::vector<double> sinks;  // one per query head, or none
  std::uint64_t dropout_seed = 0;
};
[[nodiscard]] Inputs random_inputs(const Problem& problem, std::uint64_t seed,
                                   double deviation = 1.0);

// Global results, widened to fp32; lse is [batch, tokens, heads], dsinks [heads] or none.
struct Results {
  std::vector<float> o, lse, dq, dk, dv;
  std::vector<float> dsinks;
  std::vector<float> dsinks_of_ranks;  // [rank][head], of which dsinks is the sum
};

struct Expected {
  reference::Output output;
  reference::Gradients gradients;
  reference::Scales scales;  // the scales of errors
  // 16-bit problems: the reference for the inputs and outputs that an executor has. Outputs are
  // rounded to the dtype, and backward uses the rounded o for rowsum(dO * O).
  Results one_piece;
};
[[nodiscard]] Expected reference_of(const Problem& problem, const Inputs& inputs);

// Names of the tensors of Results in the order of members(), for messages.
inline constexpr const char* kResultNames[] = {"o", "lse", "dq", "dk", "dv", "dsinks"};
[[nodiscard]] std::vector<const std::vector<float>*> members(const Results& results);
[[nodiscard]] std::vector<const std::vector<double>*> members(const Expected& expected);
// Empty if every bit is equal, else the first difference. All NaNs are equal.
[[nodiscard]] std::string first_difference(const Results& a, const Results& b);

// Root mean square of actual - expected, over that of expected or `floor`, whichever is larger.
// Infinite if only one side is finite or infinities differ. NaN matches NaN.
[[nodiscard]] double relative_rms(std::span<const float> actual, std::span<const double> expected,
                                  double floor = 0.0);
[[nodiscard]] double rms(std::span<const double> values);  // of the finite ones
[[nodiscard]] std::vector<float> rounded(std::span<const double> values, DType dtype);

// fp32: root mean square of each result's error over that of its scale (kernels/reference/error.h).
struct Errors {
  double value[6] = {};  // as kResultNames
};
[[nodiscard]] Errors errors_of(const Results& results, const Expected& expected);
// 16 bit: error over that of Expected::one_piece.
[[nodiscard]] Errors error_ratios(const Problem& problem, const Results& results,
                                  const Expected& expected);

// Fails unless fp32 results are within 1e-6 of the oracle, and 16-bit ones within twice the error
// of rounding it. Worst values are printed when the program ends.
void expect_matches(const Problem& problem, const Results& results, const Expected& expected);
void note_worst(const std::string& what, double value);

// Presets with kv heads and shape in one call.
[[nodiscard]] Problem make_problem(std::string name, Pattern pattern, int kv_heads,
                                   std::int64_t tokens, int head_dim, std::int64_t batch = 1,
                                   MixGradient mix = MixGradient::full);

[[nodiscard]] std::uint64_t seed_of(const std::string& name);  // the same on every machine

}  // namespace annulus::test
