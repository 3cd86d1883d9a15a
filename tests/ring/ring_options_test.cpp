// Options that are wrong, differ between ranks or ask for too much: a ConfigError on every rank
// that says so, before anything is allocated.

#include <gtest/gtest.h>

#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <new>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "annulus/error.h"
#include "annulus/pattern.h"
#include "annulus/ring_attention.h"
#include "ring/agreement.h"
#include "ring/option_list.h"
#include "support/bad_luck.h"
#include "support/ring_fixture.h"
#include "support/small_ring.h"

namespace annulus::test {
namespace {

// A member that the list does not have is compared by no rank, tells no executors apart and has
// neither flag nor argument. A new one does not compile here until it has a name.
TEST(RingOptions, EveryMemberIsInTheList) {
  const RingOptions options = small_options();
  const auto& [pattern, placement, key_placement, batch, kv_heads, head_dim, dtype, scale, softcap,
               dropout_p, mix_gradient, schedule, min_tokens_for_ring, reproducible, deterministic,
               backward, backward_travel, blocking, recover, limits, rates, device, threads] =
      options;
  const auto& [communication_bytes, qkv_elements] = limits;
  const auto& [flops_per_second, bytes_per_second] = rates;
  std::set<const void*> listed;
  ring::for_each_option(
      options, [&](const ring::OptionInfo&, const auto& member) { listed.insert(&member); });
  // The pattern and the placements are told apart by what they say.
  const std::set<const void*> members = {&batch,
                                         &kv_heads,
                                         &head_dim,
                                         &dtype,
                                         &scale,
                                         &softcap,
                                         &dropout_p,
                                         &mix_gradient,
                                         &schedule,
                                         &min_tokens_for_ring,
                                         &reproducible,
                                         &deterministic,
                                         &backward,
                                         &backward_travel,
                                         &blocking,
                                         &recover,
                                         &communication_bytes,
                                         &qkv_elements,
                                         &flops_per_second,
                                         &bytes_per_second,
                                         &device,
                                         &threads};
  EXPECT_EQ(listed, members);
  EXPECT_EQ(pattern.heads, 4);
  EXPECT_EQ(placement.tokens(), kTokens);
  EXPECT_FALSE(key_placement.has_value());
}

// ---- ranks that differ -------------------------------------------------------------------------

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
        Mismatch{"window",
                 [](RingOptions& o) {
                   o.pattern.window = {3, 0};
                 },
                 "the pattern's window"},
        Mismatch{"output_scale", [](RingOptions& o) { o.pattern.output_scale = 0.5; }, "pattern"},
        Mismatch{"offsets", [](RingOptions& o) { o.pattern.branches[1].offset[0] = 1; }, "pattern"},
        Mismatch{"placement", [](RingOptions& o) { o.placement = Placement::striped(kTokens, 5); },
                 "placement"},
        Mismatch{"tokens",
                 [](RingOptions& o) { o.placement = Placement::contiguous(kTokens + 1, 5); },
                 "placement"},
        Mismatch{"key_placement",
                 [](RingOptions& o) { o.key_placement = Placement::striped(kTokens, 5); },
                 "the keys' placement"},
        Mismatch{"key_tokens",
                 [](RingOptions& o) { o.key_placement = Placement::contiguous(kTokens + 1, 5); },
                 "the keys' tokens"},
        Mismatch{"documents",
                 [](RingOptions& o) {
                   o.pattern.documents = {{.query_end = kTokens, .key_end = kTokens}};
                 },
                 "the documents (number and digest)"},
        Mismatch{"dtype", [](RingOptions& o) { o.dtype = DType::bf16; }, "dtype"},
        Mismatch{"scale", [](RingOptions& o) { o.scale = 0.3; }, "scale"},
        Mismatch{"softcap", [](RingOptions& o) { o.softcap = 20; }, "softcap"},
        Mismatch{"dropout_p", [](RingOptions& o) { o.dropout_p = 0.1; }, "dropout_p"},
        Mismatch{"batch", [](RingOptions& o) { o.batch = 1; }, "batch"},
        Mismatch{"head_dim",
                 [](RingOptions& o) {
                   o.head_dim = 24;
                   o.scale = 0.25;
                 },
                 "head_dim"},
        Mismatch{"kv_heads", [](RingOptions& o) { o.kv_heads = 4; }, "kv_heads"},
        Mismatch{"schedule", [](RingOptions& o) { o.schedule = Schedule::ring; }, "schedule"},
        Mismatch{"reproducible", [](RingOptions& o) { o.reproducible = true; }, "reproducible"},
        Mismatch{"mix_gradient", [](RingOptions& o) { o.mix_gradient = MixGradient::detached; },
                 "mix_gradient"},
        Mismatch{"backward", [](RingOptions& o) { o.backward = false; }, "backward"},
        Mismatch{"backward_travel",
                 [](RingOptions& o) { o.backward_travel = BackwardTravel::queries; }, "travel"}),
    [](const auto& info) { return std::string(info.param.name); });

