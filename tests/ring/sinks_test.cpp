// Sinks: a logit per query head that takes part in the softmax and has no value. ring_property_test
// has them in its random configurations; here is what these do not say.

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "annulus/error.h"
#include "annulus/in_process.h"
#include "annulus/ring_attention.h"
#include "support/injected_failures.h"
#include "support/ring_fixture.h"

namespace annulus::test {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

Problem with_sinks(Problem problem, DType dtype = DType::f32) {
  problem.sinks = true;
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

TEST(Sinks, EveryWayOfTheRowsGivesTheReference) {
  for (const Pattern& pattern : patterns()) {
    for (const DType dtype : kDTypes) {
      const Problem problem = with_sinks(make_problem("ways", pattern, 2, 70, 16, 2), dtype);
      Inputs inputs = random_inputs(problem, seed_of(pattern.name));
      inputs.sinks = {-1.0, 2.0, -kInf, 6.0};
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

// 16-bit rows are rounded once, also where nothing comes after forward and the kernels write the
// caller's tensor.
TEST(Sinks, ForwardAloneIsAsExact) {
  for (const DType dtype : kDTypes) {
    for (const Pattern& pattern : patterns()) {
      SCOPED_TRACE(pattern.name + ", " + name_of(dtype));
      const Problem problem = with_sinks(make_problem("forward", pattern, 2, 200, 64), dtype);
      Inputs inputs = random_inputs(problem, 1);
      inputs.sinks = {1.0, 3.0, -kInf, 0.0};
      RingOptions options = ring_options(problem, Placement::contiguous(200, 1));
      const Results both = run_ring(options, inputs);
      options.backward = false;
      const Results forward = run_ring(options, inputs);
      EXPECT_EQ(forward.o, both.o);
      EXPECT_EQ(forward.lse, both.lse);
      Results results = both;  // with gradients that are right
      results.o = forward.o;
      expect_matches(problem, results, reference_of(problem, inputs));
    }
  }
}

TEST(Sinks, MinusInfinityChangesNoBit) {
  for (const Pattern& pattern : patterns()) {
    for (const MixGradient mix : {MixGradient::full, MixGradient::detached}) {
      for (const DType dtype : kDTypes) {
        Problem problem = with_sinks(make_problem("none", pattern, 2, 70, 16, 1, mix), dtype);
        const RingOptions options = ring_options(problem, Placement::zigzag(70, 3));
        Inputs inputs = random_inputs(problem, 2);
        inputs.sinks.assign(4, -kInf);
        Results some = run_ring(options, inputs);
        for (const float x : some.dsinks) EXPECT_EQ(x, 0.0F);
        some.dsinks.clear();
        inputs.sinks.clear();
        EXPECT_EQ(first_difference(some, run_ring(options, inputs)), "") << pattern.name;
      }
    }
  }
}

// Odd positions and the last head are in no branch.
Problem half_empty(DType dtype, MixGradient mix = MixGradient::full) {
  const Pattern pattern{"half", 4, false, {Branch{kWholeSequence, 2, {0, 0, 0, -1}}}, 1.0};
  return with_sinks(make_problem("half", pattern, 2, 30, 16, 1, mix), dtype);
}
bool is_empty(std::size_t row) { return row % 4 == 3 || row / 4 % 2 == 1; }

// Whatever is in their queries, outputs and gradients of outputs.
TEST(Sinks, RowsWithoutKeysAreZeroAndHaveTheSinkAsLogSumExp) {
  for (const MixGradient mix : {MixGradient::full, MixGradient::detached}) {
    for (const DType dtype : kDTypes) {
      for (const int ranks : {1, 3}) {
        const Problem problem = half_empty(dtype, mix);
        Inputs inputs = random_inputs(problem, 3);
        inputs.sinks = {0.5, -2.0, 3.0, 1.0};
        const RingOptions options = ring_options(problem, Placement::contiguous(30, ranks));
        const Results usual = run_ring(options, inputs);
        expect_matches(problem, usual, reference_of(problem, inputs));
        for (std::size_t i = 0; i < inputs.dout.size(); ++i) {
          if (is_empty(i / 16)) inputs.dout[i] = inputs.q[i] = NAN;
        }
        const Results results = run_ring(options, inputs);
        EXPECT_EQ(first_difference(results, usual), "");
        for (std::size_t row = 0; row < results.lse.size(); ++row) {
          if (!is_empty(row)) continue;
          EXPECT_EQ(results.lse[row], static_cast<float>(inputs.sinks[row % 4]));
          for (std::size_t i = row * 16; i < row * 16 + 16; ++i) {
            EXPECT_EQ(results.o[i], 0.0F);
            EXPECT_EQ(results.dq[i], 0.0F);
          }
        }
        EXPECT_EQ(results.dsinks[3], 0.0F);
      }
    }
  }
}

TEST(Sinks, NaNAndPlusInfinityPoisonEveryRowOfTheirHead) {
  for (const double bad : {std::numeric_limits<double>::quiet_NaN(), kInf}) {
    for (const MixGradient mix : {MixGradient::full, MixGradient::detached}) {
      for (const DType dtype : {DType::f32, DType::bf16}) {
        for (const int ranks : {1, 3}) {
          const Problem problem = half_empty(dtype, mix);
          Inputs inputs = random_inputs(problem, 4);
          inputs.sinks = {0.5, bad, 3.0, bad};
          const Results results =
              run_ring(ring_options(problem, Placement::contiguous(30, ranks)), inputs);
          for (std::size_t row = 0; row < results.lse.size(); ++row) {
            EXPECT_EQ(std::isnan(results.lse[row]), row % 2 == 1);
            for (std::size_t i = row * 16; i < row * 16 + 16; ++i)
              EXPECT_EQ(std::isnan(results.o[i]), row % 2 == 1);
          }
          EXPECT_FALSE(std::isnan(results.dsinks[0]));
          EXPECT_TRUE(std::isnan(results.dsinks[1]));
        }
      }
    }
  }
}

// Of a sink that outweighs every key, and one that weighs next to nothing.
TEST(Sinks, LargeAndSmallOnesKeepTheirRelativePrecision) {
  for (const double sink : {-80.0, -30.0, 20.0, 60.0}) {
    const Problem problem = with_sinks(make_problem("large", dense(4, true), 2, 64, 16));
    Inputs inputs = random_inputs(problem, 5);
    inputs.sinks.assign(4, sink);
    const Results results = run_ring(ring_options(problem, Placement::contiguous(64, 2)), inputs);
    const Expected expected = reference_of(problem, inputs);
    for (std::size_t m : {0U, 2U, 3U, 4U, 5U})
      EXPECT_LE(relative_rms(*members(results)[m], *members(expected)[m]), 2e-5)
          << kResultNames[m] << ", sink " << sink;
  }
}

// The sum has as many terms as there are rows. In fp32, one after the other, it would be off by
// much more than 1e-6 of itself here, where all terms have the same sign.
TEST(Sinks, GradientOfManyRowsIsExact) {
  const std::int64_t tokens = slowness() > 1 ? 65536 : 1 << 20;
  RingOptions options{longnet(1, List{32}, List{1}), Placement::contiguous(tokens, 1)};
  options.head_dim = 8;
  const auto rows = static_cast<std::size_t>(tokens);
  std::vector<float> q(rows * 8, 0.0F);
  std::vector<float> v(rows * 8);
  std::vector<float> dout(rows * 8, 0.125F);
  for (std::size_t i = 0; i < v.size(); ++i) v[i] = 1.0F + static_cast<float>(i % 7) / 8;
  std::vector<float> o(rows * 8), lse(rows), dq(rows * 8), dk(rows * 8), dv(rows * 8);
  float sink = -1.0F;
  float dsink = NAN;
  run_in_process(1, [&](Transport& transport) {
    RingAttention ring(options, transport);
    const auto view = [&](std::vector<float>& x) {
      return TensorView(x.data(), DType::f32, {1, tokens, 1, 8});
    };
    const TensorView lse_view(lse.data(), DType::f32, {1, tokens, 1});
    OptionalInputs more;
    more.sinks = TensorView(&sink, DType::f32, {1});
    ring.forward(view(q), view(q), view(v), view(o), lse_view, nullptr, more);
    ring.backward(view(q), view(q), view(v), view(o), lse_view, view(dout), view(dq), view(dk),
                  view(dv), nullptr, more, {TensorView(&dsink, DType::f32, {1})});
  });
  double expected = 0;
  const double weight = std::exp(-1.0) / (32 + std::exp(-1.0));  // all scores are 0
  for (std::size_t i = 0; i < v.size(); ++i) expected -= weight * (1 - weight) * 0.125 * v[i];
  EXPECT_NEAR(dsink / expected, 1.0, 1e-6);  // every row has the same rounding errors
}

TEST(Sinks, GradientHasTheSameBitsForEveryNumberOfThreads) {
  const Problem problem = with_sinks(make_problem("threads", dense(4, true), 2, 300, 16, 2));
  const Inputs inputs = random_inputs(problem, 6);
  std::vector<float> first;
  for (const int threads : {1, 2, 3, 5}) {
    RingOptions options = ring_options(problem, Placement::zigzag(300, 2));
    options.threads = threads;
    options.reproducible = true;
    const Results results = run_ring(options, inputs);
    if (first.empty()) first = results.dsinks_of_ranks;
    EXPECT_EQ(results.dsinks_of_ranks, first) << threads;
  }
}

// More ranks than tokens: those without any add nothing.
TEST(Sinks, RanksWithoutTokensHaveAGradientOfZero) {
  const Problem problem = with_sinks(make_problem("few", dense(4), 2, 2, 16));
  const Inputs inputs = random_inputs(problem, 7);
  const Results results = run_ring(ring_options(problem, Placement::contiguous(2, 4)), inputs);
  expect_matches(problem, results, reference_of(problem, inputs));
  for (std::size_t i = 8; i < 16; ++i) EXPECT_EQ(results.dsinks_of_ranks[i], 0.0F);
}

// Calls in pieces, for want of memory.
TEST(Sinks, PiecesOfSequencesAndHeadsGiveTheReference) {
  for (const std::int64_t plans : {2, 3, 4}) {
    const Problem problem = with_sinks(
        make_problem("pieces", longnet(8, List{16, 64}, List{1, 4}, true), 4, 70, 16, 4));
    const RingOptions options = ring_options(problem, Placement::striped(70, 2));
    const Inputs inputs = random_inputs(problem, 8);
    Results results = empty_results(options);
    results.dsinks_of_ranks.resize(16);
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
    for (std::size_t h = 0; h < 8; ++h)
      results.dsinks.push_back(results.dsinks_of_ranks[h] + results.dsinks_of_ranks[8 + h]);
    expect_matches(problem, results, reference_of(problem, inputs));
  }
}

TEST(Sinks, MistakesOfOneRankAreErrorsOfAllAndTheNextCallIsFine) {
  const Problem problem = with_sinks(make_problem("mistakes", dense(4, true), 2, 40, 16));
  const RingOptions options = ring_options(problem, Placement::contiguous(40, 3));
  const Inputs inputs = random_inputs(problem, 9);
  struct Mistake {
    const char* text;
    void (*make)(OptionalInputs& more, OptionalGradients& gradients);
    bool forward;
  };
  const Mistake mistakes[] = {
      {"ranks disagree about whether sinks are passed",
       [](OptionalInputs& more, OptionalGradients& gradients) {
         more.sinks.reset();
         gradients.sinks.reset();
       },
       true},
      {"sinks is [3], expected [4]: one number per query head",
       [](OptionalInputs& more, OptionalGradients&) { more.sinks->shape[0] = 3; }, true},
      {"sinks is [], expected [4]",
       [](OptionalInputs& more, OptionalGradients&) { more.sinks->rank = 0; }, true},
      {"sinks is bf16, expected fp32",
       [](OptionalInputs& more, OptionalGradients&) { more.sinks->dtype = DType::bf16; }, true},
      {"sinks has no data",
       [](OptionalInputs& more, OptionalGradients&) { more.sinks->data = nullptr; }, true},
      {"sinks is given, but sinks is not",
       [](OptionalInputs& more, OptionalGradients&) { more.sinks.reset(); }, false},
      {"dsinks is [5], expected [4]",
       [](OptionalInputs&, OptionalGradients& gradients) { gradients.sinks->shape[0] = 5; }, false},
      {"dsinks has stride 0 on axis 0",
       [](OptionalInputs&, OptionalGradients& gradients) { gradients.sinks->stride[0] = 0; },
       false},
      {"dsinks shares memory with sinks",
       [](OptionalInputs& more, OptionalGradients& gradients) {
         gradients.sinks->data = const_cast<void*>(more.sinks->data);
       },
       false}};
  for (const Mistake& mistake : mistakes) {
    for (int wrong = 0; wrong < 3; wrong += 2) {
      SCOPED_TRACE(std::string(mistake.text) + ", rank " + std::to_string(wrong));
      const auto outcomes = run_ranks(3, [&](Transport& transport) {
        RingAttention ring(options, transport);
        Shard shard(options, transport.rank());
        shard.load(inputs);
        shard.forward(ring);
        shard.backward(ring);
        OptionalInputs more = shard.more();
        OptionalGradients gradients = shard.more_gradients();
        if (transport.rank() == wrong) mistake.make(more, gradients);
        const auto forward = [&] {
          ring.forward(shard.q.view(), shard.k.view(), shard.v.view(), shard.o.view(),
                       shard.lse.view(), nullptr, more);
        };
        const auto backward = [&] {
          ring.backward(shard.q.view(), shard.k.view(), shard.v.view(), shard.o.view(),
                        shard.lse.view(), shard.dout.view(), shard.dq.view(), shard.dk.view(),
                        shard.dv.view(), nullptr, more, gradients);
        };
        for (const bool is_forward : {true, false}) {
          if (is_forward && !mistake.forward) continue;
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

}  // namespace
}  // namespace annulus::test
