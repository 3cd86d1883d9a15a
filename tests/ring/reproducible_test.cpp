// reproducible = true: the same bits for every ring size and placement. Without it: the same bits
// in every run of one configuration, whatever the threads do.

#include <gtest/gtest.h>

#include <sys/wait.h>
#include <unistd.h>

#include <climits>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <tuple>
#include <vector>

#include "annulus/pattern.h"
#include "annulus/ring_attention.h"
#include "core/thread_pool.h"
#include "kernels/cpu/kernel.h"
#include "support/ring_fixture.h"

namespace annulus::test {
namespace {

Pattern windowed(Pattern pattern, std::int64_t before, std::int64_t after) {
  pattern.window = {before, after};
  return pattern;
}

Problem with_sinks(Problem problem) {
  problem.sinks = true;
  return problem;
}

// Gradients of sinks are sums over a rank's rows, whose sum over the ranks is the caller's.
Results without_dsinks(Results results) {
  results.dsinks.clear();
  return results;
}

// Sequences that span several key blocks (128) and ragged ends; segments that divide by nothing.
const std::vector<Problem>& problems() {
  constexpr MixGradient kDetached = MixGradient::detached;
  static const std::vector<Problem> all = {
      make_problem("dense", dense(1), 1, 331, 24),
      make_problem("dense_causal_gqa2", dense(4, true), 2, 307, 40),
      // Longer than a query block (512) and a chunk of keys (512).
      make_problem("dense_causal_1203_tokens", dense(1, true), 1, 1203, 8),
      make_problem("dense_causal_mqa3_batch2_d64", dense(3, true), 1, 163, 64, 2),
      make_problem("head_groups_scaled_gqa2_causal",
                   head_groups(6, List{50, 130, 400}, List{1, 3, 2}, true, true), 3, 293, 16),
      make_problem("head_groups_scaled_full",
                   head_groups(3, List{37, 400, 90}, List{1, 2, 3}, false, true), 3, 211, 16),
      make_problem("longnet_awkward_gqa2_causal",
                   longnet(4, List{37, 150, 301}, List{1, 3, 2}, true), 2, 301, 24),
      make_problem("longnet_interleaved_full",
                   longnet(4, List{64, 128, 17}, List{1, 4, 3}, false, Offsets::interleaved), 4,
                   259, 8),
      make_problem("longnet_shared_gqa2", longnet(4, List{64, 128, 256}, List{1, 2, 4}), 2, 301,
                   24),
      make_problem("longnet_shared_causal_mqa4",
                   longnet(4, List{64, 128, 256}, List{1, 2, 4}, true, Offsets::interleaved), 1,
                   301, 24),
      make_problem("longnet_detached_causal", longnet(2, List{37, 150}, List{1, 3}, true), 2, 229,
                   16, 1, kDetached),
      make_problem("longnet_detached_7_tokens", longnet(2, List{3, 8}, List{2, 3}), 1, 7, 128, 10,
                   kDetached),
      make_problem("longnet_causal_gqa2_d33", longnet(4, List{37, 150, 301}, List{1, 3, 2}, true),
                   2, 259, 33),
      make_problem("dense_causal_d300", dense(1, true), 1, 307, 300),
      make_problem("window", windowed(dense(2), 130, 40), 1, 613, 16),
      make_problem("window_causal_gqa2", windowed(dense(4, true), 90, 0), 2, 1203, 64),
      make_problem("window_longnet_causal",
                   windowed(longnet(4, List{64, 128, 256}, List{1, 2, 4}, true), 70, 0), 2, 301,
                   24),
      // Striped over three ranks, each has rows of one branch only; alone, a rank has those of all.
      make_problem("head_groups_scaled_one_branch_per_rank",
                   head_groups(6, List{60, 60, 60}, List{3, 3, 3}, true, true), 2, 200, 16),
      // Kernels take in sinks of rows to which no other branch comes back, the end of the pass
      // those of others. Which rows these are depends on the rank.
      with_sinks(make_problem("sinks_longnet", longnet(4, List{16, 64}, List{1, 100}), 2, 76, 24)),
      with_sinks(make_problem("sinks_longnet_causal",
                              longnet(4, List{16, 64}, List{1, 3}, true, Offsets::interleaved), 2,
                              130, 24)),
      with_sinks(make_problem("sinks_scaled_one_branch_per_rank",
                              head_groups(6, List{60, 60, 60}, List{3, 3, 3}, true, true), 2, 200,
                              16)),
  };
  return all;
}

using Case = std::tuple<std::size_t, DType>;

std::string name_of_case(const ::testing::TestParamInfo<Case>& info) {
  return problems()[std::get<0>(info.param)].name + "_" + name_of(std::get<1>(info.param));
}

class ReproducibleTest : public ::testing::TestWithParam<Case> {
 protected:
  ReproducibleTest() : problem_(problems()[std::get<0>(GetParam())]) {
    problem_.dtype = std::get<1>(GetParam());
    inputs_ = random_inputs(problem_, seed_of(problem_.name));
  }

