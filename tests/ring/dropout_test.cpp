// Dropout and softcap on rings. ring_property_test has them in its random configurations; here is
// what these do not say.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "annulus/error.h"
#include "annulus/ring_attention.h"
#include "kernels/reference/softmax.h"
#include "support/injected_failures.h"
#include "support/ring_fixture.h"

namespace annulus::test {
namespace {

Problem with(Problem problem, const reference::SoftmaxOptions& softmax, DType dtype = DType::f32) {
  problem.softmax = softmax;
  problem.dtype = dtype;
  return problem;
}

// Four query heads on two K/V heads.
std::vector<Pattern> patterns() {
  Pattern window = dense(4, true);
  window.name = "window";
  window.window = {20, 0};
  return {dense(4, true), window, longnet(4, List{16, 64}, List{1, 4}, true),
          head_groups(4, List{24, 70}, List{1, 3}, false, true)};
}

TEST(SoftcapAndDropout, EveryWayOfTheRowsGivesTheReference) {
  for (const Pattern& pattern : patterns()) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      const Problem problem = with(make_problem("ways", pattern, 2, 70, 16, 2),
                                   {.softcap = 3, .dropout_p = 0.3, .dropout_seed = 99}, dtype);
      const Inputs inputs = random_inputs(problem, seed_of(pattern.name));
      const Expected expected = reference_of(problem, inputs);
      for (int ranks = 1; ranks <= 4; ++ranks) {
        for (const RowTravel& way : kRowTravels) {
          SCOPED_TRACE(pattern.name + ", " + name_of(dtype) + ", " + std::to_string(ranks) +
                       " ranks, " + way.name);
          RingOptions options =
              ring_options(problem, placement_of(kPlacementNames[(ranks + 1) % 6], 70, ranks));
          way.apply(options);
          expect_matches(problem, run_ring(options, inputs), expected);
        }
      }
    }
  }
}

// Devices have kernels of their own for some of them.
TEST(SoftcapAndDropout, EveryHeadDimGivesTheReference) {
  for (const int dim : {20, 64, 72, 128, 200, 256, 300, 512}) {
    for (const DType dtype : kDTypes) {
      SCOPED_TRACE("head dim " + std::to_string(dim) + ", " + name_of(dtype));
      const Problem problem =
          with(make_problem("dims", longnet(2, List{32, 90}, List{1, 2}, true), 1, 90, dim),
               {.softcap = 2, .dropout_p = 0.3, .dropout_seed = 8}, dtype);
      const Inputs inputs = random_inputs(problem, static_cast<std::uint64_t>(dim));
      RingOptions options = ring_options(problem, Placement::contiguous(90, 2));
      options.schedule = Schedule::ring;  // forward goes on from a state
      expect_matches(problem, run_ring(options, inputs), reference_of(problem, inputs));
    }
  }
}

// Softcap has a slope, which is NaN where the score is. It reaches no gradient of a row that does
// not see the pair.
TEST(SoftcapAndDropout, GradientsOfTheUnseenAreNotTouchedByNaN) {
  constexpr std::int64_t kTokens = 70;
  constexpr std::int64_t kHeads = 2;
  constexpr std::int64_t kChanged = 50;
  for (const int dim : {16, 64, 128, 200, 320}) {
    for (const DType dtype : kDTypes) {
      for (const double dropout : {0.0, 0.3}) {
        SCOPED_TRACE("head dim " + std::to_string(dim) + ", " + name_of(dtype) + ", dropout " +
                     std::to_string(dropout));
        const Problem problem =
            with(make_problem("nan", dense(kHeads, true), kHeads, kTokens, dim),
                 {.softcap = 30, .dropout_p = dropout, .dropout_seed = 8}, dtype);
        const RingOptions options = ring_options(problem, Placement::contiguous(kTokens, 1));
        const Inputs inputs = random_inputs(problem, 3);
        const Results usual = run_ring(options, inputs);
        const std::int64_t row = kHeads * dim;
        const auto with_nan = [&](auto... tensors) {
          Inputs changed = inputs;
          for (auto tensor : {tensors...})
            std::fill_n((changed.*tensor).begin() + kChanged * row, row, std::nan(""));
          return run_ring(options, changed);
        };
        const auto expect_same = [&](const char* what, const std::vector<float>& a,
                                     const std::vector<float>& b, std::int64_t from,
                                     std::int64_t to) {
          EXPECT_TRUE(
              std::equal(a.begin() + from * row, a.begin() + to * row, b.begin() + from * row))
              << what;
        };
        const Results of_key = with_nan(&Inputs::k, &Inputs::v);
        expect_same("dq before the key", of_key.dq, usual.dq, 0, kChanged);
        const Results of_query = with_nan(&Inputs::q, &Inputs::dout);
        expect_same("dq before the query", of_query.dq, usual.dq, 0, kChanged);
        expect_same("dq behind the query", of_query.dq, usual.dq, kChanged + 1, kTokens);
        expect_same("dk behind the query", of_query.dk, usual.dk, kChanged + 1, kTokens);
        expect_same("dv behind the query", of_query.dv, usual.dv, kChanged + 1, kTokens);
      }
    }
  }
}

