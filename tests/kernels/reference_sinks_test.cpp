// Sinks in the reference: a logit per head that takes part in the softmax and has no value.

#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "annulus/error.h"
#include "annulus/reference.h"
#include "kernels/reference/rows.h"
#include "kernels/reference/scales.h"

namespace annulus::reference {
namespace {

using Values = std::vector<double>;
using List = std::vector<std::int64_t>;
constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

struct Case {
  Pattern pattern;
  Shape shape;
  Values q, k, v, dout, sinks;

  [[nodiscard]] Output forward() const {
    return reference::forward(pattern, shape, q, k, v, std::nullopt, sinks);
  }
  [[nodiscard]] Gradients backward(MixGradient mix = MixGradient::full) const {
    return reference::backward(pattern, shape, q, k, v, dout, mix, std::nullopt, sinks);
  }
};

Case make_case(const Pattern& pattern, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  const auto values = [&](std::int64_t count) {
    Values out(static_cast<std::size_t>(count));
    for (double& x : out) x = normal(random);
    return out;
  };
  const Shape shape{
      .batch = 2, .tokens = 9, .q_heads = pattern.heads, .kv_heads = 2, .head_dim = 3};
  const std::int64_t rows = shape.batch * shape.tokens * shape.head_dim;
  return {pattern,          shape,    values(rows * 4), values(rows * 2), values(rows * 2),
          values(rows * 4), values(4)};
}

// Four heads, of which one may be missing from a branch, and rows that attend to nothing.
std::vector<Pattern> patterns() {
  Pattern absent = longnet(4, List{4, 9}, List{2, 3}, true, Offsets::interleaved, true);
  absent.branches[0].offset[1] = -1;
  absent.branches[1].offset[3] = -1;
  return {dense(4), dense(4, true), longnet(4, List{3, 9}, List{1, 2}, true),
          head_groups(4, List{4, 9}, List{1, 3}, true, true), absent};
}

// The softmax of a row's scores with the sink behind them, whose column is dropped.
TEST(ReferenceSinks, AreAColumnOfTheSoftmaxThatIsDropped) {
  for (const Pattern& pattern : patterns()) {
    SCOPED_TRACE(pattern.name);
    const Case c = make_case(pattern, 1);
    const Output out = c.forward();
    const Shape& s = c.shape;
    std::size_t row = 0;
    for (std::int64_t b = 0; b < s.batch; ++b) {
      for (std::int64_t t = 0; t < s.tokens; ++t) {
        for (int h = 0; h < s.q_heads; ++h, ++row) {
          double sum = std::exp(c.sinks[static_cast<std::size_t>(h)]);
          Values o(3, 0.0);
          for (const Branch& branch : pattern.branches) {
            for (std::int64_t p = 0; p < s.tokens; ++p) {
              if (!pattern.allows(branch, h, t, p)) continue;
              const auto key = static_cast<std::size_t>(((b * s.tokens + p) * 2 + h / 2) * 3);
              double score = 0;
              for (std::size_t d = 0; d < 3; ++d) score += c.q[row * 3 + d] * c.k[key + d];
              const double weight = std::exp(score / std::sqrt(3.0));
              sum += weight;
              for (std::size_t d = 0; d < 3; ++d) o[d] += weight * c.v[key + d];
            }
          }
          EXPECT_NEAR(out.lse[row], std::log(sum), 1e-13);
          for (std::size_t d = 0; d < 3; ++d) {
            EXPECT_NEAR(out.o[row * 3 + d], o[d] / sum * pattern.output_scale, 1e-13);
          }
        }
      }
    }
  }
}

void expect_derivatives(Case c, const Gradients& gradients,
                        const std::function<double(const Case&)>& loss) {
  const std::pair<Values Case::*, const Values*> all[] = {{&Case::q, &gradients.dq},
                                                          {&Case::k, &gradients.dk},
                                                          {&Case::v, &gradients.dv},
                                                          {&Case::sinks, &gradients.dsinks}};
  for (const auto& [member, gradient] : all) {
    Values& values = c.*member;
    ASSERT_EQ(gradient->size(), values.size());
    for (std::size_t i = 0; i < values.size(); ++i) {
      constexpr double kStep = 1e-5;
      const double old = values[i];
      values[i] = old + kStep;
      const double above = loss(c);
      values[i] = old - kStep;
      const double below = loss(c);
      values[i] = old;
      EXPECT_NEAR((*gradient)[i], (above - below) / (2 * kStep), 1e-8) << "element " << i;
    }
  }
}

double dot(const Values& a, const Values& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

TEST(ReferenceSinks, GradientsEqualNumericalDifferentiation) {
  unsigned seed = 2;
  for (const Pattern& pattern : patterns()) {
    SCOPED_TRACE(pattern.name);
    const Case c = make_case(pattern, seed++);
    expect_derivatives(c, c.backward(), [](const Case& x) { return dot(x.dout, x.forward().o); });
  }
}

// O' = exp(L - L') sum_b w_b O_b, where detached mixing holds w_b = exp(L_b - L), the weights of
// the branches among themselves, and nothing else.
TEST(ReferenceSinks, DetachedGradientsEqualDifferentiationWithFrozenBranchWeights) {
  unsigned seed = 20;
  for (const Pattern& pattern : patterns()) {
    SCOPED_TRACE(pattern.name);
    const Case c = make_case(pattern, seed++);
    const auto branch_outputs = [](const Case& x) {
      std::vector<Output> out;
      for (const Branch& branch : x.pattern.branches) {
        const Pattern single{"one", x.pattern.heads, x.pattern.causal, {branch}, 1.0};
        out.push_back(forward(single, x.shape, x.q, x.k, x.v));
      }
      return out;
    };
    const std::vector<Output> frozen = branch_outputs(c);
    const auto loss = [&](const Case& x) {
      const std::vector<Output> branches = branch_outputs(x);
      double sum = 0;
      for (std::size_t row = 0; row < frozen[0].lse.size(); ++row) {
        double keys = 0;  // exp(L), and as it was
        double frozen_keys = 0;
        for (std::size_t b = 0; b < branches.size(); ++b) {
          keys += std::exp(branches[b].lse[row]);
          frozen_keys += std::exp(frozen[b].lse[row]);
        }
        if (keys == 0) continue;
        const double kept = keys / (keys + std::exp(x.sinks[row % 4]));
        for (std::size_t b = 0; b < branches.size(); ++b) {
          const double weight = kept * std::exp(frozen[b].lse[row]) / frozen_keys;
          for (std::size_t d = row * 3; d < row * 3 + 3; ++d)
            sum += x.pattern.output_scale * x.dout[d] * weight * branches[b].o[d];
        }
      }
      return sum;
    };
    EXPECT_NEAR(loss(c), dot(c.dout, c.forward().o), 1e-12);
    expect_derivatives(c, c.backward(MixGradient::detached), loss);
  }
}

// One branch has nothing to mix.
TEST(ReferenceSinks, DetachedMixingOfOneBranchIsTheExactGradient) {
  const Case c = make_case(dense(4, true), 40);
  const Gradients full = c.backward();
  const Gradients detached = c.backward(MixGradient::detached);
  for (const auto member : {&Gradients::dq, &Gradients::dk, &Gradients::dv, &Gradients::dsinks}) {
    for (std::size_t i = 0; i < (full.*member).size(); ++i)
      EXPECT_NEAR((full.*member)[i], (detached.*member)[i], 1e-13);
  }
}

TEST(ReferenceSinks, MinusInfinityIsNoSink) {
  for (const Pattern& pattern : patterns()) {
    SCOPED_TRACE(pattern.name);
    Case c = make_case(pattern, 50);
    c.sinks.assign(4, -kInf);
    Case without = c;
    without.sinks.clear();
    EXPECT_EQ(c.forward().o, without.forward().o);
    EXPECT_EQ(c.forward().lse, without.forward().lse);
    for (const MixGradient mix : {MixGradient::full, MixGradient::detached}) {
      EXPECT_EQ(c.backward(mix).dq, without.backward(mix).dq);
      EXPECT_EQ(c.backward(mix).dk, without.backward(mix).dk);
      EXPECT_EQ(c.backward(mix).dsinks, Values(4, 0.0));
    }
    EXPECT_TRUE(without.backward().dsinks.empty());
  }
}

// O is 0 whatever the sink, so nothing depends on it; not even NaNs in the output's gradient.
TEST(ReferenceSinks, RowsWithoutKeysAreZeroAndHaveTheSinkAsLogSumExp) {
  Case c = make_case(Pattern{"odd", 4, false, {Branch{kWholeSequence, 2, {1, 1, 1, -1}}}, 1.0}, 60);
  for (std::size_t i = 0; i < c.dout.size(); ++i) {
    const std::size_t row = i / 3;
    if (row % 4 == 3 || row / 4 % 9 % 2 == 0) c.dout[i] = kNaN;
  }
  const Output out = c.forward();
  for (const MixGradient mix : {MixGradient::full, MixGradient::detached}) {
    const Gradients gradients = c.backward(mix);
    for (std::size_t row = 0; row < out.lse.size(); ++row) {
      if (row % 4 != 3 && row / 4 % 9 % 2 == 1) continue;
      EXPECT_EQ(out.lse[row], c.sinks[row % 4]);
      for (std::size_t d = row * 3; d < row * 3 + 3; ++d) {
        EXPECT_EQ(out.o[d], 0.0);
        EXPECT_EQ(gradients.dq[d], 0.0);
      }
    }
    for (const double x : gradients.dsinks) EXPECT_TRUE(std::isfinite(x));
    EXPECT_EQ(gradients.dsinks[3], 0.0);
  }
}

TEST(ReferenceSinks, NaNAndPlusInfinityPoisonEveryRowOfTheirHead) {
  for (const double bad : {kNaN, kInf}) {
    for (const Pattern& pattern : patterns()) {
      Case c = make_case(pattern, 70);
      const Output good = c.forward();
      c.sinks[1] = bad;
      const Output out = c.forward();
      for (std::size_t row = 0; row < out.lse.size(); ++row) {
        if (row % 4 == 1) {
          EXPECT_TRUE(std::isnan(out.lse[row]));
          for (std::size_t d = 0; d < 3; ++d) EXPECT_TRUE(std::isnan(out.o[row * 3 + d]));
        } else {
          EXPECT_EQ(out.lse[row], good.lse[row]);
        }
      }
    }
  }
}

TEST(ReferenceSinks, SingleRowsAreThoseOfTheWhole) {
  for (const Pattern& pattern : patterns()) {
    for (const MixGradient mix : {MixGradient::full, MixGradient::detached}) {
      SCOPED_TRACE(pattern.name);
      const Case c = make_case(pattern, 80);
      const Output out = c.forward();
      const Gradients gradients = c.backward(mix);
      const RowProblem problem =
          row_problem(pattern, c.shape, c.q, c.k, c.v, c.dout, mix, std::nullopt, c.sinks);
      std::vector<QueryRow> rows;
      Values dsinks(4, 0.0);
      const auto expect = [](const SizedRow& row, const Values& whole, std::size_t index) {
        for (std::size_t d = 0; d < 3; ++d)
          EXPECT_NEAR(row.value()[d], whole[index * 3 + d], 1e-12);
      };
      for (std::size_t row = 0; row < out.lse.size(); ++row) {
        const auto at = static_cast<std::int64_t>(row);
        const Place place{at / 36, at / 4 % 9, static_cast<int>(at % 4)};
        const QueryRow& query = rows.emplace_back(query_row(problem, place));
        EXPECT_NEAR(query.lse, out.lse[row], 1e-12);
        expect(query.o, out.o, row);
        expect(query.dq, gradients.dq, row);
        dsinks[row % 4] += query.dsink.value;
      }
      for (std::size_t h = 0; h < 4; ++h) EXPECT_NEAR(dsinks[h], gradients.dsinks[h], 1e-12);
      for (std::size_t row = 0; row < 36; ++row) {
        const auto at = static_cast<std::int64_t>(row);
        const KeyRow key = key_row(problem, {at / 18, at / 2 % 9, static_cast<int>(at % 2)},
                                   [&](const Place& query, std::size_t branch) {
                                     const QueryRow& of = rows[static_cast<std::size_t>(
                                         (query.batch * 9 + query.position) * 4 + query.head)];
                                     return QueryState{of.lse, of.deltas[branch]};
                                   });
        expect(key.dk, gradients.dk, row);
        expect(key.dv, gradients.dv, row);
      }
      const Scales scales =
          error_scales(pattern, c.shape, c.q, c.k, c.v, c.dout, mix, std::nullopt, c.sinks);
      for (std::size_t h = 0; h < 4; ++h)
        EXPECT_GE(scales.dsinks[h], std::abs(gradients.dsinks[h]) * (1 - 1e-12));
    }
  }
}

TEST(ReferenceSinks, ThereIsOnePerQueryHead) {
  Case c = make_case(dense(4), 90);
  c.sinks.pop_back();
  EXPECT_THROW(static_cast<void>(c.forward()), ConfigError);
  EXPECT_THROW(static_cast<void>(c.backward()), ConfigError);
}

}  // namespace
}  // namespace annulus::reference
