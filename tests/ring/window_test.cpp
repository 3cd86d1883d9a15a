// Sliding windows against the oracle, in sequences of several tiles of every kernel (64 or 128
// rows) and with the head dims that kernels of their own have.

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "annulus/pattern.h"
#include "annulus/ring_attention.h"
#include "support/random_plans.h"
#include "support/ring_fixture.h"

namespace annulus::test {
namespace {

Pattern windowed(Pattern pattern, std::int64_t before, std::int64_t after) {
  pattern.window = {before, after};
  return pattern;
}

const std::vector<Problem>& problems() {
  static const std::vector<Problem> all = {
      make_problem("causal_d128_gqa2", windowed(dense(2, true), 200, -1), 1, 640, 128),
      make_problem("causal_d64", windowed(dense(2, true), 255, 0), 2, 700, 64),
      make_problem("both_sides_d128", windowed(dense(1), 150, 61), 1, 555, 128),
      make_problem("both_sides_d64_mqa4_batch2", windowed(dense(4), 33, 200), 1, 450, 64, 2),
      make_problem("only_before_d64", windowed(dense(2), 300, -1), 1, 550, 64),
      make_problem("only_after_d128", windowed(dense(1), -1, 140), 1, 600, 128),
      // Both limits cut one tile, and one step of backward.
      make_problem("narrow_d64", windowed(dense(2), 5, 3), 2, 520, 64),
      make_problem("narrow_d128", windowed(dense(2, true), 17, -1), 2, 520, 128),
      make_problem("itself_d64", windowed(dense(2, true), 0, 0), 1, 400, 64),
      make_problem("dilated_d128",
                   windowed(head_groups(3, List{4096, 4096, 512}, List{1, 2, 3}, true), 300, -1), 3,
                   700, 128),
      make_problem("dilated_between_rows_d64",
                   windowed(head_groups(2, List{4096, 4096}, List{8, 3}), 6, 10), 2, 900, 64),
      // Branches that share pairs, with weights that repeat every 16 rows and others.
      make_problem("longnet_causal_d128",
                   windowed(longnet(4, List{128, 256, 1024}, List{1, 2, 4}, true), 190, -1), 2, 600,
                   128),
      make_problem("longnet_d64", windowed(longnet(3, List{240, 960}, List{1, 3}), 170, 90), 3, 720,
                   64),
      make_problem("causal_d40", windowed(dense(2, true), 100, -1), 1, 333, 40),
      make_problem("both_sides_d256", windowed(dense(1), 70, 40), 1, 301, 256),
  };
  return all;
}

using Case = std::tuple<std::size_t, DType>;

class WindowTest : public ::testing::TestWithParam<Case> {};

TEST_P(WindowTest, MatchesReference) {
  const auto [number, dtype] = GetParam();
  Problem problem = problems()[number];
  problem.dtype = dtype;
  const std::uint64_t seed = seed_of(problem.name);
  SCOPED_TRACE("seed " + std::to_string(seed));
  const Inputs inputs = random_inputs(problem, seed);
  const Expected expected = reference_of(problem, inputs);
  std::size_t turn = number;
  for (int ranks = 1; ranks <= 4; ++ranks) {
    for (const char* placement : {"contiguous", "zigzag", "striped"}) {
      if (ranks == 1 && std::string(placement) != "contiguous") continue;
      turn += 1;
      if (slowness() > 1 && turn % 4 != 0) continue;  // instrumented code is slow
      SCOPED_TRACE(std::to_string(ranks) + " ranks, " + placement);
      RingOptions options =
          ring_options(problem, placement_of(placement, problem.shape.tokens, ranks));
      options.schedule = turn % 2 == 0 ? Schedule::gather : Schedule::ring;
      options.backward_travel = turn / 2 % 2 == 0 ? BackwardTravel::keys : BackwardTravel::queries;
      options.deterministic = turn % 3 == 0;
      expect_matches(problem, run_ring(options, inputs), expected);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, WindowTest,
                         ::testing::Combine(::testing::Range(std::size_t{0}, problems().size()),
                                            ::testing::ValuesIn(kDTypes)),
                         [](const auto& info) {
                           return problems()[std::get<0>(info.param)].name + "_" +
                                  name_of(std::get<1>(info.param));
                         });

}  // namespace
}  // namespace annulus::test