// With V = the unit vectors o is D P: what is 0 was dropped.
TEST(Dropout, KeepsTheSamePairsForEveryNumberOfRanks) {
  constexpr int kTokens = 64;
  for (const DType dtype : kDTypes) {
    Problem problem = with(make_problem("mask", dense(4), 4, kTokens, kTokens, 2),
                           {.dropout_p = 0.4, .dropout_seed = 0xfedcba9876543210U}, dtype);
    Inputs inputs = random_inputs(problem, 1);
    for (std::size_t i = 0; i < inputs.v.size(); ++i)
      inputs.v[i] = i / (std::size_t{kTokens} * 4) % kTokens == i % kTokens ? 1 : 0;
    std::size_t dropped = 0;
    for (const int ranks : {1, 3, 8}) {
      for (const char* placement : {"contiguous", "striped", "zigzag"}) {
        for (const bool reproducible : {false, true}) {
          RingOptions options = ring_options(problem, placement_of(placement, kTokens, ranks));
          options.reproducible = reproducible;
          const Results results = run_ring(options, inputs);
          std::size_t wrong = 0;
          dropped = 0;
          for (std::size_t i = 0; i < results.o.size(); ++i) {
            const auto key = static_cast<std::int64_t>(i % kTokens);
            const auto row = static_cast<std::int64_t>(i / kTokens);
            const bool keeps =
                reference::kept(problem.softmax, row / 4 / kTokens, static_cast<int>(row % 4),
                                row / 4 % kTokens, key) != 0;
            wrong += keeps != (results.o[i] != 0.0F) ? 1U : 0U;
            dropped += keeps ? 0 : 1;
          }
          EXPECT_EQ(wrong, 0U) << name_of(dtype) << ", " << ranks << " ranks, " << placement;
        }
      }
    }
    const double share = static_cast<double>(dropped) / (2.0 * 4 * kTokens * kTokens);
    EXPECT_NEAR(share, 0.4, 0.02);
  }
}

// A pair of several branches has one number, so that O is D times the merged softmax times V.
TEST(Dropout, BranchesThatShareAPairDropItTogether) {
  constexpr int kTokens = 32;
  Problem problem =
      with(make_problem("shared", longnet(1, List{32, 32}, List{1, 2}), 1, kTokens, kTokens),
           {.dropout_p = 0.5, .dropout_seed = 3});
  Inputs inputs = random_inputs(problem, 1);
  for (std::size_t i = 0; i < inputs.v.size(); ++i)
    inputs.v[i] = i / kTokens == i % kTokens ? 1 : 0;
  const RingOptions options = ring_options(problem, Placement::contiguous(kTokens, 2));
  const Results dropped = run_ring(options, inputs);
  Problem plain = problem;
  plain.softmax = {};
  const Results all = run_ring(ring_options(plain, options.placement), inputs);
  for (std::size_t i = 0; i < all.o.size(); ++i) {
    const double kept =
        reference::kept(problem.softmax, 0, 0, static_cast<std::int64_t>(i / kTokens),
                        static_cast<std::int64_t>(i % kTokens));
    EXPECT_NEAR(dropped.o[i], kept * all.o[i], 1e-6);
  }
  for (std::size_t i = 0; i < all.lse.size(); ++i) EXPECT_NEAR(dropped.lse[i], all.lse[i], 1e-6);
}