  [[nodiscard]] RingOptions options(const std::string& placement, int ranks) const {
    return ring_options(problem_, placement_of(placement, problem_.shape.tokens, ranks));
  }

  Problem problem_;
  Inputs inputs_;
};

TEST_P(ReproducibleTest, BitsAreEqualForEveryRingSizeAndPlacement) {
  SCOPED_TRACE("seed " + std::to_string(seed_of(problem_.name)));
  RingOptions alone = options("contiguous", 1);
  alone.reproducible = true;
  const Results expected = without_dsinks(run_ring(alone, inputs_));
  int turn = 0;
  for (const int ranks : {1, 2, 3, 5, 8}) {
    for (const char* placement : kPlacementNames) {
      if (ranks == 1 && std::string(placement) != "explicit") continue;
      if (slowness() > 1 && ranks % 5 != 3) continue;  // instrumented code is slow
      SCOPED_TRACE(std::to_string(ranks) + " ranks, " + placement);
      RingOptions ring = options(placement, ranks);
      ring.reproducible = true;
      ring.schedule = turn % 2 == 0 ? Schedule::automatic : Schedule::gather;
      ring.blocking = turn % 5 == 4;
      const auto layout = turn % 3 == 0 ? Layout::heads_major : Layout::dense;
      turn += 1;
      const Results found = without_dsinks(run_ring(ring, inputs_, layout));
      EXPECT_EQ(first_difference(found, expected), "");
    }
  }
}

// One thread or many cut the work differently; rows must not notice.
TEST_P(ReproducibleTest, BitsDoNotDependOnTheNumberOfThreads) {
  RingOptions ring = options("zigzag", 3);
  ring.reproducible = true;
  const Results expected = run_ring(ring, inputs_);
  for (const int threads : {1, 3, 7}) {
    ring.threads = threads;
    EXPECT_EQ(first_difference(run_ring(ring, inputs_), expected), "") << threads << " threads";
  }
}

TEST_P(ReproducibleTest, MatchesReference) {
  if (problem_.shape.tokens > 250) problem_.shape.tokens = 151;  // the oracle is slow
  inputs_ = random_inputs(problem_, seed_of(problem_.name));
  const Expected expected = reference_of(problem_, inputs_);
  RingOptions ring = options("striped", 4);
  ring.reproducible = true;
  expect_matches(problem_, run_ring(ring, inputs_), expected);
}

// Nothing is asked for here: sums are made in a fixed order anyway.
TEST_P(ReproducibleTest, OrdinaryRunsRepeatBitForBit) {
  int turn = 0;
  for (const Schedule schedule : {Schedule::ring, Schedule::gather}) {
    for (const BackwardTravel travel : {BackwardTravel::keys, BackwardTravel::queries}) {
      RingOptions ring = options(kPlacementNames[turn % 6], 2 + turn);
      turn += 1;
      ring.schedule = schedule;
      ring.backward_travel = travel;
      const Results first = run_ring(ring, inputs_);
      for (int repeat = 0; repeat < 3; ++repeat) {
        EXPECT_EQ(first_difference(run_ring(ring, inputs_), first), "")
            << name_of(schedule) << ", travel " << static_cast<int>(travel);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, ReproducibleTest,
                         ::testing::Combine(::testing::Range(std::size_t{0}, problems().size()),
                                            ::testing::Values(DType::f32, DType::bf16, DType::f16)),
                         name_of_case);

TEST(Reproducible, NamesTheKernelsThatRan) {
  const Problem problem = make_problem("isa", dense(1), 1, 4, 8);
  std::string isa;
  const auto outcomes = run_ranks(1, [&](Transport& transport) {
    isa = RingAttention(ring_options(problem, Placement::contiguous(4, 1)), transport).kernels();
  });
  EXPECT_EQ(outcomes[0].message, "");
  const char* const forced = std::getenv("ANNULUS_ISA");
  EXPECT_EQ(isa, forced != nullptr ? forced : cpu::available_kernels().front()->name);
}

// Kernels are chosen once per process, so the others need processes of their own: this program
// again, on some of the problems above.
TEST(Reproducible, HoldsForEveryKernelSet) {
  if (std::getenv("ANNULUS_ISA") != nullptr) return;  // we are such a process
  char path[PATH_MAX] = {};
  ASSERT_GT(readlink("/proc/self/exe", path, sizeof(path) - 1), 0);
  for (const cpu::Kernels* kernels : cpu::available_kernels()) {
    if (kernels == cpu::available_kernels().front()) continue;  // ran above
    const std::string command =
        std::string("ANNULUS_ISA=") + kernels->name + " '" + path +
        "' --gtest_brief=1 "
        "--gtest_filter='Reproducible.*:*ForEveryRingSize*/longnet_aw*:*ForEveryRingSize*/"
        "head_groups_scaled_full*:*OrdinaryRuns*/longnet_detached_c*' >&2";
    const int status = std::system(command.c_str());
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << command;
  }
}

}  // namespace
}  // namespace annulus::test
