// Whatever one rank or all of them get wrong, every rank hears of it at once, in words, and nothing hangs or breaks.

#include <gtest/gtest.h>

#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "annulus/error.h"
#include "annulus/in_process.h"
#include "annulus/pattern.h"
#include "annulus/ring_attention.h"
#include "ring/agreement.h"
#include "support/ring_fixture.h"

namespace annulus {
namespace {

using test::make_problem;
using test::Problem;
using test::RankOutcome;
using test::run_ranks;
using test::Shard;

using List = std::vector<std::int64_t>;
using Texts = std::vector<std::string>;

constexpr int kRanks = 3;
constexpr std::int64_t kTokens = 22;  // 8, 7 and 7 of them

Problem small_problem(MixGradient mix = MixGradient::full) {
  return make_problem("small", longnet(4, List{8, 16}, List{1, 2}, true), 2, kTokens, 16, 2, mix);
}

RingOptions small_options(MixGradient mix = MixGradient::full) {
  return ring_options(small_problem(mix), Placement::contiguous(kTokens, kRanks));
}

void expect_everywhere(const std::vector<RankOutcome>& outcomes, const std::string& kind, const Texts& texts) {
  for (std::size_t rank = 0; rank < outcomes.size(); ++rank) {
    const RankOutcome& outcome = outcomes[rank];
    EXPECT_EQ(outcome.kind, kind) << "rank " << rank << ": " << outcome.message;
    EXPECT_LT(outcome.seconds, 1.0 * test::slowness()) << "rank " << rank;
    for (const std::string& text : texts) {
      EXPECT_NE(outcome.message.find(text), std::string::npos)
          << "rank " << rank << " says '" << outcome.message << "', without '" << text << "'";
    }
  }
}

// ---- tensors -----------------------------------------------------------------------------------

struct Views {
  TensorView q, k, v, o, lse, dout, dq, dk, dv;

  explicit Views(const Shard& s)
      : q(s.q.view()), k(s.k.view()), v(s.v.view()), o(s.o.view()), lse(s.lse.view()), dout(s.dout.view()),
        dq(s.dq.view()), dk(s.dk.view()), dv(s.dv.view()) {}