// Fixed seeds: the mean over them is that without dropout, within five deviations of a mean.
TEST(Dropout, ExpectationIsAttentionWithoutIt) {
  constexpr int kSeeds = 400;
  Problem problem = with(make_problem("mean", dense(2), 2, 40, 8), {.dropout_p = 0.3});
  Inputs inputs = random_inputs(problem, 1);
  const RingOptions options = ring_options(problem, Placement::contiguous(40, 1));
  Problem plain = problem;
  plain.softmax = {};
  const Results exact = run_ring(ring_options(plain, options.placement), inputs);
  std::vector<double> sum(exact.o.size(), 0), squares(exact.o.size(), 0);
  std::vector<double> dv(exact.dv.size(), 0), dv_squares(exact.dv.size(), 0);
  for (int seed = 0; seed < kSeeds; ++seed) {
    inputs.dropout_seed = static_cast<std::uint64_t>(seed);
    const Results results = run_ring(options, inputs);
    for (std::size_t i = 0; i < exact.lse.size(); ++i)
      EXPECT_NEAR(results.lse[i], exact.lse[i], 1e-6);
    const auto add = [](const std::vector<float>& from, const std::vector<float>& mean,
                        std::vector<double>& s, std::vector<double>& s2) {
      for (std::size_t i = 0; i < from.size(); ++i) {
        s[i] += from[i] - mean[i];
        s2[i] += std::pow(from[i] - mean[i], 2);
      }
    };
    add(results.o, exact.o, sum, squares);
    add(results.dv, exact.dv, dv, dv_squares);
  }
  for (std::size_t i = 0; i < sum.size(); ++i) {
    EXPECT_LT(std::fabs(sum[i]), 5 * std::sqrt(squares[i]) + 1e-5);
    EXPECT_LT(std::fabs(dv[i]), 5 * std::sqrt(dv_squares[i]) + 1e-5);
  }
}

TEST(SoftcapAndDropout, NoneOfThemChangesNoBit) {
  for (const DType dtype : kDTypes) {
    const Problem problem = with(make_problem("none", patterns()[2], 2, 70, 16), {}, dtype);
    const RingOptions options = ring_options(problem, Placement::zigzag(70, 3));
    Inputs inputs = random_inputs(problem, 2);
    const Results plain = run_ring(options, inputs);
    inputs.dropout_seed = 5;  // of no meaning
    EXPECT_EQ(first_difference(run_ring(options, inputs), plain), "");
  }
}

TEST(SoftcapAndDropout, ReproducibleHasTheSameBitsForEveryRing) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const Problem problem = with(make_problem("bits", patterns()[2], 2, 150, 64, 2),
                                 {.softcap = 2, .dropout_p = 0.2, .dropout_seed = 4}, dtype);
    const Inputs inputs = random_inputs(problem, 3);
    RingOptions options = ring_options(problem, Placement::contiguous(150, 1));
    options.reproducible = true;
    const Results one = run_ring(options, inputs);
    for (const int ranks : {2, 5}) {
      options.placement = Placement::striped(150, ranks);
      EXPECT_EQ(first_difference(run_ring(options, inputs), one), "") << ranks;
    }
  }
}

// Pieces are of other batch entries and heads than the first.
TEST(Dropout, PiecesForWantOfMemoryKeepTheNumbers) {
  for (const std::int64_t plans : {2, 3, 4}) {
    const Problem problem =
        with(make_problem("pieces", longnet(8, List{16, 64}, List{1, 4}, true), 4, 70, 16, 4),
             {.dropout_p = 0.5, .dropout_seed = 6});
    const RingOptions options = ring_options(problem, Placement::striped(70, 2));
    const Inputs inputs = random_inputs(problem, 8);
    Results results = empty_results(options);
    const auto outcomes = run_ranks(2, [&](Transport& transport) {
      std::unique_ptr<RingAttention> ring;
      {
        const FailingMemory failing(BadMemory{.plans = plans});
        ring = std::make_unique<RingAttention>(options, transport);
      }
      EXPECT_NE(ring->recovery().find("at a time"), std::string::npos);
      Shard shard(options, transport.rank(), Layout::padded);
      shard.load(inputs);
      shard.forward(*ring);
      shard.backward(*ring);
      shard.collect(results);
    });
    expect_everywhere(outcomes, "", {});
    expect_matches(problem, results, reference_of(problem, inputs));
  }
}

