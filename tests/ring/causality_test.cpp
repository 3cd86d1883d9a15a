// What a query cannot see, it cannot feel: not a bit of an earlier output depends on a later key or
// value.

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include "annulus/pattern.h"
#include "annulus/ring_attention.h"
#include "support/ring_fixture.h"

namespace annulus::test {
namespace {

const std::vector<Problem>& problems() {
  static const std::vector<Problem> all = {
      make_problem("dense_gqa2", dense(2, true), 1, 67, 16),
      make_problem("head_groups", head_groups(3, List{12, 40, 100}, List{1, 2, 3}, true), 3, 61, 8),
      make_problem("longnet", longnet(4, List{8, 32, 64}, List{1, 2, 4}, true), 2, 59, 8),
      make_problem("one_token", dense(2, true), 2, 1, 8),
      make_problem("one_head", dense(1, true), 1, 33, 24),
      make_problem("segment_longer_than_sequence", longnet(2, List{1000, 4096}, List{1, 2}, true),
                   2, 40, 8),
      make_problem("dilation_larger_than_segment", longnet(4, List{4, 6}, List{9, 40}, true), 4, 30,
                   8),
      make_problem("fewer_tokens_than_ranks", longnet(2, List{2, 8}, List{1, 2}, true), 1, 3, 8),
  };
  return all;
}

using Case = std::tuple<std::size_t, const char*, DType>;

class CausalityTest : public ::testing::TestWithParam<Case> {
 protected:
  CausalityTest() : problem_(problems()[std::get<0>(GetParam())]) {
    problem_.dtype = std::get<2>(GetParam());
  }
  Problem problem_;
};

TEST_P(CausalityTest, FutureKeysNeverChangeEarlierOutputs) {
  const std::uint64_t seed = seed_of(problem_.name);
  SCOPED_TRACE("seed " + std::to_string(seed));
  const reference::Shape& shape = problem_.shape;
  const Inputs inputs = random_inputs(problem_, seed);
  for (const int ranks : {1, 4}) {
    RingOptions options =
        ring_options(problem_, placement_of(std::get<1>(GetParam()), shape.tokens, ranks));
    options.backward = false;
    for (const Schedule schedule : {Schedule::ring, Schedule::gather}) {
      options.schedule = schedule;
      const Results before = run_ring(options, inputs);
      for (const std::int64_t future :
           {std::int64_t{0}, shape.tokens / 3, shape.tokens / 2 + 1, shape.tokens - 1}) {
        if (future >= shape.tokens) continue;
        for (const double value : {3.0, 1e4, std::numeric_limits<double>::quiet_NaN()}) {
          SCOPED_TRACE(std::to_string(ranks) + " ranks, " + name_of(schedule) + ", key " +
                       std::to_string(future) + " becomes " + std::to_string(value));
          Inputs changed = inputs;
          const auto row = static_cast<std::size_t>(shape.kv_heads * shape.head_dim);
          for (std::size_t i = static_cast<std::size_t>(future) * row;
               i < static_cast<std::size_t>(future + 1) * row; ++i) {
            changed.k[i] = value;
            changed.v[i] = -value;
          }
          const Results after = run_ring(options, changed);
          const auto heads = static_cast<std::size_t>(shape.q_heads);
          const std::size_t rows = static_cast<std::size_t>(future) * heads;
          const std::size_t elements = rows * static_cast<std::size_t>(shape.head_dim);
          EXPECT_EQ(std::memcmp(before.o.data(), after.o.data(), elements * sizeof(float)), 0);
          EXPECT_EQ(std::memcmp(before.lse.data(), after.lse.data(), rows * sizeof(float)), 0);
          // The query at that position sees its own key in every branch that selects it: the test
          // does test something.
          for (std::size_t h = 0; h < heads; ++h) {
            bool selected = false;
            for (const Branch& branch : problem_.pattern.branches)
              selected |= branch.selects(static_cast<int>(h), future);
            const std::size_t at = rows + h;
            EXPECT_EQ(before.lse[at] != after.lse[at], selected) << "head " << h;
            if (!selected) {
              EXPECT_EQ(before.lse[at], -std::numeric_limits<float>::infinity());
            }
          }
        }
      }
    }
  }
}

// The same for gradients: those of a query depend on earlier keys only, those of a key on later
// queries only.
TEST_P(CausalityTest, GradientsNeverFlowFromTheUnseen) {
  const std::uint64_t seed = seed_of(problem_.name);
  SCOPED_TRACE("seed " + std::to_string(seed));
  const reference::Shape& shape = problem_.shape;
  const Inputs inputs = random_inputs(problem_, seed);
  const std::int64_t at = shape.tokens / 2;
  for (const BackwardTravel travel : {BackwardTravel::keys, BackwardTravel::queries}) {
    RingOptions options =
        ring_options(problem_, placement_of(std::get<1>(GetParam()), shape.tokens, 3));
    options.backward_travel = travel;
    const Results before = run_ring(options, inputs);
    Inputs changed = inputs;
    const auto q_row = static_cast<std::size_t>(shape.q_heads * shape.head_dim);
    const auto k_row = static_cast<std::size_t>(shape.kv_heads * shape.head_dim);
    const auto position = static_cast<std::size_t>(at);
    for (std::size_t i = position * q_row; i < (position + 1) * q_row; ++i)
      changed.dout[i] = changed.q[i] = 2.0;
    const Results later = run_ring(options, changed);
    for (const auto* part : {"dk", "dv"}) {
      const auto& a = part[1] == 'k' ? before.dk : before.dv;
      const auto& b = part[1] == 'k' ? later.dk : later.dv;
      const std::size_t from = (position + 1) * k_row;  // keys after the changed query
      EXPECT_EQ(std::memcmp(a.data() + from, b.data() + from, (a.size() - from) * sizeof(float)), 0)
          << part;
    }
    // Other queries do not feel it at all.
    EXPECT_EQ(std::memcmp(before.dq.data(), later.dq.data(), position * q_row * sizeof(float)), 0);
    const std::size_t after = (position + 1) * q_row;
    EXPECT_EQ(std::memcmp(before.dq.data() + after, later.dq.data() + after,
                          (before.dq.size() - after) * sizeof(float)),
              0);
  }
}

INSTANTIATE_TEST_SUITE_P(All, CausalityTest,
                         ::testing::Combine(::testing::Range(std::size_t{0}, problems().size()),
                                            ::testing::ValuesIn(kPlacementNames),
                                            ::testing::Values(DType::f32, DType::bf16)),
                         [](const auto& info) {
                           return problems()[std::get<0>(info.param)].name + "_" +
                                  std::get<1>(info.param) + "_" + name_of(std::get<2>(info.param));
                         });

// Nothing is selected anywhere: zeros, log-sum-exp of -inf, no gradient, and never a NaN.
TEST(EmptyRows, AreZerosWithoutGradient) {
  Pattern pattern = longnet(2, List{2}, List{5}, false);
  for (std::int64_t& offset : pattern.branches[0].offset)
    offset = 4;  // beyond the end of every segment
  for (const MixGradient mix : {MixGradient::full, MixGradient::detached}) {
    const Problem problem = make_problem("nothing", pattern, 2, 21, 8, 2, mix);
    const Inputs inputs = random_inputs(problem, 1);
    for (const int ranks : {1, 3}) {
      const Results results =
          run_ring(ring_options(problem, Placement::contiguous(21, ranks)), inputs);
      for (const float x : results.lse) EXPECT_EQ(x, -std::numeric_limits<float>::infinity());
      for (const std::size_t m : {0U, 2U, 3U, 4U}) {
        for (const float x : *members(results)[m]) ASSERT_EQ(x, 0.0F) << kResultNames[m];
      }
    }
  }
}

}  // namespace
}  // namespace annulus::test
