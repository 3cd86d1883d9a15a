#include "annulus/reference.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <functional>
#include <limits>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "annulus/error.h"

namespace annulus::reference {
namespace {

using Values = std::vector<double>;
using List = std::vector<std::int64_t>;
constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

std::size_t at(std::int64_t index) { return static_cast<std::size_t>(index); }

struct Case {
  Pattern pattern;
  Shape shape;
  Values q, k, v, dout;

  [[nodiscard]] Output forward() const { return reference::forward(pattern, shape, q, k, v); }
  [[nodiscard]] Gradients backward(MixGradient mix = MixGradient::full) const {
    return reference::backward(pattern, shape, q, k, v, dout, mix);
  }
  // Index of [batch, token, head, 0].
  [[nodiscard]] std::int64_t index(std::int64_t b, std::int64_t t, int head, int heads) const {
    return ((b * shape.tokens + t) * heads + head) * shape.head_dim;
  }
  [[nodiscard]] int kv_head(int q_head) const { return q_head * shape.kv_heads / shape.q_heads; }
  // How often key p counts for query t: the number of branches that allow the pair, straight from
  // section 1 of the design and not by Pattern::allows.
  [[nodiscard]] int multiplicity(int head, std::int64_t t, std::int64_t p) const {
    int count = 0;
    for (const Branch& branch : pattern.branches) {
      const std::int64_t w = branch.segment_length;
      const std::int64_t r = branch.dilation;
      const std::int64_t o = branch.offset[at(head)];
      if (t / w == p / w && t % w % r == o && p % w % r == o && (!pattern.causal || p <= t))
        ++count;
    }
    return count;
  }
};

Values random_values(std::mt19937& random, std::int64_t count) {
  std::normal_distribution<double> normal;
  Values values(at(count));
  for (double& value : values) value = normal(random);
  return values;
}

Case make_case(const Pattern& pattern, const Shape& shape, std::mt19937& random) {
  const std::int64_t q_size = shape.batch * shape.tokens * shape.q_heads * shape.head_dim;
  const std::int64_t kv_size = shape.batch * shape.tokens * shape.kv_heads * shape.head_dim;
  return {pattern,
          shape,
          random_values(random, q_size),
          random_values(random, kv_size),
          random_values(random, kv_size),
          random_values(random, q_size)};
}

Case make_case(const Pattern& pattern, const Shape& shape, unsigned seed = 1) {
  std::mt19937 random(seed);
  return make_case(pattern, shape, random);
}

// Up to three branches of arbitrary geometry; heads may be missing from some or all of them.
Case random_case(unsigned seed, std::int64_t max_tokens) {
  std::mt19937 random(seed);
  const auto draw = [&](std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(random);
  };
  Shape shape;
  shape.batch = draw(1, 2);
  shape.tokens = draw(1, max_tokens);
  shape.kv_heads = static_cast<int>(draw(1, 2));
  shape.q_heads = shape.kv_heads * static_cast<int>(draw(1, 3));
  shape.head_dim = static_cast<int>(draw(1, 4));
  Pattern pattern{"random", shape.q_heads, draw(0, 1) == 1, {}, draw(0, 1) == 1 ? 1.0 : 0.5};
  const std::int64_t branches = draw(1, 3);
  for (std::int64_t b = 0; b < branches; ++b) {
    Branch branch;
    branch.segment_length = draw(0, 4) == 0 ? kWholeSequence : draw(1, shape.tokens + 2);
    branch.dilation = draw(0, 5) == 0 ? draw(1, shape.tokens + 2) : draw(1, 3);
    for (int h = 0; h < shape.q_heads; ++h) branch.offset.push_back(draw(-1, branch.dilation - 1));
    pattern.branches.push_back(branch);
  }
  return make_case(pattern, shape, random);
}

// The second opinion: per (batch, head) a dense N x N matrix of weights multiplicity * exp(S), one
// softmax over the multiset, no branches, no log-sum-exp merge, no maximum.
Output brute_force(const Case& c, double scale) {
  const std::int64_t n = c.shape.tokens;
  const int hq = c.shape.q_heads;
  const int hkv = c.shape.kv_heads;
  Output out;
  out.o.resize(c.q.size());
  out.lse.resize(at(c.shape.batch * n * hq));
  for (std::int64_t b = 0; b < c.shape.batch; ++b) {
    for (int h = 0; h < hq; ++h) {
      std::vector<long double> weight(at(n * n));
      for (std::int64_t t = 0; t < n; ++t) {
        for (std::int64_t p = 0; p < n; ++p) {
          long double score = 0;
          for (int d = 0; d < c.shape.head_dim; ++d) {
            score += static_cast<long double>(c.q[at(c.index(b, t, h, hq) + d)]) *
                     c.k[at(c.index(b, p, c.kv_head(h), hkv) + d)];
          }
          weight[at(t * n + p)] = c.multiplicity(h, t, p) * std::exp(score * scale);
        }
      }
      for (std::int64_t t = 0; t < n; ++t) {
        long double sum = 0;
        for (std::int64_t p = 0; p < n; ++p) sum += weight[at(t * n + p)];
        out.lse[at((b * n + t) * hq + h)] = static_cast<double>(std::log(sum));
        for (int d = 0; d < c.shape.head_dim && sum > 0; ++d) {
          long double o = 0;
          for (std::int64_t p = 0; p < n; ++p) {
            o += weight[at(t * n + p)] * c.v[at(c.index(b, p, c.kv_head(h), hkv) + d)];
          }
          out.o[at(c.index(b, t, h, hq) + d)] =
              static_cast<double>(o / sum * c.pattern.output_scale);
        }
      }
    }
  }
  return out;
}

void expect_close(const Values& found, const Values& expected, double tolerance) {
  ASSERT_EQ(found.size(), expected.size());
  for (std::size_t i = 0; i < found.size(); ++i) {
    if (found[i] == expected[i]) continue;  // also equal infinities
    ASSERT_NEAR(found[i], expected[i], tolerance * std::max(1.0, std::abs(expected[i])))
        << "element " << i;
  }
}

double default_scale(const Case& c) { return std::pow(c.shape.head_dim, -0.5); }

TEST(Reference, EqualsBruteForceOverAllPairs) {
  for (unsigned seed = 1; seed <= 200; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const Case c = random_case(seed, 24);
    const Output found = c.forward();
    const Output expected = brute_force(c, default_scale(c));
    expect_close(found.o, expected.o, 1e-12);
    expect_close(found.lse, expected.lse, 1e-12);
  }
}

TEST(Reference, PresetsEqualBruteForceOverAllPairs) {
  const List segments = {5, 16, 64};
  const List dilations = {1, 2, 4};
  for (const bool causal : {false, true}) {
    for (const Pattern& pattern :
         {dense(6, causal), head_groups(6, segments, dilations, causal, true),
          longnet(6, segments, dilations, causal),
          longnet(6, segments, dilations, causal, Offsets::interleaved)}) {
      SCOPED_TRACE(pattern.name + (causal ? " causal" : " full"));
      const Case c = make_case(pattern, Shape{2, 50, 6, 2, 8});
      const Output found = c.forward();
      const Output expected = brute_force(c, default_scale(c));
      expect_close(found.o, expected.o, 1e-12);
      expect_close(found.lse, expected.lse, 1e-12);
    }
  }
}

TEST(Reference, GivenScaleReplacesTheDefaultAndLargeScoresDoNotOverflow) {
  Case c = make_case(longnet(2, List{4, 16}, List{1, 2}), Shape{1, 16, 2, 1, 4});
  for (const double scale : {0.0, -0.3, 40.0}) {
    SCOPED_TRACE("scale " + std::to_string(scale));
    const Output found = forward(c.pattern, c.shape, c.q, c.k, c.v, scale);
    const Output expected = brute_force(c, scale);
    expect_close(found.o, expected.o, 1e-11);
    expect_close(found.lse, expected.lse, 1e-12);
  }
  // Scores of thousands, beyond the range of exp: one key wins all.
  for (double& x : c.q) x *= 1e4;
  const Output output = c.forward();
  for (const double x : output.o) EXPECT_TRUE(std::isfinite(x));
  for (const double x : output.lse) EXPECT_TRUE(std::isfinite(x));
  for (const double x : c.backward().dk) EXPECT_TRUE(std::isfinite(x));
}

TEST(Reference, KeySelectedByTwoBranchesCountsTwice) {
  // Branch 0 gives query 0 the keys 0 and 1, branch 1 the keys 0 and 2: the multiset 0, 0, 1, 2.
  Pattern pattern{"twice", 1, false, {Branch{2, 1, {0}}, Branch{4, 2, {0}}}, 1.0};
  const Case c{pattern, Shape{1, 4, 1, 1, 1}, {0, 0, 0, 0}, {9, 9, 9, 9}, {4, 8, 20, 100}, {}};
  const Output output = c.forward();
  EXPECT_NEAR(output.o[0], (4 + 4 + 8 + 20) / 4.0, 1e-14);
  EXPECT_NEAR(output.lse[0], std::log(4.0), 1e-14);
  EXPECT_NEAR(output.o[1], (4 + 8) / 2.0, 1e-14);  // odd positions are in branch 0 only
  EXPECT_NEAR(output.lse[1], std::log(2.0), 1e-14);
}

TEST(Reference, QueryHeadsShareKeyValueHeadsInContiguousGroups) {
  const Case c{dense(4), Shape{1, 1, 4, 2, 1}, {1, 2, 3, 4}, {5, 6}, {7, 8}, {}};
  EXPECT_EQ(c.forward().o, (Values{7, 7, 8, 8}));
}

TEST(Reference, OutputScaleMultipliesOutputAndGradientsButNotLse) {
  Case c = make_case(longnet(2, List{3, 9}, List{1, 2}), Shape{1, 9, 2, 1, 3});
  for (const MixGradient mix : {MixGradient::full, MixGradient::detached}) {
    c.pattern.output_scale = 1.0;
    const Output plain = c.forward();
    const Gradients gradients = c.backward(mix);
    c.pattern.output_scale = 0.25;  // a power of two: exact
    const Output scaled = c.forward();
    const Gradients scaled_gradients = c.backward(mix);
    const auto quarter = [](Values values) {
      for (double& x : values) x *= 0.25;
      return values;
    };
    EXPECT_EQ(scaled.o, quarter(plain.o));
    EXPECT_EQ(scaled.lse, plain.lse);
    EXPECT_EQ(scaled_gradients.dq, quarter(gradients.dq));
    EXPECT_EQ(scaled_gradients.dk, quarter(gradients.dk));
    EXPECT_EQ(scaled_gradients.dv, quarter(gradients.dv));
  }
}

double dot(const Values& a, const Values& b) {
  double sum = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

// Central differences of `loss` in every element of `values`, which must belong to its case. The
// step balances truncation (step^2) against rounding (1e-16 / step).
Values differentiate(Values& values, const std::function<double()>& loss) {
  constexpr double kStep = 1e-5;
  Values gradient;
  for (double& value : values) {
    const double base = value;
    value = base + kStep;
    const double up = loss();
    value = base - kStep;
    const double down = loss();
    value = base;
    gradient.push_back((up - down) / (2.0 * kStep));
  }
  return gradient;
}

void expect_gradients(Case& c, MixGradient mix, const std::function<double()>& loss) {
  const Gradients found = c.backward(mix);
  expect_close(found.dq, differentiate(c.q, loss), 1e-7);
  expect_close(found.dk, differentiate(c.k, loss), 1e-7);
  expect_close(found.dv, differentiate(c.v, loss), 1e-7);
}

// The outputs of each branch on its own, before output_scale.
std::vector<Output> branch_outputs(const Case& c) {
  std::vector<Output> outputs;
  for (const Branch& branch : c.pattern.branches) {
    const Pattern alone{"alone", c.pattern.heads, c.pattern.causal, {branch}, 1.0};
    outputs.push_back(forward(alone, c.shape, c.q, c.k, c.v));
  }
  return outputs;
}

// exp(L_b - L) per branch and row; 0 where the branch is empty.
std::vector<Values> branch_weights(const Case& c) {
  const Output merged = c.forward();
  std::vector<Values> weights;
  for (const Output& branch : branch_outputs(c)) {
    weights.emplace_back();
    for (std::size_t row = 0; row < branch.lse.size(); ++row) {
      weights.back().push_back(
          branch.lse[row] == -kInf ? 0.0 : std::exp(branch.lse[row] - merged.lse[row]));
    }
  }
  return weights;
}

Values mix_branches(const Case& c, const std::vector<Values>& weights) {
  const std::vector<Output> branches = branch_outputs(c);
  Values o(c.q.size(), 0.0);
  for (std::size_t b = 0; b < branches.size(); ++b) {
    for (std::size_t i = 0; i < o.size(); ++i) {
      o[i] += c.pattern.output_scale * weights[b][i / at(c.shape.head_dim)] * branches[b].o[i];
    }
  }
  return o;
}

TEST(Reference, FullGradientEqualsNumericalDifferentiation) {
  for (unsigned seed = 1; seed <= 60; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Case c = random_case(seed, 10);
    expect_gradients(c, MixGradient::full, [&] { return dot(c.dout, c.forward().o); });
  }
}

TEST(Reference, DetachedGradientEqualsDifferentiationWithFrozenBranchWeights) {
  for (unsigned seed = 1; seed <= 60; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Case c = random_case(seed, 10);
    const std::vector<Values> frozen = branch_weights(c);
    expect_close(mix_branches(c, frozen), c.forward().o, 1e-12);
    expect_gradients(c, MixGradient::detached,
                     [&] { return dot(c.dout, mix_branches(c, frozen)); });
  }
}

TEST(Reference, GradientsOfPresetsEqualNumericalDifferentiation) {
  for (const bool causal : {false, true}) {
    SCOPED_TRACE(causal ? "causal" : "full");
    Case c = make_case(longnet(4, List{3, 6, 12}, List{1, 2, 3}, causal), Shape{1, 11, 4, 2, 3});
    expect_gradients(c, MixGradient::full, [&] { return dot(c.dout, c.forward().o); });
    const std::vector<Values> frozen = branch_weights(c);
    expect_gradients(c, MixGradient::detached,
                     [&] { return dot(c.dout, mix_branches(c, frozen)); });
  }
}

TEST(Reference, DetachingChangesGradientsOnlyWhereBranchesMix) {
  const Shape shape{1, 12, 2, 2, 3};
  const Case groups = make_case(head_groups(2, List{4, 12}, List{1, 2}), shape);
  expect_close(groups.backward(MixGradient::detached).dq, groups.backward().dq, 1e-13);
  expect_close(groups.backward(MixGradient::detached).dk, groups.backward().dk, 1e-13);

  const Case mixed = make_case(longnet(2, List{4, 12}, List{1, 2}), shape);
  const Gradients full = mixed.backward();
  const Gradients detached = mixed.backward(MixGradient::detached);
  EXPECT_EQ(full.dv, detached.dv);  // the weights do not depend on v
  double difference = 0.0;
  for (std::size_t i = 0; i < full.dq.size(); ++i) {
    difference = std::max(difference, std::abs(full.dq[i] - detached.dq[i]));
  }
  EXPECT_GT(difference, 1e-3);
}

// Whether elements `head_dim * row ...` of two tensors are the same, bit for bit.
bool same_row(const Values& a, const Values& b, std::int64_t first, int count) {
  return std::equal(a.begin() + first, a.begin() + first + count, b.begin() + first);
}

TEST(Reference, CausalRowsIgnoreFutureKeysAndValues) {
  for (unsigned seed = 1; seed <= 20; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Case c = random_case(seed, 12);
    c.pattern.causal = true;
    const Output base = c.forward();
    const Gradients base_gradients = c.backward();
    const int dim = c.shape.head_dim;
    for (std::int64_t p = 0; p < c.shape.tokens; ++p) {
      Case changed = c;
      for (std::int64_t b = 0; b < c.shape.batch; ++b) {
        const std::int64_t row = c.index(b, p, 0, c.shape.kv_heads);
        for (std::int64_t i = row; i < row + c.shape.kv_heads * dim; ++i) {
          changed.k[at(i)] = -3.0;
          changed.v[at(i)] = 50.0;
        }
      }
      const Output output = changed.forward();
      const Gradients gradients = changed.backward();
      for (std::int64_t b = 0; b < c.shape.batch; ++b) {
        const std::int64_t begin = c.index(b, 0, 0, c.shape.q_heads);
        const int count = static_cast<int>(p) * c.shape.q_heads * dim;  // all rows before p
        EXPECT_TRUE(same_row(output.o, base.o, begin, count)) << "key " << p;
        EXPECT_TRUE(same_row(output.lse, base.lse, begin / dim, count / dim)) << "key " << p;
        EXPECT_TRUE(same_row(gradients.dq, base_gradients.dq, begin, count)) << "key " << p;
      }
    }
  }
}

TEST(Reference, CausalKeysGetNoGradientFromEarlierQueries) {
  Case c = make_case(longnet(2, List{4, 16}, List{1, 2}, true), Shape{1, 13, 2, 1, 3});
  constexpr std::int64_t kFirst = 6;
  std::fill(c.dout.begin() + c.index(0, kFirst, 0, 2), c.dout.end(), 0.0);
  const Gradients gradients = c.backward();
  for (std::size_t i = at(c.index(0, kFirst, 0, 1)); i < gradients.dk.size(); ++i) {
    EXPECT_EQ(gradients.dk[i], 0.0);
    EXPECT_EQ(gradients.dv[i], 0.0);
  }
}

TEST(Reference, RowsThatAttendNothingAreZeroWithoutGradient) {
  // Odd positions are selected by nothing; head 1 is in no branch.
  const Pattern pattern{"holes", 2, false, {Branch{4, 2, {0, -1}}, Branch{8, 4, {0, -1}}}, 1.0};
  Case c = make_case(pattern, Shape{1, 8, 2, 2, 2});
  // Whatever such a row holds must not leak either.
  for (std::int64_t t = 0; t < 8; ++t) {
    for (int h = 0; h < 2; ++h) {
      if (t % 2 == 0 && h == 0) continue;
      for (int d = 0; d < 2; ++d) {
        const std::size_t i = at(c.index(0, t, h, 2) + d);
        c.q[i] = c.k[i] = c.v[i] = c.dout[i] = d == 0 ? kNaN : kInf;
      }
    }
  }
  const Output output = c.forward();
  for (const MixGradient mix : {MixGradient::full, MixGradient::detached}) {
    const Gradients gradients = c.backward(mix);
    for (std::int64_t t = 0; t < 8; ++t) {
      for (int h = 0; h < 2; ++h) {
        const bool empty = t % 2 == 1 || h == 1;
        EXPECT_EQ(output.lse[at(t * 2 + h)] == -kInf, empty) << "token " << t << " head " << h;
        for (int d = 0; d < 2; ++d) {
          const std::size_t i = at(c.index(0, t, h, 2) + d);
          for (const Values* values : {&output.o, &gradients.dq, &gradients.dk, &gradients.dv}) {
            EXPECT_TRUE(std::isfinite((*values)[i])) << "token " << t << " head " << h;
            EXPECT_EQ((*values)[i] == 0.0, empty) << "token " << t << " head " << h;
          }
        }
      }
    }
  }
}

TEST(Reference, NaNKeyPoisonsExactlyTheRowsThatAttendIt) {
  for (unsigned seed = 1; seed <= 20; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const Case c = random_case(seed, 12);
    const int dim = c.shape.head_dim;
    const int hq = c.shape.q_heads;
    const int hkv = c.shape.kv_heads;
    const std::int64_t n = c.shape.tokens;
    const Output base = c.forward();
    const Gradients base_gradients = c.backward();
    for (std::int64_t p = 0; p < n; ++p) {
      for (int kv = 0; kv < hkv; ++kv) {
        SCOPED_TRACE("key " + std::to_string(p) + " of key/value head " + std::to_string(kv));
        Case poisoned = c;
        poisoned.k[at(c.index(0, p, kv, hkv))] = kNaN;
        const Output output = poisoned.forward();
        const Gradients gradients = poisoned.backward();
        // Keys whose gradient a poisoned query reaches, in batch 0.
        std::vector<bool> reached(at(n * hkv), false);
        for (std::int64_t row = 0; row < c.shape.batch * n * hq; ++row) {
          const std::int64_t t = row / hq % n;
          const int h = static_cast<int>(row % hq);
          const bool hit = row < n * hq && c.kv_head(h) == kv && c.multiplicity(h, t, p) > 0;
          for (std::int64_t key = 0; hit && key < n; ++key) {
            if (c.multiplicity(h, t, key) > 0) reached[at(key * hkv + kv)] = true;
          }
          EXPECT_EQ(std::isnan(output.lse[at(row)]), hit) << "row " << row;
          EXPECT_EQ(std::isnan(output.o[at(row * dim)]), hit) << "row " << row;
          EXPECT_EQ(std::isnan(gradients.dq[at(row * dim)]), hit) << "row " << row;
          if (hit) continue;
          EXPECT_EQ(output.lse[at(row)], base.lse[at(row)]);
          EXPECT_TRUE(same_row(output.o, base.o, row * dim, dim)) << "row " << row;
          EXPECT_TRUE(same_row(gradients.dq, base_gradients.dq, row * dim, dim)) << "row " << row;
        }
        for (std::int64_t row = 0; row < c.shape.batch * n * hkv; ++row) {
          const bool hit = row < n * hkv && reached[at(row)];
          EXPECT_EQ(std::isnan(gradients.dk[at(row * dim)]), hit) << "key row " << row;
          EXPECT_EQ(std::isnan(gradients.dv[at(row * dim)]), hit) << "key row " << row;
          if (hit) continue;
          EXPECT_TRUE(same_row(gradients.dk, base_gradients.dk, row * dim, dim)) << row;
          EXPECT_TRUE(same_row(gradients.dv, base_gradients.dv, row * dim, dim)) << row;
        }
      }
    }
  }
}

TEST(Reference, RowsWhoseScoresAreAllMinusInfinityAreEmpty) {
  Case c = make_case(longnet(1, List{2, 4}, List{1, 2}), Shape{1, 4, 1, 1, 2});
  std::fill(c.q.begin(), c.q.end(), 1.0);
  std::fill(c.k.begin(), c.k.end(), -kInf);
  const Output output = c.forward();
  EXPECT_EQ(output.o, Values(8, 0.0));
  EXPECT_EQ(output.lse, Values(4, -kInf));
  for (const MixGradient mix : {MixGradient::full, MixGradient::detached}) {
    const Gradients gradients = c.backward(mix);
    EXPECT_EQ(gradients.dq, Values(8, 0.0));
    EXPECT_EQ(gradients.dk, Values(8, 0.0));
    EXPECT_EQ(gradients.dv, Values(8, 0.0));
  }
}

TEST(Reference, KeyWithScoreMinusInfinityHasNoWeight) {
  // Query 2 of a causal sequence; key 1 scores -inf, so keys 0 and 2 share the weight.
  const Case c{dense(1, true), Shape{1, 3, 1, 1, 1}, {1, 1, 1}, {0, -kInf, 0}, {3, 100, 5}, {}};
  const Output output = c.forward();
  EXPECT_NEAR(output.o[2], 4.0, 1e-14);
  EXPECT_NEAR(output.lse[2], std::log(2.0), 1e-14);
}

TEST(Reference, NaNAndPlusInfinityDoNotPassForEmptyRows) {
  for (const double bad : {kNaN, kInf}) {
    const Case c{dense(1), Shape{1, 1, 1, 1, 1}, {1}, {bad}, {1}, {1}};
    EXPECT_TRUE(std::isnan(c.forward().o[0]));
    EXPECT_TRUE(std::isnan(c.forward().lse[0]));
    EXPECT_TRUE(std::isnan(c.backward().dv[0]));
  }
}

TEST(Reference, OneTokenAttendsItself) {
  const Case c{dense(1, true), Shape{1, 1, 1, 1, 2}, {1, 2}, {3, 4}, {5, 6}, {7, 8}};
  const Output output = c.forward();
  EXPECT_EQ(output.o, (Values{5, 6}));
  EXPECT_NEAR(output.lse[0], 11.0 / std::sqrt(2.0), 1e-14);
  const Gradients gradients = c.backward();
  EXPECT_EQ(gradients.dq, (Values{0, 0}));
  EXPECT_EQ(gradients.dk, (Values{0, 0}));
  EXPECT_EQ(gradients.dv, (Values{7, 8}));
}

TEST(Reference, SegmentLongerThanTheSequenceIsTheWholeSequence) {
  Case c = make_case(dense(2, true), Shape{1, 7, 2, 1, 3});
  const Output whole = c.forward();
  for (const std::int64_t segment : {std::int64_t{7}, std::int64_t{8}, kWholeSequence - 1}) {
    c.pattern.branches[0].segment_length = segment;
    EXPECT_EQ(c.forward().o, whole.o) << "segment " << segment;
    EXPECT_EQ(c.forward().lse, whole.lse) << "segment " << segment;
  }
}

TEST(Reference, DilationAboveSegmentLeavesOneKeyOrNone) {
  const Pattern pattern{"sparse", 2, false, {Branch{3, 5, {1, 4}}}, 1.0};
  const Case c = make_case(pattern, Shape{1, 6, 2, 1, 1});
  const Output output = c.forward();
  for (std::int64_t t = 0; t < 6; ++t) {
    const double own_value = c.v[at(t)];
    EXPECT_EQ(output.o[at(2 * t)], t % 3 == 1 ? own_value : 0.0);
    EXPECT_EQ(output.o[at(2 * t + 1)], 0.0);  // offset 4 lies beyond every segment
    EXPECT_EQ(output.lse[at(2 * t + 1)], -kInf);
  }
}

TEST(Reference, EmptySequenceGivesEmptyResults) {
  const Case c{dense(1), Shape{1, 0, 1, 1, 4}, {}, {}, {}, {}};
  EXPECT_TRUE(c.forward().o.empty());
  EXPECT_TRUE(c.forward().lse.empty());
  EXPECT_TRUE(c.backward().dk.empty());
}

TEST(Reference, BadArgumentsAreRefused) {
  const auto refuse = [](const std::function<void(Case&)>& spoil, const std::string& part) {
    Case c = make_case(dense(4), Shape{1, 3, 4, 2, 2});
    spoil(c);
    try {
      static_cast<void>(c.backward());
      ADD_FAILURE() << "accepted; expected '" << part << "'";
    } catch (const ConfigError& error) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    }
  };
  refuse([](Case& c) { c.q.pop_back(); }, "q has 23 elements, expected 24 for [1, 3, 4, 2]");
  refuse([](Case& c) { c.k.pop_back(); }, "k has 11 elements, expected 12 for [1, 3, 2, 2]");
  refuse([](Case& c) { c.v.push_back(0); }, "v has 13 elements, expected 12 for [1, 3, 2, 2]");
  refuse([](Case& c) { c.dout.clear(); }, "dout has 0 elements, expected 24");
  refuse([](Case& c) { c.shape.kv_heads = 3; }, "4 query heads and 3 key/value heads");
  refuse([](Case& c) { c.shape.kv_heads = 0; }, "kv_heads is 0");
  refuse([](Case& c) { c.shape.head_dim = 0; }, "head_dim is 0");
  refuse([](Case& c) { c.shape.tokens = -1; }, "tokens is -1");
  refuse([](Case& c) { c.pattern = dense(2); }, "pattern 'dense' has 2 heads, expected 4");
  refuse([](Case& c) { c.pattern.branches.clear(); }, "no branches");
  const Case c = make_case(dense(1), Shape{1, 3, 1, 1, 2});
  EXPECT_THROW(static_cast<void>(forward(c.pattern, c.shape, c.q, c.k, c.v, kNaN)), ConfigError);
}

}  // namespace
}  // namespace annulus::reference