TEST(Dropout, RanksThatDrawSeedsUseThatOfRank0) {
  const Problem problem = with(make_problem("drawn", dense(8, true), 4, 70, 16, 4),
                               {.dropout_p = 0.5, .dropout_seed = 6});
  const RingOptions options = ring_options(problem, Placement::striped(70, 3));
  const Inputs inputs = random_inputs(problem, 8);
  for (const bool in_pieces : {false, true}) {
    Results results = empty_results(options);
    const auto outcomes = run_ranks(3, [&](Transport& transport) {
      std::unique_ptr<RingAttention> ring;
      {
        const FailingMemory failing(BadMemory{.plans = in_pieces ? 3 : 0});
        ring = std::make_unique<RingAttention>(options, transport);
      }
      EXPECT_EQ(ring->recovery().find("at a time") != std::string::npos, in_pieces);
      Shard shard(options, transport.rank());
      shard.load(inputs);
      OptionalInputs more = shard.more();
      *more.dropout_seed += static_cast<std::uint64_t>(transport.rank());
      more.dropout_seed_of_rank_0 = true;
      ring->forward(shard.q.view(), shard.k.view(), shard.v.view(), shard.o.view(),
                    shard.lse.view(), nullptr, more);
      ring->backward(shard.q.view(), shard.k.view(), shard.v.view(), shard.o.view(),
                     shard.lse.view(), shard.dout.view(), shard.dq.view(), shard.dk.view(),
                     shard.dv.view(), nullptr, more);
      ring->synchronize();
      shard.collect(results);
    });
    expect_everywhere(outcomes, "", {});
    expect_matches(problem, results, reference_of(problem, inputs));
  }
}

TEST(Dropout, MistakesOfOneRankAreErrorsOfAllAndTheNextCallIsFine) {
  const Problem problem = with(make_problem("mistakes", dense(4, true), 2, 40, 16),
                               {.dropout_p = 0.25, .dropout_seed = 7});
  const RingOptions options = ring_options(problem, Placement::contiguous(40, 3));
  const Inputs inputs = random_inputs(problem, 9);
  struct Mistake {
    const char* text;
    std::optional<std::uint64_t> seed;
  };
  for (const Mistake& mistake :
       {Mistake{"dropout_p is 0.25, but there is no dropout_seed", std::nullopt},
        Mistake{"ranks disagree about dropout_seed: rank", UINT64_MAX}}) {
    for (const int wrong : {0, 2}) {
      const auto outcomes = run_ranks(3, [&](Transport& transport) {
        RingAttention ring(options, transport);
        Shard shard(options, transport.rank());
        shard.load(inputs);
        shard.forward(ring);
        shard.backward(ring);
        OptionalInputs more = shard.more();
        if (transport.rank() == wrong) more.dropout_seed = mistake.seed;
        const auto forward = [&] {
          ring.forward(shard.q.view(), shard.k.view(), shard.v.view(), shard.o.view(),
                       shard.lse.view(), nullptr, more);
        };
        const auto backward = [&] {
          ring.backward(shard.q.view(), shard.k.view(), shard.v.view(), shard.o.view(),
                        shard.lse.view(), shard.dout.view(), shard.dq.view(), shard.dk.view(),
                        shard.dv.view(), nullptr, more, {});
        };
        for (const bool is_forward : {true, false}) {
          try {
            is_forward ? forward() : backward();
            ADD_FAILURE() << "accepted";
          } catch (const ConfigError& error) {
            EXPECT_NE(std::string(error.what()).find(mistake.text), std::string::npos)
                << error.what();
          }
        }
        shard.forward(ring);
        shard.backward(ring);
      });
      expect_everywhere(outcomes, "", {});
    }
  }
}

// On CPUs with tiles other kernels run such calls, and kernels() says which.
TEST(SoftcapAndDropout, NamesTheKernelsThatRun) {
  for (const reference::SoftmaxOptions& softmax :
       {reference::SoftmaxOptions{}, {.softcap = 1}, {.dropout_p = 0.1}}) {
    const Problem problem = with(make_problem("names", dense(2), 2, 40, 64), softmax, DType::bf16);
    const auto outcomes = run_ranks(1, [&](Transport& transport) {
      const RingAttention ring(ring_options(problem, Placement::contiguous(40, 1)), transport);
      const bool modified = softmax.softcap != 0 || softmax.dropout_p != 0;
      const bool tiles = ring.kernels().starts_with("amx_bf16");
      EXPECT_FALSE(modified && tiles) << ring.kernels();
    });
    expect_everywhere(outcomes, "", {});
  }
}

}  // namespace
}  // namespace annulus::test