  TensorView& named(const std::string& name) {
    const std::pair<const char*, TensorView*> all[] = {{"q", &q},       {"k", &k},   {"v", &v},   {"o", &o},  {"lse", &lse},
                                                       {"dout", &dout}, {"dq", &dq}, {"dk", &dk}, {"dv", &dv}};
    for (const auto& [key, view] : all) {
      if (name == key) return *view;
    }
    throw std::logic_error("no tensor " + name);
  }
  void forward(RingAttention& ring, BranchState* state = nullptr) const { ring.forward(q, k, v, o, lse, state); }
  void backward(RingAttention& ring, const BranchState* state = nullptr) const {
    ring.backward(q, k, v, o, lse, dout, dq, dk, dv, state);
  }
};

struct Fault {
  const char* name;
  std::function<void(TensorView&)> spoil;
  const char* text;  // in the message, besides the tensor's name
};

const std::vector<Fault>& faults() {
  static const std::vector<Fault> all = {
      {"too_many_tokens", [](TensorView& t) { t.shape[1] += 1; }, "expected ["},
      {"no_tokens", [](TensorView& t) { t.shape[1] = 0; }, "expected ["},
      {"another_batch", [](TensorView& t) { t.shape[0] = 1; }, "expected [2, "},
      {"another_head_count", [](TensorView& t) { t.shape[2] = 3; }, "expected ["},
      {"fewer_axes", [](TensorView& t) { t.rank -= 1; }, "expected ["},
      {"no_axes", [](TensorView& t) { t = TensorView(t.data, t.dtype, {}); }, "expected ["},
      {"negative_extent", [](TensorView& t) { t.shape[0] = -2; }, "expected [2, "},
      {"another_dtype", [](TensorView& t) { t.dtype = DType::bf16; }, "expected fp32"},
      {"null_pointer", [](TensorView& t) { t.data = nullptr; }, "null"},
  };
  return all;
}

// Calls forward or backward with one bad tensor, on rank 1 only or on all ranks, then correctly.
void expect_refused(const std::string& tensor, const Fault& fault, bool backward, bool all_ranks) {
  SCOPED_TRACE(tensor + ", " + fault.name + (backward ? ", backward" : ", forward") + (all_ranks ? ", all ranks" : ", rank 1"));
  const Problem problem = small_problem();
  const RingOptions options = small_options();
  const test::Inputs inputs = test::random_inputs(problem, 1);
  static const test::Expected expected = test::reference_of(problem, inputs);
  test::Results results = test::empty_results(options);
  std::vector<RankOutcome> refusals(kRanks);
  const auto outcomes = run_ranks(kRanks, [&](Transport& transport) {
    RingAttention ring(options, transport);
    Shard shard(options, transport.rank());
    shard.load(inputs);
    shard.forward(ring);
    Views views(shard);
    if (all_ranks || transport.rank() == 1) fault.spoil(views.named(tensor));
    RankOutcome& refusal = refusals[static_cast<std::size_t>(transport.rank())];
    const auto start = std::chrono::steady_clock::now();
    try {
      backward ? views.backward(ring) : views.forward(ring);
    } catch (const ConfigError& error) {
      refusal = {"ConfigError", error.what(), 0};
    }
    refusal.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    shard.load(inputs);  // a refused call has changed nothing, and the executor still works
    shard.forward(ring);
    shard.backward(ring);
    shard.collect(results);
  });
  expect_everywhere(outcomes, "", {});
  expect_everywhere(refusals, "ConfigError",
                    {tensor + " ", fault.text, backward ? "RingAttention::backward" : "RingAttention::forward"});
  if (!all_ranks) {
    EXPECT_EQ(refusals[1].message.rfind("[rank 1/3] ", 0), 0U) << refusals[1].message;
    EXPECT_NE(refusals[0].message.find("rank 1 "), std::string::npos) << refusals[0].message;
    EXPECT_NE(refusals[2].message.find("rank 1 "), std::string::npos) << refusals[2].message;
  }
  test::expect_matches(problem, results, expected);
}

TEST(RingErrors, WrongForwardTensorIsAConfigErrorOnEveryRank) {
  bool all_ranks = false;
  for (const char* tensor : {"q", "k", "v", "o", "lse"}) {
    for (const Fault& fault : faults()) {
      expect_refused(tensor, fault, false, all_ranks);
      all_ranks = !all_ranks;
    }
  }
}

TEST(RingErrors, WrongBackwardTensorIsAConfigErrorOnEveryRank) {
  bool all_ranks = false;
  for (const char* tensor : {"q", "k", "v", "o", "lse", "dout", "dq", "dk", "dv"}) {
    for (const Fault& fault : faults()) {
      expect_refused(tensor, fault, true, all_ranks);
      all_ranks = !all_ranks;
    }
  }
}

TEST(RingErrors, LastAxisMustBeContiguous) {
  const Fault fault{"stride", [](TensorView& t) { t.stride[3] = 2; }, "stride 2"};
  for (const char* tensor : {"q", "k", "v", "o"}) expect_refused(tensor, fault, false, false);
  for (const char* tensor : {"dout", "dq", "dk", "dv"}) expect_refused(tensor, fault, true, true);
}

TEST(RingErrors, MessageSaysWhatWasFoundAndWhatWasExpected) {
  const RingOptions options = small_options();
  const auto outcomes = run_ranks(kRanks, [&](Transport& transport) {
    RingAttention ring(options, transport);
    Shard shard(options, transport.rank());
    Views views(shard);
    views.k.shape[1] = 5;
    views.forward(ring);
  });
  EXPECT_EQ(outcomes[0].message,
            "[rank 0/3] RingAttention::forward: k is [2, 5, 2, 16], expected [2, 8, 2, 16]: placement 'contiguous' gives "
            "this rank 8 tokens");
}

// ---- calls -------------------------------------------------------------------------------------

TEST(RingErrors, ForwardHereAndBackwardThereIsAConfigErrorEverywhere) {
  const RingOptions options = small_options();
  const test::Inputs inputs = test::random_inputs(small_problem(), 1);
  std::atomic<int> fine{0};
  const auto outcomes = run_ranks(kRanks, [&](Transport& transport) {
    RingAttention ring(options, transport);
    Shard shard(options, transport.rank());
    shard.load(inputs);
    shard.forward(ring);
    try {
      transport.rank() == 1 ? shard.backward(ring) : shard.forward(ring);
    } catch (const ConfigError&) {
      shard.forward(ring);
      shard.backward(ring);
      ++fine;
      throw;
    }
  });
  EXPECT_EQ(fine, kRanks) << "the executors should work afterwards";
  expect_everywhere(outcomes, "ConfigError", {"forward or backward", "rank 1"});
}

TEST(RingErrors, BackwardNeedsAnExecutorBuiltForIt) {
  RingOptions options = small_options();
  options.backward = false;
  const auto outcomes = run_ranks(kRanks, [&](Transport& transport) {
    RingAttention ring(options, transport);
    EXPECT_EQ(ring.predicted_backward_bytes(), 0);
    EXPECT_THROW((void)ring.backward_plan(), ConfigError);
    Shard shard(options, transport.rank());
    shard.load(test::random_inputs(small_problem(), 1));
    shard.forward(ring);
    shard.backward(ring);
  });
  expect_everywhere(outcomes, "ConfigError", {"backward = false"});
}

TEST(RingErrors, DetachedNeedsTheStateOfForward) {
  const RingOptions options = small_options(MixGradient::detached);
  for (const bool everywhere : {true, false}) {
    const auto outcomes = run_ranks(kRanks, [&](Transport& transport) {
      RingAttention ring(options, transport);
      Shard shard(options, transport.rank());
      shard.load(test::random_inputs(small_problem(), 1));
      shard.forward(ring);
      const Views views(shard);
      const bool without = everywhere || transport.rank() == 2;
      views.backward(ring, without ? nullptr : &shard.state);
    });
    expect_everywhere(outcomes, "ConfigError", {"detached", "state", "make_branch_state"});
    const auto empty = run_ranks(kRanks, [&](Transport& transport) {
      RingAttention ring(options, transport);
      Shard shard(options, transport.rank());
      const Views views(shard);
      const BranchState nothing;
      views.backward(ring, &nothing);
    });
    expect_everywhere(empty, "ConfigError", {"detached", "state"});
  }
}

TEST(RingErrors, StateOnSomeRanksOnlyIsAConfigError) {
  const RingOptions options = small_options(MixGradient::detached);
  const auto outcomes = run_ranks(kRanks, [&](Transport& transport) {
    RingAttention ring(options, transport);
    Shard shard(options, transport.rank());
    BranchState state = ring.make_branch_state();
    Views(shard).forward(ring, transport.rank() == 0 ? nullptr : &state);
  });
  expect_everywhere(outcomes, "ConfigError", {"state"});
}

// A state has the size of the executor that made it. Another one's would be read and written out of bounds.
TEST(RingErrors, StateOfAnotherShapeIsAConfigError) {
  const RingOptions options = small_options(MixGradient::detached);
  RingOptions larger = options;
  larger.batch = 4;
  RingOptions other_branches = options;
  other_branches.pattern.branches.push_back(other_branches.pattern.branches[0]);
  for (const RingOptions& other : {larger, other_branches}) {
    const auto outcomes = run_ranks(kRanks, [&](Transport& transport) {
      RingAttention ring(options, transport);
      RingAttention stranger(other, transport);
      Shard shard(options, transport.rank());
      shard.load(test::random_inputs(small_problem(), 1));
      BranchState state = stranger.make_branch_state();
      Views(shard).forward(ring, &state);
    });
    expect_everywhere(outcomes, "ConfigError", {"state"});
    const auto in_backward = run_ranks(kRanks, [&](Transport& transport) {
      RingAttention ring(options, transport);
      RingAttention stranger(other, transport);
      Shard shard(options, transport.rank());
      shard.load(test::random_inputs(small_problem(), 1));
      shard.forward(ring);
      const BranchState state = stranger.make_branch_state();
      Views(shard).backward(ring, &state);
    });
    expect_everywhere(in_backward, "ConfigError", {"state"});
  }
}

// Rank 0's executor is busy for as long as rank 1 has not called: a second caller is told so at once.
TEST(RingErrors, SecondCallerOfABusyExecutorGetsAConfigError) {
  const Problem problem = make_problem("busy", dense(2), 2, 16, 8);
  const RingOptions options = ring_options(problem, Placement::contiguous(16, 2));
  const test::Inputs inputs = test::random_inputs(problem, 1);
  test::Results results = test::empty_results(options);
  std::atomic<bool> first_is_waiting{false};
  std::atomic<int> refusals{0};
  std::string message;
  const auto outcomes = run_ranks(2, [&](Transport& transport) {
    RingAttention ring(options, transport);
    Shard shard(options, transport.rank());
    shard.load(inputs);
    if (transport.rank() == 1) {
      while (refusals < 1) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      shard.forward(ring);
      shard.backward(ring);
    } else {
      std::thread second([&] {
        while (!first_is_waiting) std::this_thread::yield();
        Shard other(options, 0);
        other.load(inputs);
        for (int tries = 0; refusals < 1 && tries < 1000; ++tries) {
          try {
            // Until the first call has got hold of the executor this one waits for rank 1 itself: give it time.
            std::this_thread::sleep_for(std::chrono::milliseconds(30));
            other.forward(ring);
            ADD_FAILURE() << "both callers were served";
          } catch (const ConfigError& error) {
            message = error.what();
            ++refusals;
          }
        }
      });
      first_is_waiting = true;
      shard.forward(ring);
      second.join();
      shard.backward(ring);
    }
    shard.collect(results);
  });
  expect_everywhere(outcomes, "", {});
  EXPECT_EQ(refusals, 1);
  EXPECT_NE(message.find("already running"), std::string::npos) << message;
  test::expect_matches(problem, results, test::reference_of(problem, inputs));
}

// ---- construction ------------------------------------------------------------------------------

struct Mismatch {
  const char* name;
  std::function<void(RingOptions&)> change;
  const char* text;  // every rank's message says what differs
};

class MismatchTest : public ::testing::TestWithParam<Mismatch> {};

TEST_P(MismatchTest, IsAConfigErrorEverywhereThatSaysWhatDiffers) {
  for (const int odd_rank : {0, 1, 4}) {
    const RingOptions options = ring_options(small_problem(), Placement::contiguous(kTokens, 5));
    const auto outcomes = run_ranks(5, [&](Transport& transport) {
      RingOptions mine = options;
      if (transport.rank() == odd_rank) GetParam().change(mine);
      const RingAttention ring(mine, transport);
    });
    expect_everywhere(outcomes, "ConfigError", {GetParam().text, "disagree"});
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, MismatchTest,
    ::testing::Values(
        Mismatch{"pattern", [](RingOptions& o) { o.pattern = dense(4, true); }, "pattern"},
        Mismatch{"causal", [](RingOptions& o) { o.pattern.causal = false; }, "pattern"},
        Mismatch{"output_scale", [](RingOptions& o) { o.pattern.output_scale = 0.5; }, "pattern"},
        Mismatch{"offsets", [](RingOptions& o) { o.pattern.branches[1].offset[0] = 1; }, "pattern"},
        Mismatch{"placement", [](RingOptions& o) { o.placement = Placement::striped(kTokens, 5); }, "placement"},
        Mismatch{"tokens", [](RingOptions& o) { o.placement = Placement::contiguous(kTokens + 1, 5); }, "placement"},
        Mismatch{"dtype", [](RingOptions& o) { o.dtype = DType::bf16; }, "dtype"},
        Mismatch{"scale", [](RingOptions& o) { o.scale = 0.3; }, "scale"},
        Mismatch{"batch", [](RingOptions& o) { o.batch = 1; }, "batch"},
        Mismatch{"head_dim", [](RingOptions& o) { o.head_dim = 24; o.scale = 0.25; }, "head_dim"},
        Mismatch{"kv_heads", [](RingOptions& o) { o.kv_heads = 4; }, "kv_heads"},
        Mismatch{"schedule", [](RingOptions& o) { o.schedule = Schedule::ring; }, "schedule"},
        Mismatch{"reproducible", [](RingOptions& o) { o.reproducible = true; }, "reproducible"},
        Mismatch{"mix_gradient", [](RingOptions& o) { o.mix_gradient = MixGradient::detached; }, "mix_gradient"},
        Mismatch{"backward", [](RingOptions& o) { o.backward = false; }, "backward"},
        Mismatch{"backward_travel", [](RingOptions& o) { o.backward_travel = BackwardTravel::queries; }, "travel"}),
    [](const auto& info) { return std::string(info.param.name); });

// The default scale is the same as one given in full: not a mismatch.
TEST(RingErrors, SpelledOutDefaultsAreNoMismatch) {
  const RingOptions options = small_options();
  const auto outcomes = run_ranks(kRanks, [&](Transport& transport) {
    RingOptions mine = options;
    if (transport.rank() == 1) mine.scale = 1.0 / std::sqrt(16.0);
    if (transport.rank() == 2) mine.blocking = true;
    const RingAttention ring(mine, transport);
  });
  expect_everywhere(outcomes, "", {});
}

struct BadOption {
  const char* name;
  std::function<void(RingOptions&)> change;
  Texts texts;
};

// Sizes below would take the machine with them if a check failed: then memory runs out for this process alone.
class MemoryCap {
 public:
  MemoryCap() {
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
    getrlimit(RLIMIT_AS, &before_);
    rlimit capped = before_;
    capped.rlim_cur = std::min<rlim_t>(before_.rlim_max, rlim_t{6} << 30);
    setrlimit(RLIMIT_AS, &capped);
#endif
  }
  ~MemoryCap() {
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
    setrlimit(RLIMIT_AS, &before_);
#endif
  }
  MemoryCap(const MemoryCap&) = delete;
  MemoryCap& operator=(const MemoryCap&) = delete;

 private:
  [[maybe_unused]] rlimit before_{};
};

class BadOptionTest : public ::testing::TestWithParam<BadOption> {};

TEST_P(BadOptionTest, IsAConfigErrorEverywhere) {
  const MemoryCap cap;
  for (const bool all_ranks : {true, false}) {
    SCOPED_TRACE(all_ranks ? "on all ranks" : "on rank 2");
    const auto outcomes = run_ranks(kRanks, [&](Transport& transport) {
      RingOptions mine = small_options();
      if (all_ranks || transport.rank() == 2) GetParam().change(mine);
      const RingAttention ring(mine, transport);
    });
    expect_everywhere(outcomes, "ConfigError", GetParam().texts);
  }
}

constexpr std::int64_t kHuge = std::numeric_limits<std::int64_t>::max();

INSTANTIATE_TEST_SUITE_P(
    All, BadOptionTest,
    ::testing::Values(
        BadOption{"head_dim_60", [](RingOptions& o) { o.head_dim = 60; }, {"head_dim is 60", "multiple of 8", "256"}},
        BadOption{"head_dim_264", [](RingOptions& o) { o.head_dim = 264; }, {"head_dim is 264", "256"}},
        BadOption{"head_dim_0", [](RingOptions& o) { o.head_dim = 0; }, {"head_dim is 0"}},
        BadOption{"head_dim_minus_8", [](RingOptions& o) { o.head_dim = -8; }, {"head_dim is -8"}},
        BadOption{"batch_0", [](RingOptions& o) { o.batch = 0; }, {"batch is 0"}},
        BadOption{"batch_2_to_60", [](RingOptions& o) { o.batch = std::int64_t{1} << 60; }, {"limits.qkv_elements"}},
        BadOption{"batch_largest", [](RingOptions& o) { o.batch = kHuge; }, {"limits.qkv_elements"}},
        BadOption{"kv_heads_0", [](RingOptions& o) { o.kv_heads = 0; }, {"kv_heads is 0"}},
        BadOption{"kv_heads_3", [](RingOptions& o) { o.kv_heads = 3; }, {"kv_heads is 3", "4"}},
        BadOption{"kv_heads_8", [](RingOptions& o) { o.kv_heads = 8; }, {"kv_heads is 8", "4"}},
        BadOption{"scale_0", [](RingOptions& o) { o.scale = 0; }, {"scale is 0"}},
        BadOption{"scale_nan", [](RingOptions& o) { o.scale = std::nan(""); }, {"scale is"}},
        BadOption{"scale_infinite", [](RingOptions& o) { o.scale = INFINITY; }, {"scale is inf"}},
        BadOption{"reproducible_ring",
                  [](RingOptions& o) {
                    o.reproducible = true;
                    o.schedule = Schedule::ring;
                  },
                  {"reproducible", "gather"}},
        BadOption{"placement_for_others", [](RingOptions& o) { o.placement = Placement::contiguous(kTokens, 2); },
                  {"placement 'contiguous' is for 2 ranks", "3"}},
        BadOption{"no_branches", [](RingOptions& o) { o.pattern.branches.clear(); }, {"no branches"}},
        BadOption{"dilation_0", [](RingOptions& o) { o.pattern.branches[0].dilation = 0; }, {"dilation is 0"}},
        BadOption{"output_scale_nan", [](RingOptions& o) { o.pattern.output_scale = std::nan(""); }, {"output_scale"}}),
    [](const auto& info) { return std::string(info.param.name); });

// An output scale of 0 is odd but finite: everything is 0, and not 0/0.
TEST(RingErrors, OutputScaleOfZeroGivesZeros) {
  Problem problem = small_problem();
  problem.pattern.output_scale = 0;
  const test::Inputs inputs = test::random_inputs(problem, 1);
  const RingOptions options = ring_options(problem, Placement::contiguous(kTokens, kRanks));
  try {
    const test::Results results = test::run_ring(options, inputs);
    for (const std::size_t m : {0, 2, 3, 4}) {
      for (const float x : *test::members(results)[m]) ASSERT_EQ(x, 0.0F) << test::kResultNames[m];
    }
  } catch (const ConfigError& error) {  // as good
    EXPECT_NE(std::string(error.what()).find("output_scale"), std::string::npos);
  }
}

// ---- limits ------------------------------------------------------------------------------------

std::vector<RankOutcome> build(const RingOptions& options) {
  return run_ranks(options.placement.ranks(), [&](Transport& transport) { const RingAttention ring(options, transport); });
}

TEST(RingLimits, CommunicationBytesMayBeReachedButNotExceeded) {
  for (const bool backward : {false, true}) {
    for (const Schedule schedule : {Schedule::ring, Schedule::gather}) {
      RingOptions options = small_options();
      options.schedule = schedule;
      options.backward = backward;
      std::atomic<std::int64_t> most{0};
      (void)run_ranks(kRanks, [&](Transport& transport) {
        const std::int64_t bytes = RingAttention(options, transport).memory_info().communication_bytes;
        std::int64_t seen = most;
        while (bytes > seen && !most.compare_exchange_weak(seen, bytes)) {
        }
      });
      ASSERT_GT(most, 0);
      options.limits.communication_bytes = most;
      expect_everywhere(build(options), "", {});
      options.limits.communication_bytes = most - 1;
      expect_everywhere(build(options), "ConfigError",
                        {"limits.communication_bytes allows " + std::to_string(most - 1), std::to_string(most) + " bytes",
                         "more ranks", "raise the limit"});
    }
  }
}

TEST(RingLimits, QkvElementsMayBeReachedButNotExceeded) {
  RingOptions options = small_options();
  const std::int64_t elements = 2 * 8 * (4 + 2 * 2) * 16;  // of rank 0, which has 8 tokens; the others have 7
  options.limits.qkv_elements = elements;
  expect_everywhere(build(options), "", {});
  options.limits.qkv_elements = elements - 1;
  const auto outcomes = build(options);
  expect_everywhere(outcomes, "ConfigError",
                    {std::to_string(elements) + " elements", "limits.qkv_elements allows " + std::to_string(elements - 1),
                     "more ranks", "raise the limit"});
  EXPECT_NE(outcomes[1].message.find("rank 0 refused"), std::string::npos) << outcomes[1].message;
}

// Nothing may be allocated before the limits are checked: this would be 2^45 bytes.
TEST(RingLimits, AreCheckedBeforeAnythingIsAllocated) {
  const MemoryCap cap;
  RingOptions options = small_options();
  options.batch = std::int64_t{1} << 32;
  expect_everywhere(build(options), "ConfigError", {"limits.qkv_elements"});
  options.limits.qkv_elements = std::numeric_limits<std::int64_t>::max();
  expect_everywhere(build(options), "ConfigError", {"limits.communication_bytes"});
}

TEST(RingLimits, AutomaticScheduleFallsBackToRingWhereGatherIsTooLarge) {
  const Problem problem = make_problem("large", dense(2), 2, 512, 16);
  RingOptions options = ring_options(problem, Placement::contiguous(512, 8));
  options.min_tokens_for_ring = 0;
  const auto bytes = [&](Schedule schedule) {
    std::int64_t out = 0;
    options.schedule = schedule;
    (void)run_ranks(8, [&](Transport& transport) {
      const RingAttention ring(options, transport);
      if (transport.rank() == 0) out = ring.memory_info().communication_bytes;
    });
    return out;
  };
  const std::int64_t by_ring = bytes(Schedule::ring);
  const std::int64_t by_gather = bytes(Schedule::gather);
  ASSERT_LT(by_ring, by_gather);
  options.schedule = Schedule::automatic;
  for (const std::int64_t limit : {by_ring, (by_ring + by_gather) / 2, by_gather - 1}) {
    options.limits.communication_bytes = limit;
    Schedule chosen = Schedule::automatic;
    const auto outcomes = run_ranks(8, [&](Transport& transport) {
      const RingAttention ring(options, transport);
      if (transport.rank() == 0) chosen = ring.schedule();
    });
    expect_everywhere(outcomes, "", {});
    EXPECT_EQ(chosen, Schedule::ring) << "limit " << limit << ", ring needs " << by_ring << ", gather " << by_gather;
  }
}

TEST(RingLimits, AutomaticScheduleGathersBelowMinTokensForRing) {
  const Problem problem = make_problem("auto", dense(2), 2, 96, 16);
  RingOptions options = ring_options(problem, Placement::contiguous(96, 4));
  const auto chosen = [&](std::int64_t min_tokens) {
    options.min_tokens_for_ring = min_tokens;
    Schedule schedule = Schedule::automatic;
    (void)run_ranks(4, [&](Transport& transport) {
      const RingAttention ring(options, transport);
      if (transport.rank() == 3) schedule = ring.schedule();
    });
    return schedule;
  };
  EXPECT_EQ(chosen(97), Schedule::gather);
  // From 96 on the predicted times decide, as they would with any lower threshold.
  EXPECT_EQ(chosen(96), chosen(0));
  EXPECT_EQ(chosen(95), chosen(0));
}

// ---- ranks that fail ---------------------------------------------------------------------------

TEST(RingFailures, RankThatDiesDuringAPassIsATransportErrorOnTheOthers) {
  const Problem problem = make_problem("dies", dense(2, true), 1, 40, 16);
  const test::Inputs inputs = test::random_inputs(problem, 1);
  struct Death {
    const char* name;
    std::uint32_t tag;
    int after;
  };
  for (const Death& death : {Death{"first rows", ring::kTagParcels, 0}, Death{"later rows", ring::kTagParcels, 2},
                             Death{"agreement", ring::kTagAgree, 1}, Death{"gradients", ring::kTagReturns, 1}}) {
    SCOPED_TRACE(death.name);
    RingOptions options = ring_options(problem, Placement::zigzag(40, 4));
    options.schedule = Schedule::ring;
    const auto outcomes = run_ranks(4, [&](Transport& inner) {
      test::WatchedTransport transport(inner);
      RingAttention ring(options, transport);
      Shard shard(options, transport.rank());
      shard.load(inputs);
      if (transport.rank() == 2) transport.fail_after(death.tag, death.after);
      shard.forward(ring);
      shard.backward(ring);
    });
    for (std::size_t rank = 0; rank < 4; ++rank) {
      EXPECT_EQ(outcomes[rank].kind, rank == 2 ? "other" : "TransportError") << rank << ": " << outcomes[rank].message;
      EXPECT_NE(outcomes[rank].message.find("rank failure for the test"), std::string::npos) << outcomes[rank].message;
      EXPECT_LT(outcomes[rank].seconds, 1.0 * test::slowness());
      if (rank != 2) {
        EXPECT_NE(outcomes[rank].message.find("rank 2"), std::string::npos) << outcomes[rank].message;
      }
    }
  }
}

TEST(RingFailures, RankThatNeverComesIsATransportErrorOnTheOthers) {
  const RingOptions options = small_options();
  std::atomic<int> transport_errors{0};
  const auto body = [&](Transport& transport) {
    try {
      RingAttention ring(options, transport);  // the others may still be at it when rank 1 leaves
      Shard shard(options, transport.rank());
      shard.load(test::random_inputs(small_problem(), 1));
      if (transport.rank() == 1) throw std::runtime_error("out of coffee");
      shard.forward(ring);
    } catch (const TransportError& error) {
      EXPECT_EQ(error.rank(), 1);
      EXPECT_NE(std::string(error.what()).find("out of coffee"), std::string::npos) << error.what();
      ++transport_errors;
      throw;
    }
  };
  EXPECT_THROW(run_in_process(kRanks, body), std::runtime_error);
  EXPECT_EQ(transport_errors, kRanks - 1);
}

// Once broken, always broken: later calls fail at once instead of waiting for anybody.
TEST(RingFailures, CallsAfterAFailureFailAtOnce) {
  const RingOptions options = small_options();
  const auto outcomes = run_ranks(kRanks, [&](Transport& inner) {
    test::WatchedTransport transport(inner);
    RingAttention ring(options, transport);
    Shard shard(options, transport.rank());
    shard.load(test::random_inputs(small_problem(), 1));
    if (transport.rank() == 0) transport.fail_after(ring::kTagParcels, 0);
    EXPECT_ANY_THROW(shard.forward(ring));
    for (int again = 0; again < 3; ++again) EXPECT_THROW(shard.forward(ring), TransportError);
    EXPECT_THROW(shard.backward(ring), TransportError);
  });
  expect_everywhere(outcomes, "", {});
}

}  // namespace
}  // namespace annulus
