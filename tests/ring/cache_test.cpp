// The executor cache: least recently used out first, what somebody holds stays alive, and it can be
// emptied at any time.

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "annulus/error.h"
#include "annulus/in_process.h"
#include "annulus/pattern.h"
#include "annulus/ring_attention.h"
#include "core/lease_pool.h"
#include "core/thread_pool.h"
#include "ring/option_text.h"
#include "support/ring_fixture.h"

namespace annulus::test {
namespace {

constexpr int kRanks = 2;

Problem problem_of(std::int64_t tokens) {
  return make_problem("cached", dense(2, true), 1, tokens, 8);
}

RingOptions options_of(std::int64_t tokens, int ranks = kRanks) {
  return ring_options(problem_of(tokens), Placement::contiguous(tokens, ranks));
}

void on_every_rank(const std::function<void(RingAttentionCache&, Transport&)>& body,
                   std::size_t capacity = 20) {
  const auto outcomes = run_ranks(kRanks, [&](Transport& transport) {
    RingAttentionCache cache(transport, capacity);
    body(cache, transport);
  });
  for (const auto& outcome : outcomes) EXPECT_EQ(outcome.message, "");
}

TEST(Cache, HoldsTwentyExecutorsByDefault) {
  on_every_rank([](RingAttentionCache& cache, Transport& transport) {
    RingAttentionCache by_default(transport);
    std::vector<RingAttention*> first;
    for (std::int64_t shape = 0; shape < 21; ++shape) {
      first.push_back(by_default.get(options_of(10 + shape)).get());
      EXPECT_EQ(by_default.size(), static_cast<std::size_t>(std::min<std::int64_t>(20, shape + 1)));
    }
    // The first shape went, the other twenty are the same objects.
    for (std::int64_t shape = 20; shape >= 1; --shape) {
      EXPECT_EQ(by_default.get(options_of(10 + shape)).get(),
                first[static_cast<std::size_t>(shape)])
          << shape;
    }
    EXPECT_EQ(by_default.size(), 20U);
    EXPECT_EQ(cache.size(), 0U);
  });
}

TEST(Cache, DropsTheLeastRecentlyUsed) {
  on_every_rank(
      [](RingAttentionCache& cache, Transport&) {
        std::weak_ptr<RingAttention> a = cache.get(options_of(10));
        std::weak_ptr<RingAttention> b = cache.get(options_of(11));
        std::weak_ptr<RingAttention> c = cache.get(options_of(12));
        EXPECT_FALSE(a.expired());
        (void)cache.get(options_of(10));  // now b is the oldest
        std::weak_ptr<RingAttention> d = cache.get(options_of(13));
        EXPECT_TRUE(b.expired());
        EXPECT_FALSE(a.expired());
        EXPECT_FALSE(c.expired());
        (void)cache.get(options_of(12));
        (void)cache.get(options_of(14));  // then a
        EXPECT_TRUE(a.expired());
        EXPECT_FALSE(c.expired());
        EXPECT_FALSE(d.expired());
        EXPECT_EQ(cache.size(), 3U);
      },
      3);
}

TEST(Cache, CapacityOneRebuildsOnEveryChange) {
  on_every_rank(
      [](RingAttentionCache& cache, Transport&) {
        for (int round = 0; round < 5; ++round) {
          (void)cache.get(options_of(10));
          (void)cache.get(options_of(11));
          EXPECT_EQ(cache.size(), 1U);
        }
      },
      1);
}

TEST(Cache, EvictedExecutorStillWorksForWhoeverHoldsIt) {
  const Problem problem = problem_of(17);
  const RingOptions options = options_of(17);
  const Inputs inputs = random_inputs(problem, 1);
  Results results = empty_results(options);
  on_every_rank(
      [&](RingAttentionCache& cache, Transport& transport) {
        const std::shared_ptr<RingAttention> held = cache.get(options);
        (void)cache.get(options_of(18));
        (void)cache.get(options_of(19));
        cache.clear_cache();
        EXPECT_EQ(held.use_count(), 1);
        Shard shard(options, transport.rank());
        shard.load(inputs);
        shard.forward(*held);
        shard.backward(*held);
        shard.collect(results);
      },
      2);
  expect_matches(problem, results, reference_of(problem, inputs));
}

TEST(Cache, ClearIsIdempotentAndReleasesEverything) {
  on_every_rank([](RingAttentionCache& cache, Transport&) {
    cache.clear_cache();  // of nothing
    const std::weak_ptr<RingAttention> a = cache.get(options_of(10));
    const std::weak_ptr<RingAttention> b = cache.get(options_of(11));
    for (int again = 0; again < 3; ++again) {
      cache.clear_cache();
      EXPECT_EQ(cache.size(), 0U);
      EXPECT_TRUE(a.expired());
      EXPECT_TRUE(b.expired());
      const MemoryInfo info = cache.memory_info();
      EXPECT_EQ(info.workspace_bytes, 0);
      EXPECT_EQ(info.communication_bytes, 0);
      EXPECT_EQ(info.state_bytes, 0);
      EXPECT_EQ(info.cached_workspaces, 0);
      EXPECT_FALSE(info.complexity.empty());
    }
    EXPECT_NE(cache.get(options_of(10)), nullptr);
  });
}

TEST(Cache, MemoryInfoIsTheSumOverItsExecutors) {
  on_every_rank([](RingAttentionCache& cache, Transport&) {
    std::vector<std::shared_ptr<RingAttention>> held;
    MemoryInfo sum;
    for (const std::int64_t tokens : {10, 40, 200}) {
      held.push_back(cache.get(options_of(tokens)));
      const MemoryInfo info = held.back()->memory_info();
      EXPECT_FALSE(info.complexity.empty());
      EXPECT_GT(info.communication_bytes, 0);
      EXPECT_GT(info.state_bytes, 0);
      EXPECT_GE(info.workspace_bytes, info.communication_bytes + info.state_bytes);
      EXPECT_EQ(info.scratch_bytes, static_cast<std::int64_t>(ThreadPool::kScratchBytes) *
                                        ThreadPool::shared()->threads());
      sum.workspace_bytes += info.workspace_bytes;
      sum.communication_bytes += info.communication_bytes;
      sum.state_bytes += info.state_bytes;
      sum.scratch_bytes = info.scratch_bytes;
    }
    const MemoryInfo info = cache.memory_info();
    EXPECT_EQ(info.workspace_bytes, sum.workspace_bytes);
    EXPECT_EQ(info.communication_bytes, sum.communication_bytes);
    EXPECT_EQ(info.state_bytes, sum.state_bytes);
    EXPECT_EQ(info.scratch_bytes, sum.scratch_bytes) << "the pool's scratch is shared, not summed";
    EXPECT_EQ(info.cached_workspaces, 3);
    EXPECT_EQ(held[0]->memory_info().cached_workspaces, 0) << "only the cache counts them";
  });
}

// Whatever makes two executors differ makes two entries; what does not is one.
TEST(Cache, KeyTellsOptionsApart) {
  const RingOptions base = options_of(20);
  const auto changed = [&](const std::function<void(RingOptions&)>& change) {
    RingOptions options = base;
    change(options);
    return ring::options_key(options);
  };
  const std::string key = ring::options_key(base);
  EXPECT_EQ(key, ring::options_key(options_of(20)));
  EXPECT_EQ(key, changed([](RingOptions& o) { o.pattern.name = "another name for the same"; }));
  const std::vector<std::function<void(RingOptions&)>> changes = {
      [](RingOptions& o) { o.pattern.causal = false; },
      [](RingOptions& o) { o.pattern.output_scale = 0.5; },
      [](RingOptions& o) { o.pattern.branches[0].segment_length = 10; },
      [](RingOptions& o) { o.pattern.branches[0].dilation = 2; },
      [](RingOptions& o) { o.pattern.branches[0].offset[1] = -1; },
      [](RingOptions& o) { o.pattern.branches.push_back(o.pattern.branches[0]); },
      [](RingOptions& o) { o.placement = Placement::striped(20, 2); },
      [](RingOptions& o) { o.placement = Placement::contiguous(20, 2, 4); },
      [](RingOptions& o) { o.batch = 2; },
      [](RingOptions& o) { o.kv_heads = 2; },
      [](RingOptions& o) { o.head_dim = 16; },
      [](RingOptions& o) { o.dtype = DType::bf16; },
      [](RingOptions& o) { o.dtype = DType::f16; },
      [](RingOptions& o) { o.scale = 0.5; },
      [](RingOptions& o) { o.scale = 0.0; },
      [](RingOptions& o) { o.mix_gradient = MixGradient::detached; },
      [](RingOptions& o) { o.schedule = Schedule::ring; },
      [](RingOptions& o) { o.min_tokens_for_ring = 1; },
      [](RingOptions& o) { o.reproducible = true; },
      [](RingOptions& o) { o.backward = false; },
      [](RingOptions& o) { o.recover = false; },
      [](RingOptions& o) { o.backward_travel = BackwardTravel::keys; },
      [](RingOptions& o) { o.blocking = true; },
      [](RingOptions& o) { o.limits.qkv_elements = 1; },
      [](RingOptions& o) { o.limits.communication_bytes = 1; },
      [](RingOptions& o) { o.threads = 3; },
  };
  std::vector<std::string> keys = {key};
  for (const auto& change : changes) keys.push_back(changed(change));
  for (std::size_t i = 0; i < keys.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j)
      EXPECT_NE(keys[i], keys[j]) << "changes " << i << " and " << j;
  }
}

// An executor is shared, and a caller may give it other documents.
TEST(Cache, ExecutorsHaveTheDocumentsThatAreAskedFor) {
  on_every_rank([](RingAttentionCache& cache, Transport&) {
    const RingOptions options = options_of(20);
    const auto a = cache.get(options);
    a->set_documents(packed_documents(std::vector<std::int64_t>{0, 9, 20}));
    const auto b = cache.get(options);
    EXPECT_EQ(a, b);
    EXPECT_TRUE(b->options().pattern.documents.empty());
    EXPECT_EQ(b->plan().pattern().documents.size(), 0U);
  });
}

TEST(Cache, RefusedOptionsLeaveItAsItWas) {
  on_every_rank(
      [](RingAttentionCache& cache, Transport&) {
        const auto a = cache.get(options_of(10));
        const auto b = cache.get(options_of(11));
        RingOptions bad = options_of(12);
        bad.head_dim = 513;
        EXPECT_THROW((void)cache.get(bad), ConfigError);
        EXPECT_EQ(cache.get(options_of(11)), b);
        EXPECT_LE(cache.size(), 2U);
        (void)cache.get(options_of(10));  // whether it had to go or not
      },
      2);
}

TEST(Cache, NeedsACapacity) {
  const auto outcomes =
      run_ranks(1, [](Transport& transport) { const RingAttentionCache cache(transport, 0); });
  EXPECT_EQ(outcomes[0].kind, "ConfigError");
  EXPECT_NE(outcomes[0].message.find("capacity is 0"), std::string::npos);
}

// Ranks ask in the same order, whatever they hold: results come from the right executor.
TEST(Cache, ServesChangingShapes) {
  constexpr std::int64_t kShapes[] = {9, 16, 30};
  std::vector<Results> results;
  std::vector<Inputs> inputs;
  for (const std::int64_t tokens : kShapes) {
    results.push_back(empty_results(options_of(tokens)));
    inputs.push_back(random_inputs(problem_of(tokens), 5));
  }
  on_every_rank(
      [&](RingAttentionCache& cache, Transport& transport) {
        for (int round = 0; round < 12; ++round) {
          const auto i = static_cast<std::size_t>(round * 7 % 3);
          const RingOptions options = options_of(kShapes[i]);
          Shard shard(options, transport.rank());
          shard.load(inputs[i]);
          const auto ring = cache.get(options);
          shard.forward(*ring);
          shard.backward(*ring);
          shard.collect(results[i]);
        }
      },
      2);
  for (std::size_t i = 0; i < results.size(); ++i) {
    const Problem problem = problem_of(kShapes[i]);
    expect_matches(problem, results[i], reference_of(problem, inputs[i]));
  }
}

// ---- what all caches of executors are made of ---------------------------------------------------

TEST(LeasePool, GivesAnItemToOneUserAtATime) {
  LeasePool<std::unique_ptr<int>> pool(3);
  pool.give_back("a", std::make_unique<int>(1));
  pool.give_back("a", std::make_unique<int>(2));
  EXPECT_EQ(**pool.take("a"), 2);  // the one used last: its memory is warm
  EXPECT_EQ(**pool.take("a"), 1);
  EXPECT_FALSE(pool.take("a").has_value());
  EXPECT_FALSE(pool.take("b").has_value());
}

TEST(LeasePool, DropsTheLeastRecentlyUsedBeyondItsCapacity) {
  LeasePool<int> pool(2);
  pool.give_back("a", 1);
  pool.give_back("b", 2);
  pool.give_back("a", *pool.take("a"));
  pool.make_room();
  EXPECT_EQ(pool.size(), 1U);
  pool.give_back("c", 3);
  EXPECT_FALSE(pool.take("b").has_value());
  EXPECT_TRUE(pool.take("a").has_value());
  EXPECT_TRUE(pool.take("c").has_value());
}

TEST(LeasePool, KeepsTheLatestItemAndSoManyBytesBesideIt) {
  set_memory_probe(Device::Kind::cpu, [](const Device&) -> std::optional<MemoryState> {
    return std::nullopt;  // the limit as it is
  });
  LeasePool<int> pool(10, 100);
  pool.give_back("a", 1, 60);
  pool.give_back("b", 2, 40);
  pool.give_back("huge", 3, 1000);
  EXPECT_EQ(pool.size(), 3U);
  EXPECT_EQ(pool.bytes(), 1100);
  pool.give_back("c", 4, 1);  // beside it there would be 1100
  EXPECT_EQ(pool.size(), 1U);
  EXPECT_EQ(pool.bytes(), 1);
  pool.clear();
  EXPECT_EQ(pool.bytes(), 0);
  set_memory_probe(Device::Kind::cpu, nullptr);
}

}  // namespace
}  // namespace annulus::test
