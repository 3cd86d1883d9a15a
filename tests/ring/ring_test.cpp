// The ring against the oracle: every ring size, placement, schedule and direction, over a table of
// problems. A reference is computed once per problem and dtype.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "annulus/in_process.h"
#include "annulus/pattern.h"
#include "annulus/ring_attention.h"
#include "support/random_plans.h"
#include "support/ring_fixture.h"

namespace annulus::test {
namespace {

constexpr int kMaxRanks = 8;
constexpr Schedule kSchedules[] = {Schedule::ring, Schedule::gather, Schedule::automatic};
constexpr BackwardTravel kTravels[] = {BackwardTravel::keys, BackwardTravel::queries,
                                       BackwardTravel::automatic};
constexpr Layout kLayouts[] = {Layout::dense, Layout::padded, Layout::heads_major};

// Over all of them: head dims 1, 7, 8, 24, 33, 40, 64, 80, 100, 128, 256, 512; GQA ratios 1, 2, 8;
// N ragged and below the ring size.
const std::vector<Problem>& problems() {
  constexpr MixGradient kDetached = MixGradient::detached;
  static const std::vector<Problem> all = {
      make_problem("dense", dense(3), 3, 83, 64),
      make_problem("dense_causal_mqa8_batch2", dense(8, true), 1, 101, 8, 2),
      make_problem("dense_causal_gqa2_d128", dense(4, true), 2, 67, 128),
      make_problem("dense_mqa2_d256", dense(2), 1, 47, 256),
      make_problem("dense_causal_d512", dense(2, true), 2, 29, 512),
      make_problem("longnet_causal_gqa2_d33", longnet(4, List{16, 40, 128}, List{1, 2, 4}, true), 2,
                   93, 33),
      make_problem("longnet_d1_batch2", longnet(3, List{16, 48}, List{1, 3}), 3, 70, 1, 2),
      make_problem("longnet_gqa2_d7_detached", longnet(4, List{20, 60}, List{1, 3}), 2, 61, 7, 2,
                   kDetached),
      make_problem("head_groups_causal_scaled_d100",
                   head_groups(4, List{24, 50}, List{1, 3}, true, true), 2, 71, 100),
      make_problem("dense_causal_5_tokens", dense(2, true), 2, 5, 24, 2),
      make_problem("dense_1_token", dense(1), 1, 1, 40),
      make_problem("head_groups", head_groups(5, List{16, 40, 200}, List{1, 2, 4}), 5, 113, 40),
      make_problem("head_groups_scaled_gqa2",
                   head_groups(6, List{24, 50, 90}, List{1, 3, 2}, false, true), 3, 90, 80),
      make_problem("head_groups_causal_scaled_mqa8",
                   head_groups(8, List{8, 64}, List{1, 3}, true, true), 1, 121, 24, 2),
      make_problem("longnet_blocked_mqa8_batch2", longnet(8, List{16, 32, 64}, List{1, 2, 4}), 1,
                   79, 24, 2),
      make_problem("longnet_blocked_causal_gqa2",
                   longnet(4, List{16, 32, 128}, List{1, 2, 4}, true), 2, 109, 64),
      make_problem("longnet_blocked_causal_gqa2_detached",
                   longnet(4, List{16, 32, 128}, List{1, 2, 4}, true), 2, 91, 64, 1, kDetached),
      make_problem("longnet_interleaved_causal",
                   longnet(8, List{16, 64}, List{1, 4}, true, Offsets::interleaved), 8, 103, 40),
      make_problem("longnet_interleaved_gqa2_detached_batch2",
                   longnet(4, List{20, 60}, List{1, 3}, false, Offsets::interleaved), 2, 87, 8, 2,
                   kDetached),
      make_problem("longnet_awkward_causal", longnet(3, List{7, 13, 50, 3}, List{2, 5, 3, 8}, true),
                   3, 75, 80),
      // Segments long enough that branches compute common pairs once (shared_pairs.h).
      make_problem("longnet_shared_gqa2", longnet(4, List{64, 128, 256}, List{1, 2, 4}), 2, 211,
                   24),
      make_problem("longnet_shared_causal_mqa8",
                   longnet(8, List{64, 128, 256}, List{1, 2, 4}, true, Offsets::interleaved), 1,
                   190, 8),
      make_problem("repeated_branches_coarse_first",
                   longnet(2, List{256, 64, 64, 64, 128}, List{2, 1, 1, 2, 1}, true), 2, 150, 40),
      // Ten of them: in a few rows of few keys, the rounding of one score is no statistic.
      make_problem("longnet_awkward_6_tokens_batch10", longnet(4, List{4, 16}, List{3, 2}), 2, 6,
                   128, 10),
  };
  return all;
}

struct Case {
  std::size_t problem;
  DType dtype;
  int ranks;
  std::string placement;
  Schedule schedule;
  BackwardTravel travel;
  Layout layout;
  bool blocking;