// What one rank fails at without anybody's doing: its own error says what it is, and the others,
// who would wait for it, hear of it at once.
TEST(RingOptions, BadLuckOfOneRankIsAnErrorOfAll) {
  const FeignedLuck feigned;
  for (const auto& [bad, text] :
       {std::pair{Luck::no_memory, "out of memory while planning"}, {Luck::no_device, "on fire"}}) {
    const auto outcomes = run_ranks(kRanks, [&, bad = bad, text = text](Transport& transport) {
      FeignedLuck::of_this_thread = transport.rank() == 1 ? bad : Luck::good;
      if (bad == Luck::no_memory) {
        expect_refusal<OutOfMemory>(small_options(), transport, text);
      } else {
        expect_refusal<DeviceError>(small_options(), transport, text);
      }
    });
    expect_everywhere(outcomes, "", {});
  }
}

TEST(RingOptions, DigestsTellWhereAValueEnds) {
  const ring::Claim one[] = {{"batch", "1"}, {"kv_heads", "12"}};
  const ring::Claim other[] = {{"batch", "11"}, {"kv_heads", "2"}};
  EXPECT_NE(ring::digest_of(one), ring::digest_of(other));
}

// The default scale is the same as one given in full: not a mismatch.
TEST(RingOptions, SpelledOutDefaultsAreNoMismatch) {
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

// Sizes below would take the machine with them if a check failed: then memory runs out for this
// process alone.
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

INSTANTIATE_TEST_SUITE_P(
    All, BadOptionTest,
    ::testing::Values(
        BadOption{"head_dim_513",
                  [](RingOptions& o) { o.head_dim = 513; },
                  {"head_dim is 513", "expected 1 to 512"}},
        BadOption{"head_dim_0",
                  [](RingOptions& o) { o.head_dim = 0; },
                  {"head_dim is 0", "expected 1 to 512"}},
        BadOption{"head_dim_minus_8", [](RingOptions& o) { o.head_dim = -8; }, {"head_dim is -8"}},
        BadOption{"batch_0", [](RingOptions& o) { o.batch = 0; }, {"batch is 0"}},
        BadOption{"batch_2_to_31",
                  [](RingOptions& o) { o.batch = std::int64_t{1} << 31; },
                  {"batch is 2147483648, expected 1 to 2147483647"}},
        BadOption{"batch_too_large",
                  [](RingOptions& o) { o.batch = INT32_MAX; },
                  {"limits.qkv_elements"}},
        BadOption{"threads_4097",
                  [](RingOptions& o) { o.threads = 4097; },
                  {"threads is 4097, expected 0 to 4096"}},
        BadOption{"negative_limit",
                  [](RingOptions& o) { o.limits.communication_bytes = -1; },
                  {"max_communication_bytes is -1, expected at least 0"}},
        BadOption{"kv_heads_0", [](RingOptions& o) { o.kv_heads = 0; }, {"kv_heads is 0"}},
        BadOption{"kv_heads_3", [](RingOptions& o) { o.kv_heads = 3; }, {"kv_heads is 3", "4"}},
        BadOption{"kv_heads_8", [](RingOptions& o) { o.kv_heads = 8; }, {"kv_heads is 8", "4"}},
        BadOption{"scale_0", [](RingOptions& o) { o.scale = 0; }, {"scale is 0"}},
        BadOption{"scale_nan", [](RingOptions& o) { o.scale = std::nan(""); }, {"scale is"}},
        BadOption{"scale_infinite", [](RingOptions& o) { o.scale = INFINITY; }, {"scale is inf"}},
        BadOption{"softcap_negative", [](RingOptions& o) { o.softcap = -1; }, {"softcap is -1"}},
        BadOption{"softcap_nan", [](RingOptions& o) { o.softcap = std::nan(""); }, {"softcap is"}},
        BadOption{"softcap_tiny", [](RingOptions& o) { o.softcap = 1e-30; }, {"softcap is 1e-30"}},
        BadOption{"softcap_infinite", [](RingOptions& o) { o.softcap = INFINITY; }, {"softcap"}},
        BadOption{"dropout_1", [](RingOptions& o) { o.dropout_p = 1; }, {"dropout_p is 1", "less"}},
        BadOption{"dropout_negative", [](RingOptions& o) { o.dropout_p = -0.1; }, {"dropout_p"}},
        BadOption{"dropout_nan", [](RingOptions& o) { o.dropout_p = std::nan(""); }, {"dropout"}},
        BadOption{"reproducible_ring",
                  [](RingOptions& o) {
                    o.reproducible = true;
                    o.schedule = Schedule::ring;
                  },
                  {"reproducible", "gather"}},
        BadOption{"placement_for_others",
                  [](RingOptions& o) { o.placement = Placement::contiguous(kTokens, 2); },
                  {"placement 'contiguous' is for 2 ranks", "3"}},
        BadOption{"key_placement_for_others",
                  [](RingOptions& o) { o.key_placement = Placement::contiguous(kTokens, 2); },
                  {"key_placement 'contiguous' is for 2 ranks", "expected 3"}},
        BadOption{"document_past_the_end",
                  [](RingOptions& o) {
                    o.pattern.documents = {{.query_end = kTokens + 1, .key_end = kTokens}};
                  },
                  {"last document ends at query token", "number of query tokens"}},
        BadOption{
            "document_backwards",
            [](RingOptions& o) { o.pattern.documents = {{.query_begin = 2, .query_end = 1}}; },
            {"document 0: query tokens are [2, 1)"}},
        BadOption{"document_of_too_many_positions",
                  [](RingOptions& o) {
                    o.pattern.documents = {
                        {.query_end = 1, .key_end = 1, .query_start = std::int64_t{1} << 31U}};
                  },
                  {"positions", "2^31"}},
        BadOption{
            "no_branches", [](RingOptions& o) { o.pattern.branches.clear(); }, {"no branches"}},
        BadOption{"dilation_0",
                  [](RingOptions& o) { o.pattern.branches[0].dilation = 0; },
                  {"dilation is 0"}},
        BadOption{"output_scale_nan",
                  [](RingOptions& o) { o.pattern.output_scale = std::nan(""); },
                  {"output_scale"}}),
    [](const auto& info) { return std::string(info.param.name); });

// An output scale of 0 is odd but finite: everything is 0, and not 0/0.
TEST(RingOptions, OutputScaleOfZeroGivesZeros) {
  Problem problem = small_problem();
  problem.pattern.output_scale = 0;
  const Inputs inputs = random_inputs(problem, 1);
  const RingOptions options = ring_options(problem, Placement::contiguous(kTokens, kRanks));
  try {
    const Results results = run_ring(options, inputs);
    for (const std::size_t m : {0U, 2U, 3U, 4U}) {
      for (const float x : *members(results)[m]) ASSERT_EQ(x, 0.0F) << kResultNames[m];
    }
  } catch (const ConfigError& error) {  // as good
    EXPECT_NE(std::string(error.what()).find("output_scale"), std::string::npos);
  }
}

// ---- limits ------------------------------------------------------------------------------------

std::vector<RankOutcome> build(const RingOptions& options) {
  return run_ranks(options.placement.ranks(),
                   [&](Transport& transport) { const RingAttention ring(options, transport); });
}

TEST(RingLimits, CommunicationBytesMayBeReachedButNotExceeded) {
  for (const bool backward : {false, true}) {
    for (const Schedule schedule : {Schedule::ring, Schedule::gather}) {
      RingOptions options = small_options();
      options.schedule = schedule;
      options.backward = backward;
      std::atomic<std::int64_t> most{0};
      (void)run_ranks(kRanks, [&](Transport& transport) {
        const std::int64_t bytes =
            RingAttention(options, transport).memory_info().communication_bytes;
        std::int64_t seen = most;
        while (bytes > seen && !most.compare_exchange_weak(seen, bytes)) {
        }
      });
      ASSERT_GT(most, 0);
      options.limits.communication_bytes = most;
      expect_everywhere(build(options), "", {});
      options.limits.communication_bytes = most - 1;
      expect_everywhere(build(options), "ConfigError",
                        {"limits.communication_bytes allows " + std::to_string(most - 1),
                         std::to_string(most) + " bytes", "more ranks", "raise the limit"});
    }
  }
}

TEST(RingLimits, QkvElementsMayBeReachedButNotExceeded) {
  RingOptions options = small_options();
  const std::int64_t elements =
      2 * 8 * (4 + 2 * 2) * 16;  // of rank 0, which has 8 tokens; the others have 7
  options.limits.qkv_elements = elements;
  expect_everywhere(build(options), "", {});
  options.limits.qkv_elements = elements - 1;
  const auto outcomes = build(options);
  expect_everywhere(outcomes, "ConfigError",
                    {std::to_string(elements) + " elements",
                     "limits.qkv_elements allows " + std::to_string(elements - 1), "more ranks",
                     "raise the limit"});
  EXPECT_NE(outcomes[1].message.find("rank 0 refused"), std::string::npos) << outcomes[1].message;
}

// Nothing may be allocated before the limits are checked: this would be 2^44 bytes.
TEST(RingLimits, AreCheckedBeforeAnythingIsAllocated) {
  const MemoryCap cap;
  RingOptions options = small_options();
  options.batch = INT32_MAX;
  expect_everywhere(build(options), "ConfigError", {"limits.qkv_elements"});
  options.limits.qkv_elements = std::numeric_limits<std::int64_t>::max();
  expect_everywhere(build(options), "ConfigError", {"limits.communication_bytes"});
}

TEST(RingLimits, AutomaticScheduleFallsBackToRingWhereGatherIsTooLarge) {
  // Most rows come in the first of seven steps, and nothing else takes long: without a limit,
  // predicted times speak for gather. So does a threshold above the sequence's length.
  const Problem quick = make_problem("quick", longnet(2, List{128, 512}, List{1, 64}), 2, 512, 16);
  const Problem dense_one = make_problem("dense", dense(2), 2, 512, 16);
  for (const auto& [problem, min_tokens] :
       {std::pair{quick, std::int64_t{0}}, {dense_one, std::int64_t{1000}}}) {
    for (const bool backward : {false, true}) {
      SCOPED_TRACE(problem.pattern.name + (backward ? ", backward" : ""));
      RingOptions options = ring_options(problem, Placement::contiguous(512, 8));
      options.min_tokens_for_ring = min_tokens;
      options.rates = {.flops_per_second = 1e9, .bytes_per_second = 3e7};
      options.backward = backward;
      options.backward_travel = BackwardTravel::keys;
      const auto run = [&](Schedule schedule) {
        options.schedule = schedule;
        std::atomic<std::int64_t> most{0};
        std::atomic<Schedule> chosen{Schedule::automatic};
        const auto outcomes = run_ranks(8, [&](Transport& transport) {
          const RingAttention ring(options, transport);
          const std::int64_t bytes = ring.memory_info().communication_bytes;
          for (std::int64_t seen = most; bytes > seen && !most.compare_exchange_weak(seen, bytes);)
            ;
          chosen = ring.schedule();
        });
        expect_everywhere(outcomes, "", {});
        return std::pair{most.load(), chosen.load()};
      };
      const std::int64_t by_ring = run(Schedule::ring).first;
      const std::int64_t by_gather = run(Schedule::gather).first;
      ASSERT_LT(by_ring, by_gather);
      EXPECT_EQ(run(Schedule::automatic).second, Schedule::gather);
      for (const std::int64_t limit : {by_ring, (by_ring + by_gather) / 2, by_gather - 1}) {
        options.limits.communication_bytes = limit;
        EXPECT_EQ(run(Schedule::automatic).second, Schedule::ring)
            << "limit " << limit << ", ring needs " << by_ring << ", gather " << by_gather;
        options.limits = {};
      }
    }
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

}  // namespace
}  // namespace annulus::test
