// What happens when memory runs out: the order of what is tried, that results stay the same, that
// no rank is left behind, and what the error says in the end.

#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "annulus/error.h"
#include "annulus/in_process.h"
#include "annulus/ring_attention.h"
#include "core/caches.h"
#include "core/lease_pool.h"
#include "core/memory.h"
#include "ring/recovery.h"
#include "support/injected_failures.h"
#include "support/ring_fixture.h"

namespace annulus::test {
namespace {

Texts texts_of(const RingOptions& options) {
  Texts texts;
  for (const ring::Strategy& strategy : ring::strategies(options)) texts.push_back(strategy.what);
  return texts;
}

RingOptions small_options(int ranks = 2) {
  RingOptions options{dense(4), Placement::contiguous(64, ranks)};
  options.batch = 4;
  options.kv_heads = 4;
  options.head_dim = 16;
  return options;
}

TEST(Recovery, TriesWhatKeepsTheBitsFirst) {
  RingOptions options = small_options();
  EXPECT_EQ(texts_of(options),
            (Texts{"caches dropped", "2 of 4 sequences at a time", "1 of 4 sequences at a time",
                   "2 of 4 K/V heads of one sequence at a time",
                   "1 of 4 K/V heads of one sequence at a time",
                   "1 of 4 K/V heads of one sequence at a time, by the ring schedule"}));
  options.batch = 1;
  options.kv_heads = 1;
  EXPECT_EQ(texts_of(options), (Texts{"caches dropped", "by the ring schedule"}));
  options.schedule = Schedule::ring;
  EXPECT_EQ(texts_of(options), (Texts{"caches dropped"}));
  options = small_options(1);
  options.batch = 6;
  options.kv_heads = 1;
  EXPECT_EQ(texts_of(options),
            (Texts{"caches dropped", "3 of 6 sequences at a time", "1 of 6 sequences at a time"}));
  options = small_options();
  options.reproducible = true;
  options.mix_gradient = MixGradient::detached;
  EXPECT_EQ(texts_of(options),
            (Texts{"caches dropped", "2 of 4 sequences at a time", "1 of 4 sequences at a time"}));
}

TEST(Recovery, PatternOfSomeHeadsAllowsTheSamePairs) {
  const List segments{8, 24};
  const List dilations{1, 3};
  for (const Pattern& whole : {longnet(6, segments, dilations, true),
                               head_groups(6, segments, dilations), dense(6, true)}) {
    for (int first = 0; first < 6; first += 2) {
      const Pattern part = ring::pattern_of_heads(whole, first, 2);
      part.validate();
      const auto pairs = [](const Pattern& pattern, int head) {
        std::vector<int> counts;
        for (std::int64_t q = 0; q < 30; ++q) {
          for (std::int64_t k = 0; k < 30; ++k) {
            int count = 0;
            for (const Branch& branch : pattern.branches)
              count += pattern.allows(branch, head, q, k) ? 1 : 0;
            counts.push_back(count);
          }
        }
        return counts;
      };
      for (int head = 0; head < 2; ++head)
        EXPECT_EQ(pairs(part, head), pairs(whole, first + head)) << whole.name << first + head;
    }
  }
}

// A few hundred failures; the soak has thousands.
TEST(Recovery, FromFailuresEverywhere) { inject_many(300); }

TEST(Recovery, GivesUpOnAllRanksWithNumbers) {
  const RingOptions options = small_options(3);
  const auto outcomes = run_ranks(3, [&](Transport& transport) {
    {
      const FailingMemory failing(transport.rank() == 1 ? BadMemory{.every = 1} : BadMemory{});
      try {
        const RingAttention ring(options, transport);
        ADD_FAILURE() << "rank " << transport.rank() << " has noticed nothing";
      } catch (const OutOfMemory& error) {
        const std::string text = error.what();
        for (const char* part : {"out of memory: 0 bytes for plans", "are free", "tried in vain",
                                 "caches dropped; 2 of 4 sequences at a time", "more ranks"})
          EXPECT_NE(text.find(part), std::string::npos) << part << " is missing in: " << text;
        if (transport.rank() != 1) {
          EXPECT_NE(text.find("rank 1 refused"), std::string::npos) << text;
        }
        EXPECT_EQ(error.shortage().asked, 0);
        EXPECT_GT(error.shortage().free, 0);
      }
    }
    const RingAttention ring(options, transport);  // the ring is as good as it was
    EXPECT_EQ(ring.recovery(), "");
  });
  expect_everywhere(outcomes, "", {});
}

// Numbers that a rank can do something with: what is needed at the least, and what would fit.
TEST(Recovery, SaysWhatWouldFit) {
  RingOptions options = small_options(2);
  options.schedule = Schedule::ring;
  ring::Trials trials(options);
  trials.add(
      ring::SharedShortage("[rank 0/2] first", {.asked = 10, .needed = 9000, .free = 300}, 0));
  trials.add(ring::SharedShortage("later", {.asked = 5, .needed = 1200, .free = 400}, 1),
             ring::strategies(options).back());
  const OutOfMemory error = trials.error();
  EXPECT_STREQ(
      error.what(),
      "[rank 0/2] first; tried in vain: 1 of 4 K/V heads of one sequence at a time. At the "
      "least this takes 1200 bytes on rank 1, where 400 are free: use at least 6 ranks, or "
      "at most 10 tokens on a rank instead of 32, or a 16-bit dtype");
  EXPECT_EQ(error.shortage().asked, 10);
  EXPECT_EQ(error.shortage().needed, 1200);
  EXPECT_EQ(error.shortage().free, 400);
}

TEST(Recovery, CanBeForbidden) {
  RingOptions options = small_options(2);
  options.recover = false;
  const auto outcomes = run_ranks(2, [&](Transport& transport) {
    const FailingMemory failing(transport.rank() == 1 ? BadMemory{.first = 0} : BadMemory{});
    const RingAttention ring(options, transport);
  });
  for (const RankOutcome& outcome : outcomes) {
    EXPECT_EQ(outcome.kind, "DeviceError") << outcome.message;
    EXPECT_EQ(outcome.message.find("tried"), std::string::npos) << outcome.message;
  }
}

// Messages of the ring schedule may be more than the caller's limit where those of the schedule
// that was asked for are not: it is then tried in vain like anything else, whichever ranks it
// concerns, and the error is still that memory ran out.
TEST(Recovery, GoesOnWhereTheRingScheduleExceedsTheLimit) {
  constexpr int kRanks = 6;
  // Segments lie across shards: rows that a rank hands on are more than those that it needs.
  RingOptions options{longnet(1, List{32}, List{1}, true), Placement::zigzag(144, kRanks)};
  options.head_dim = 16;
  options.schedule = Schedule::gather;
  std::vector<std::int64_t> bytes(kRanks);
  auto outcomes = run_ranks(kRanks, [&](Transport& transport) {
    const auto needed = [&](Schedule schedule) {
      RingOptions other = options;
      other.schedule = schedule;
      return RingAttention(other, transport).memory_info().communication_bytes;
    };
    const std::int64_t gather = needed(Schedule::gather);
    const std::int64_t ring = needed(Schedule::ring);
    if (transport.rank() == 1) {
      ASSERT_LT(gather, ring);
    }
    bytes[static_cast<std::size_t>(transport.rank())] = gather;
  });
  expect_everywhere(outcomes, "", {});
  const auto limited = [&](int rank) {
    RingOptions mine = options;
    mine.limits.communication_bytes = bytes[static_cast<std::size_t>(rank)];
    return mine;
  };
  for (const bool everywhere : {true, false}) {
    outcomes = run_ranks(kRanks, [&](Transport& transport) {
      const int rank = transport.rank();
      const FailingMemory failing(rank == 3 ? BadMemory{.plans = 2} : BadMemory{});
      const RingAttention ring(everywhere || rank == 1 ? limited(rank) : options, transport);
    });
    for (const RankOutcome& outcome : outcomes) {
      EXPECT_EQ(outcome.kind, "DeviceError") << outcome.message;
      for (const char* part : {"out of memory: 0 bytes for plans", "are free",
                               "tried in vain: caches dropped; by the ring schedule, whose "
                               "messages limits.communication_bytes forbids"})
        EXPECT_NE(outcome.message.find(part), std::string::npos)
            << part << " is missing in: " << outcome.message;
    }
  }
  // Asked for by the caller, it is the caller's error.
  outcomes = run_ranks(kRanks, [&](Transport& transport) {
    RingOptions mine = limited(transport.rank());
    mine.schedule = Schedule::ring;
    const RingAttention ring(mine, transport);
  });
  expect_everywhere(outcomes, "ConfigError", {"limits.communication_bytes"});
}

// One rank has no memory, another one has wrong options: nothing to recover from.
TEST(Recovery, DoesNotHideWhatElseIsWrong) {
  const auto outcomes = run_ranks(3, [&](Transport& transport) {
    RingOptions options = small_options(3);
    if (transport.rank() == 2) options.head_dim = 513;
    const FailingMemory failing(transport.rank() == 1 ? BadMemory{.first = 0} : BadMemory{});
    const RingAttention ring(options, transport);
  });
  expect_everywhere(outcomes, "ConfigError", {});
}

// Ranks whose options differ would not try the same things: a rank that has no memory before it can
// compare them must not leave the others behind in an attempt of their own.
TEST(Recovery, IsNotBegunByRanksThatDiffer) {
  const auto forbid = [](RingOptions& options) { options.recover = false; };
  const auto cut_batch = [](RingOptions& options) { options.batch = 1; };
  for (const std::function<void(RingOptions&)>& change :
       {std::function(forbid), std::function(cut_batch)}) {
    for (const int unlucky : {0, 1}) {
      const auto outcomes = run_ranks(2, [&](Transport& transport) {
        RingOptions options = small_options(2);
        if (transport.rank() == 1) change(options);
        const FailingMemory failing(transport.rank() == unlucky ? BadMemory{.plans = 1}
                                                                : BadMemory{});
        const RingAttention ring(options, transport);
      });
      expect_everywhere(outcomes, "ConfigError", {"disagree"});
    }
  }
}

// In pieces everything still is what it says: bytes, memory, wrong tensors, two calls in a row.
TEST(Recovery, PiecesKeepTheirPromises) {
  for (const std::int64_t plans : {2, 4, 5}) {
    Problem problem =
        make_problem("pieces", longnet(4, List{16, 64}, List{1, 4}, true), 4, 130, 16, 2);
    RingOptions options = ring_options(problem, Placement::striped(130, 2));
    options.schedule = Schedule::ring;
    const Inputs inputs = random_inputs(problem, 3);
    Results results = empty_results(options);
    const auto outcomes = run_ranks(2, [&](Transport& transport) {
      const RingAttention whole(options, transport);
      std::unique_ptr<RingAttention> ring;
      {
        const FailingMemory failing(BadMemory{.plans = std::min<std::int64_t>(plans, 4)});
        ring = std::make_unique<RingAttention>(options, transport);
      }
      EXPECT_NE(ring->recovery(), "");
      EXPECT_LT(ring->memory_info().workspace_bytes, whole.memory_info().workspace_bytes);
      EXPECT_EQ(ring->options().batch, 2);
      Shard shard(options, transport.rank());
      shard.load(inputs);
      for (int again = 0; again < 2; ++again) {
        const auto sent = [&] {
          return static_cast<std::int64_t>(transport.counters().bytes_sent);
        };
        const std::int64_t before = sent();
        shard.forward(*ring);
        const std::int64_t between = sent();
        shard.backward(*ring);
        EXPECT_EQ(between - before, ring->predicted_forward_bytes());
        EXPECT_EQ(sent() - between, ring->predicted_backward_bytes());
      }
      shard.collect(results);
      // One rank's wrong tensor is everybody's error, and changes nothing.
      const TensorView wrong = transport.rank() == 1 ? shard.lse.view() : shard.q.view();
      EXPECT_THROW(
          ring->forward(wrong, shard.k.view(), shard.v.view(), shard.o.view(), shard.lse.view()),
          ConfigError);
      shard.forward(*ring);
    });
    expect_everywhere(outcomes, "", {});
    expect_matches(problem, results, reference_of(problem, inputs));
  }
}

// Where a head is enough work to be shared out among threads, how it is cut follows the number of
// heads at a time, and with it the order in which gradients are summed, unless it is to be the
// same.
TEST(Recovery, PiecesGiveTheBitsOfTheWhole) {
  for (const bool reproducible : {false, true}) {
    Problem problem = make_problem("bits", dense(4), 4, 640, 16, 2);
    RingOptions options = ring_options(problem, Placement::contiguous(640, 2));
    options.reproducible = reproducible;
    options.threads = 2;
    const Inputs inputs = random_inputs(problem, 3);
    Results results[2] = {empty_results(options), empty_results(options)};
    for (const bool in_pieces : {false, true}) {
      const auto outcomes = run_ranks(2, [&](Transport& transport) {
        const FailingMemory failing(BadMemory{.plans = in_pieces ? 4 : 0});
        RingAttention ring(options, transport);
        EXPECT_EQ(ring.recovery(), in_pieces ? "1 of 4 K/V heads of one sequence at a time" : "");
        Shard shard(options, transport.rank());
        shard.load(inputs);
        shard.forward(ring);
        shard.backward(ring);
        shard.collect(results[in_pieces ? 1 : 0]);
      });
      expect_everywhere(outcomes, "", {});
    }
    if (!reproducible) {
      for (std::vector<float> Results::*const member : {&Results::dq, &Results::dk, &Results::dv}) {
        for (std::size_t i = 0; i < (results[0].*member).size(); ++i)
          ASSERT_NEAR((results[1].*member)[i], (results[0].*member)[i], 1e-6);
        for (Results& each : results) (each.*member).clear();
      }
    }
    EXPECT_EQ(first_difference(results[1], results[0]), "") << reproducible;
  }
}

// Pieces of other heads are made in every pass, and may not find their memory: an error on all
// ranks, and the next pass is as good as any.
TEST(Recovery, PassThatRunsOutOfMemoryIsAnErrorOfAll) {
  Problem problem = make_problem("pass", longnet(4, List{16, 64}, List{1, 4}), 4, 130, 16);
  const RingOptions options = ring_options(problem, Placement::contiguous(130, 2));
  const Inputs inputs = random_inputs(problem, 3);
  Results results = empty_results(options);
  const std::int64_t in_use = memory_in_use();
  const auto outcomes = run_ranks(2, [&](Transport& transport) {
    std::unique_ptr<RingAttention> ring;
    {
      const FailingMemory failing(BadMemory{.plans = 3});
      ring = std::make_unique<RingAttention>(options, transport);
    }
    EXPECT_EQ(ring->recovery(), "1 of 4 K/V heads at a time");
    Shard shard(options, transport.rank());
    shard.load(inputs);
    {
      const FailingMemory failing(transport.rank() == 1 ? BadMemory{.first = 5, .count = 1000}
                                                        : BadMemory{});
      EXPECT_THROW(shard.forward(*ring), OutOfMemory);
    }
    ring->synchronize();
    EXPECT_EQ(ring->branch_state_rows(), 0);
    shard.forward(*ring);
    shard.backward(*ring);
    shard.collect(results);
  });
  expect_everywhere(outcomes, "", {});
  expect_matches(problem, results, reference_of(problem, inputs));
  EXPECT_EQ(memory_in_use(), in_use);
}

TEST(Recovery, PiecesCanBeInterrupted) {
  Problem problem = make_problem("interrupted", longnet(4, List{16, 64}, List{1, 4}), 4, 130, 16);
  const RingOptions options = ring_options(problem, Placement::contiguous(130, 1));
  const auto outcomes = run_ranks(1, [&](Transport& transport) {
    std::unique_ptr<RingAttention> ring;
    {
      const FailingMemory failing(BadMemory{.plans = 3});
      ring = std::make_unique<RingAttention>(options, transport);
    }
    Shard shard(options, 0);
    shard.load(random_inputs(problem, 3));
    ring->interrupt();
    EXPECT_THROW(shard.forward(*ring), Interrupted);
  });
  expect_everywhere(outcomes, "", {});
}

TEST(Recovery, BranchStateIsWorthTheCaches) {
  Problem problem = make_problem("state", longnet(4, List{16, 64}, List{1, 4}), 4, 64, 16, 1,
                                 MixGradient::detached);
  const RingOptions options = ring_options(problem, Placement::contiguous(64, 1));
  const auto outcomes = run_ranks(1, [&](Transport& transport) {
    RingAttentionCache cache(transport);
    const std::shared_ptr<RingAttention> ring = cache.get(options);
    const FailingMemory failing(BadMemory{.first = 0});
    (void)ring->make_branch_state();
    EXPECT_EQ(failing.failed(), 1);
    EXPECT_EQ(cache.size(), 0U);
  });
  expect_everywhere(outcomes, "", {});
}

// ---- what is kept, under pressure ---------------------------------------------------------------

class FakeMemory {
 public:
  static inline MemoryState state;
  explicit FakeMemory(double free) { set(free); }
  ~FakeMemory() { set_memory_probe(Device::Kind::cpu, nullptr); }
  FakeMemory(const FakeMemory&) = delete;
  FakeMemory& operator=(const FakeMemory&) = delete;
  static void set(double free) {
    state = {8000, static_cast<std::int64_t>(8000 * free)};
    set_memory_probe(Device::Kind::cpu,
                     [](const Device&) -> std::optional<MemoryState> { return state; });
  }
};

TEST(Eviction, FollowsThePressure) {
  const FakeMemory memory(0.3);
  LeasePool<int> pool(20);
  const auto fill = [&](std::int64_t bytes) {
    for (int i = 0; i < 30; ++i) pool.give_back(std::to_string(i), i, bytes);
  };
  fill(1);
  EXPECT_EQ(pool.size(), 20U);  // by number
  FakeMemory::set(0.05);
  pool.give_back("one more", 0, 1);
  EXPECT_EQ(pool.size(), 5U);  // four times as eager
  // By bytes, beside the latest one: 1,000 as usual, 2,000 with plenty of room, 250 under pressure.
  pool.clear();
  fill(125);
  EXPECT_EQ(pool.size(), 3U);
  FakeMemory::set(0.3);
  fill(125);
  EXPECT_EQ(pool.size(), 9U);
  FakeMemory::set(0.6);
  fill(125);
  EXPECT_EQ(pool.size(), 17U);
  EXPECT_TRUE(pool.take("29").has_value());
  EXPECT_TRUE(pool.take("13").has_value());
  EXPECT_FALSE(pool.take("12").has_value());  // the least recently used went
}

TEST(Eviction, ConcernsTheDeviceThatIsShort) {
  const FakeMemory memory(0.05);
  LeasePool<int> pool(20);
  const Device gpu{Device::Kind::cuda, 0};  // which does not tell
  for (int i = 0; i < 4; ++i) pool.give_back("gpu", i, 1000, gpu);
  for (int i = 0; i < 4; ++i) pool.give_back("cpu", i, 200);
  EXPECT_EQ(pool.size(), 4U + 2U);
}

TEST(Eviction, DropsEverythingIdleWhenMemoryRunsOut) {
  auto item = std::make_shared<int>(1);
  LeasePool<std::shared_ptr<int>> first(3);
  LeasePool<std::shared_ptr<int>> second(3);
  first.give_back("a", item, 10);
  second.give_back("b", item, 20);
  const Dropped dropped = drop_caches();
  EXPECT_GE(dropped.items, 2);
  EXPECT_GE(dropped.bytes, 30);
  EXPECT_EQ(item.use_count(), 1);
}

// A rank that has dropped an executor which the others still have makes it anew, with them.
TEST(Eviction, OfOneRankIsNoMismatch) {
  const RingOptions options = small_options(2);
  const auto outcomes = run_ranks(2, [&](Transport& transport) {
    RingAttentionCache cache(transport);
    const std::weak_ptr<RingAttention> first = cache.get(options);
    if (transport.rank() == 1) cache.clear_cache();
    const std::shared_ptr<RingAttention> second = cache.get(options);
    EXPECT_TRUE(first.expired());
    EXPECT_EQ(cache.get(options), second);
  });
  expect_everywhere(outcomes, "", {});
}

}  // namespace
}  // namespace annulus::test