  [[nodiscard]] std::string name() const {
    const char* const travels[] = {"any", "keys", "queries"};
    return problems()[problem].name + "_ranks" + std::to_string(ranks) + "_" + placement + "_" +
           name_of(schedule) + "_" + travels[static_cast<int>(travel)] + "_" + name_of(dtype);
  }
};

// Schedules, directions and layouts take turns: every pair with a placement, ring size or problem
// occurs.
std::vector<Case> cases() {
  std::vector<Case> out;
  std::size_t turn = 0;
  for (std::size_t p = 0; p < problems().size(); ++p) {
    for (const DType dtype : kDTypes) {
      for (int ranks = 1; ranks <= kMaxRanks; ++ranks) {
        for (const char* placement : kPlacementNames) {
          // fp16 is fp32 with other loads and stores: half of it will do. Instrumented code is
          // slow: a sample of the same.
          const std::size_t take = slowness() > 1 ? 7 : dtype == DType::f16 ? 2 : 1;
          if (turn % take == p % take) {
            out.push_back({p, dtype, ranks, placement, kSchedules[turn % 3], kTravels[turn / 3 % 3],
                           kLayouts[turn / 2 % 3], turn % 7 == 0});
          }
          turn += 1;
        }
        turn += 1;  // or else the six placements would always meet the same schedules
      }
    }
  }
  return out;
}

struct Solved {
  Problem problem;
  Inputs inputs;
  Expected expected;
};

const Solved& solved(std::size_t index, DType dtype) {
  static std::map<std::pair<std::size_t, DType>, Solved> cache;
  const auto key = std::pair(index, dtype);
  if (const auto found = cache.find(key); found != cache.end()) return found->second;
  Solved made{problems()[index], {}, {}};
  made.problem.dtype = dtype;
  made.inputs = random_inputs(made.problem, seed_of(made.problem.name));
  made.expected = reference_of(made.problem, made.inputs);
  return cache.emplace(key, std::move(made)).first->second;
}

class RingTest : public ::testing::TestWithParam<Case> {};

TEST_P(RingTest, MatchesReference) {
  const Case& c = GetParam();
  const Solved& s = solved(c.problem, c.dtype);
  SCOPED_TRACE("seed " + std::to_string(seed_of(s.problem.name)));
  RingOptions options =
      ring_options(s.problem, placement_of(c.placement, s.problem.shape.tokens, c.ranks));
  options.schedule = c.schedule;
  options.min_tokens_for_ring = 64;  // `auto` decides by prediction for most problems
  options.backward_travel = c.travel;
  options.blocking = c.blocking;
  expect_matches(s.problem, run_ring(options, s.inputs, c.layout), s.expected);
}

INSTANTIATE_TEST_SUITE_P(AllRings, RingTest, ::testing::ValuesIn(cases()),
                         [](const auto& info) { return info.param.name(); });

// Sequences longer than a query block (512), several key blocks (128) and gradient chunks: what the
// small problems above never reach.
class LongRowsTest : public ::testing::TestWithParam<std::tuple<DType, bool>> {};

TEST_P(LongRowsTest, MatchReference) {
  const auto [dtype, causal] = GetParam();
  Problem problem = make_problem("long", dense(1, causal), 1, 1187, 16);
  problem.dtype = dtype;
  const std::uint64_t seed = 11;
  SCOPED_TRACE("seed " + std::to_string(seed));
  const Inputs inputs = random_inputs(problem, seed);
  const Expected expected = reference_of(problem, inputs);
  for (const int ranks : {1, 2, 3}) {
    for (const BackwardTravel travel : {BackwardTravel::keys, BackwardTravel::queries}) {
      SCOPED_TRACE(std::to_string(ranks) + " ranks");
      RingOptions options =
          ring_options(problem, placement_of(ranks == 3 ? "striped" : "contiguous", 1187, ranks));
      options.schedule = ranks == 2 ? Schedule::gather : Schedule::ring;
      options.backward_travel = travel;
      expect_matches(problem, run_ring(options, inputs), expected);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, LongRowsTest,
                         ::testing::Combine(::testing::ValuesIn(kDTypes), ::testing::Bool()),
                         [](const auto& info) {
                           return std::string(std::get<1>(info.param) ? "causal_" : "full_") +
                                  name_of(std::get<0>(info.param));
                         });

// Partial results are never rounded to 16 bits on the way: the most common complaint about others.
class SixteenBitTest : public ::testing::TestWithParam<DType> {};

TEST_P(SixteenBitTest, ErrorDoesNotGrowWithRanks) {
  for (const bool causal : {false, true}) {
    for (const Schedule schedule : {Schedule::ring, Schedule::gather}) {
      for (const BackwardTravel travel : {BackwardTravel::keys, BackwardTravel::queries}) {
        Problem problem =
            make_problem("growth", longnet(4, List{64, 256}, List{1, 2}, causal), 2, 256, 64);
        problem.dtype = GetParam();
        const std::uint64_t seed = 23;
        SCOPED_TRACE("seed " + std::to_string(seed) + (causal ? " causal " : " full ") +
                     name_of(schedule));
        const Inputs inputs = random_inputs(problem, seed);
        const Expected expected = reference_of(problem, inputs);
        const auto ratios = [&](int ranks) {
          RingOptions options = ring_options(problem, Placement::zigzag(256, ranks));
          options.schedule = schedule;
          options.backward_travel = travel;
          return error_ratios(problem, run_ring(options, inputs), expected);
        };
        const Errors one = ratios(1);
        const Errors eight = ratios(8);
        for (std::size_t m = 0; m < 5; ++m) {
          if (m == 1) continue;  // lse is fp32
          const double growth = eight.value[m] / one.value[m];
          EXPECT_LT(growth, 1.1) << kResultNames[m] << ": " << one.value[m] << " on 1 rank, "
                                 << eight.value[m] << " on 8";
          note_worst(std::string(name_of(problem.dtype)) + " error on 8 ranks / on 1", growth);
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, SixteenBitTest, ::testing::Values(DType::bf16, DType::f16),
                         [](const auto& info) { return name_of(info.param); });

TEST(Ring, ScaleOptionReplacesTheDefault) {
  Problem problem = make_problem("scale", dense(2, true), 1, 40, 16);
  problem.scale = 0.7;
  const Inputs inputs = random_inputs(problem, 3);
  const Expected expected = reference_of(problem, inputs);
  const RingOptions options = ring_options(problem, Placement::zigzag(40, 3));
  expect_matches(problem, run_ring(options, inputs), expected);
}

TEST(Ring, ForwardOnlyExecutorMatchesReference) {
  for (const DType dtype : kDTypes) {
    Problem problem = make_problem("forward only", longnet(4, List{8, 32}, List{1, 2}), 4, 50, 24);
    problem.dtype = dtype;
    const Inputs inputs = random_inputs(problem, 5);
    const Expected expected = reference_of(problem, inputs);
    for (const int ranks : {1, 3}) {
      RingOptions options = ring_options(problem, Placement::striped(50, ranks));
      Results with = run_ring(options, inputs);
      options.backward = false;
      const Results without = run_ring(options, inputs);
      EXPECT_EQ(with.o, without.o);
      EXPECT_EQ(with.lse, without.lse);
      expect_matches(problem, with, expected);
    }
  }
}

// Asking for the branches' outputs must not change the answer beyond rounding.
TEST(Ring, BranchStateGivesTheSameForward) {
  Problem problem = make_problem("state", longnet(4, List{8, 32}, List{1, 2}, true), 2, 61, 16, 2);
  const Inputs inputs = random_inputs(problem, 9);
  const Expected expected = reference_of(problem, inputs);
  problem.mix = MixGradient::detached;
  const Expected detached = reference_of(problem, inputs);
  EXPECT_GT(
      relative_rms(std::vector<float>(expected.gradients.dq.begin(), expected.gradients.dq.end()),
                   detached.gradients.dq),
      1e-3)
      << "the two mix gradients should differ here";
  const Results results = run_ring(ring_options(problem, Placement::zigzag(61, 4)), inputs);
  expect_matches(problem, results, detached);
}

// Strides may be negative, and 0 for inputs: a sequence stored backwards, and one K/V for the whole
// batch.
TEST(Ring, NegativeAndZeroStridesWork) {
  const Problem problem = make_problem("strides", dense(2, true), 2, 30, 16, 2);
  const RingOptions options = ring_options(problem, Placement::zigzag(30, 3));
  Inputs inputs = random_inputs(problem, 1);
  const std::size_t half = inputs.k.size() / 2;
  for (auto* tensor : {&inputs.k, &inputs.v})
    std::copy_n(tensor->begin(), half, tensor->begin() + static_cast<std::ptrdiff_t>(half));
  const Results expected = run_ring(options, inputs);
  Results results = empty_results(options);
  run_in_process(3, [&](Transport& transport) {
    RingAttention ring(options, transport);
    Shard shard(options, transport.rank());
    shard.load(inputs);
    const std::int64_t local = shard.q.view().shape[1];
    const auto reversed = [&](ShardTensor& tensor) {
      TensorView view = tensor.view();
      view.data = static_cast<std::byte*>(view.data) +
                  (local - 1) * view.stride[1] * static_cast<std::int64_t>(size_of(view.dtype));
      view.stride[1] = -view.stride[1];
      return view;
    };
    // Store q and dout backwards, read results backwards.
    for (ShardTensor* tensor : {&shard.q, &shard.dout}) {
      for (std::int64_t b = 0; b < 2; ++b) {
        for (std::int64_t t = 0; t < local / 2; ++t) {
          for (std::int64_t h = 0; h < 2; ++h) {
            for (std::int64_t d = 0; d < 16; ++d) {
              const float x = tensor->get(b, t, h, d);
              tensor->set(b, t, h, d, tensor->get(b, local - 1 - t, h, d));
              tensor->set(b, local - 1 - t, h, d, x);
            }
          }
        }
      }
    }
    TensorView k = shard.k.view();
    TensorView v = shard.v.view();
    k.stride[0] = v.stride[0] = 0;
    ring.forward(reversed(shard.q), k, v, shard.o.view(), shard.lse.view());
    ring.backward(reversed(shard.q), k, v, shard.o.view(), shard.lse.view(), reversed(shard.dout),
                  shard.dq.view(), shard.dk.view(), shard.dv.view());
    ring.synchronize();
    shard.collect(results);
  });
  EXPECT_EQ(first_difference(results, expected), "");
}

// The same executor again and again, forward and backward in any order, with new data each time.
TEST(Ring, ExecutorKeepsNoStateBetweenCalls) {
  const Problem problem =
      make_problem("again", longnet(4, List{16, 64}, List{1, 2}, true), 2, 70, 16);
  const RingOptions options = ring_options(problem, Placement::zigzag(70, 3));
  const Inputs a = random_inputs(problem, 1);
  const Inputs b = random_inputs(problem, 2);
  Results first = empty_results(options);
  Results again = empty_results(options);
  const auto outcomes = run_ranks(3, [&](Transport& transport) {
    RingAttention ring(options, transport);
    Shard shard_a(options, transport.rank());
    Shard shard_b(options, transport.rank(), Layout::padded);
    shard_a.load(a);
    shard_b.load(b);
    shard_a.forward(ring);
    shard_a.backward(ring);
    shard_a.collect(first);
    shard_b.forward(ring);
    shard_a.forward(ring);
    shard_b.backward(ring);
    shard_a.backward(ring);
    shard_a.collect(again);
  });
  for (const auto& outcome : outcomes) EXPECT_EQ(outcome.message, "");
  EXPECT_EQ(first_difference(first, again), "");
  expect_matches(problem, first, reference_of(problem, a));
}

// A NaN or an infinity anywhere poisons exactly the elements that it poisons in the reference, on
// whatever rank they are. Where nothing of the poison is seen, bits stay.
class PoisonTest : public ::testing::TestWithParam<DType> {};

TEST_P(PoisonTest, ReachesExactlyTheRowsOfTheReference) {
  std::vector<Problem> list = {
      make_problem("dense", dense(2, true), 1, 45, 8),
      make_problem("longnet", longnet(2, List{8, 24}, List{1, 3}, true), 2, 50, 16),
      make_problem("longnet_full", longnet(2, List{10, 40}, List{1, 2}), 1, 50, 24)};
  constexpr double kPoisons[] = {std::numeric_limits<double>::quiet_NaN(),
                                 std::numeric_limits<double>::infinity(),
                                 -std::numeric_limits<double>::infinity()};
  for (Problem& problem : list) {
    problem.dtype = GetParam();
    const std::uint64_t seed = seed_of(problem.name);
    Random random(seed);
    const Inputs clean = random_inputs(problem, seed);
    for (int round = 0; round < 24; ++round) {
      Inputs inputs = clean;
      std::vector<double>* const tensors[] = {&inputs.q, &inputs.k, &inputs.v, &inputs.dout};
      auto& tensor = *tensors[round % 4];
      // An infinite score of one branch among several is a matter of taste: see attend() of the
      // reference.
      const bool one_branch = problem.pattern.branches.size() == 1;
      const auto at = static_cast<std::size_t>(random.between(0, std::ssize(tensor) - 1));
      tensor[at] = kPoisons[round % 4 < 2 && !one_branch ? 0 : round / 4 % 3];
      const int ranks = static_cast<int>(random.between(1, 5));
      const std::string placement = kPlacementNames[random.between(0, 5)];
      RingOptions options =
          ring_options(problem, placement_of(placement, problem.shape.tokens, ranks));
      options.schedule = round % 2 == 0 ? Schedule::ring : Schedule::gather;
      options.backward_travel = kTravels[random.between(0, 2)];
      SCOPED_TRACE(problem.name + ", seed " + std::to_string(seed) + ", round " +
                   std::to_string(round) + ": element " + std::to_string(at) + " of " +
                   std::string("qkvd").substr(static_cast<std::size_t>(round % 4), 1) + ", " +
                   std::to_string(ranks) + " ranks, " + placement);
      const Expected expected = reference_of(problem, inputs);
      const Results results = run_ring(options, inputs);
      const Results unpoisoned = run_ring(options, clean);
      const Expected clean_expected = reference_of(problem, clean);
      for (std::size_t m = 0; m < 5; ++m) {
        const auto& want = *members(expected)[m];
        const auto& base = *members(clean_expected)[m];
        const auto& got = *members(results)[m];
        const auto& bits = *members(unpoisoned)[m];
        std::size_t wrong = 0;
        std::size_t changed = 0;
        for (std::size_t i = 0; i < want.size(); ++i) {
          if (m == 1 && want[i] == -std::numeric_limits<double>::infinity()) {
            wrong += got[i] != -std::numeric_limits<float>::infinity() ? 1 : 0;
            continue;
          }
          wrong += std::isfinite(want[i]) != std::isfinite(got[i]) ? 1 : 0;
          // Unchanged in the reference: it never saw the poison. (0 may be a difference that
          // vanished.)
          if (want[i] == base[i] && want[i] != 0 && got[i] != bits[i]) changed += 1;
        }
        EXPECT_EQ(wrong, 0U) << kResultNames[m]
                             << ": finite where the reference is not, or the other way";
        EXPECT_EQ(changed, 0U) << kResultNames[m] << ": other bits where nothing changed";
      }
      if (HasFailure()) return;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, PoisonTest, ::testing::ValuesIn(kDTypes),
                         [](const auto& info) { return name_of(info.param); });

}  // namespace
}  // namespace annulus::test
