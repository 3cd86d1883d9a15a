// Memory that runs out while an executor gets other documents: the next pass recovers, on all ranks
// and as in construction.

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "annulus/error.h"
#include "annulus/pattern.h"
#include "annulus/ring_attention.h"
#include "core/memory.h"
#include "ring/recovery.h"
#include "support/injected_failures.h"
#include "support/ring_fixture.h"

namespace annulus::test {
namespace {

// operator new of this thread fails once, after so many calls; below 0: never.
thread_local std::int64_t news_until_failure = -1;

constexpr std::int64_t kTokens = 70;
using List = std::vector<std::int64_t>;

Problem problem_of(MixGradient mix = MixGradient::full) {
  return make_problem("documents", longnet(4, List{16, 64}, List{1, 2}, true), 2, kTokens, 16, 2,
                      mix);
}

std::vector<Document> cut_at(std::int64_t token) {
  return packed_documents(List{0, token, kTokens});
}

Results results_for(RingOptions options, const std::vector<Document>& documents,
                    const Inputs& inputs) {
  options.pattern.documents = documents;
  return run_ring(options, inputs);
}

void pass(RingAttention& ring, Shard& shard, Results* results = nullptr) {
  shard.forward(ring);
  shard.backward(ring);
  if (results != nullptr) shard.collect(*results);
}

// Every attempt in turn is the first that succeeds: that of set_documents, the executor anew, and
// then what recovery tries. Documents after that are planned for whatever was done for earlier
// ones, and are whole again if they can be.
TEST(DocumentsMemory, TheNextPassRecovers) {
  for (const MixGradient mix : {MixGradient::full, MixGradient::detached}) {
    const Problem problem = problem_of(mix);
    const Inputs inputs = random_inputs(problem, 5);
    RingOptions options = ring_options(problem, Placement::zigzag(kTokens, 3));
    options.reproducible = true;  // pieces give the bits of the whole
    const Results expected[] = {results_for(options, cut_at(30), inputs),
                                results_for(options, cut_at(50), inputs)};
    const auto strategies = ring::strategies(options);
    for (std::int64_t failures = 1; failures <= std::ssize(strategies) + 1; ++failures) {
      SCOPED_TRACE(failures);
      Results found[] = {empty_results(options), empty_results(options)};
      const auto outcomes = run_ranks(3, [&](Transport& transport) {
        RingAttention ring(options, transport);
        Shard shard(options, transport.rank());
        shard.load(inputs);
        pass(ring, shard);
        for (const bool everywhere : {false, true}) {
          {
            const bool unlucky = everywhere || transport.rank() == 1;
            const FailingMemory failing(BadMemory{.plans = unlucky ? failures : 0});
            ring.set_documents(cut_at(30));
            pass(ring, shard, &found[0]);
          }
          EXPECT_EQ(ring.recovery(),
                    failures < 2 ? "" : strategies[static_cast<std::size_t>(failures - 2)].what);
          const auto sent = [&] {
            return static_cast<std::int64_t>(transport.counters().bytes_sent);
          };
          const std::int64_t before = sent();
          pass(ring, shard);
          EXPECT_EQ(sent() - before,
                    ring.predicted_forward_bytes() + ring.predicted_backward_bytes());
          ring.set_documents(cut_at(50));
          pass(ring, shard, &found[1]);
          (void)ring.plan();
          if (failures > 2) {
            EXPECT_EQ(ring.recovery(), "");
          }
        }
      });
      expect_everywhere(outcomes, "", {});
      for (int i = 0; i < 2; ++i) EXPECT_EQ(first_difference(found[i], expected[i]), "") << i;
    }
  }
}

TEST(DocumentsMemory, GivesUpOnAllRanksUntilThereIsMemory) {
  const Problem problem = problem_of();
  const Inputs inputs = random_inputs(problem, 5);
  const RingOptions options = ring_options(problem, Placement::contiguous(kTokens, 2));
  Results found = empty_results(options);
  const auto outcomes = run_ranks(2, [&](Transport& transport) {
    RingAttention ring(options, transport);
    Shard shard(options, transport.rank());
    shard.load(inputs);
    {
      const FailingMemory failing(transport.rank() == 1 ? BadMemory{.every = 1} : BadMemory{});
      ring.set_documents(cut_at(30));
      for (int again = 0; again < 2; ++again) EXPECT_THROW(shard.forward(ring), OutOfMemory);
      EXPECT_THROW((void)ring.plan(), Error);
      EXPECT_THROW((void)ring.predicted_forward_bytes(), Error);
      EXPECT_EQ(ring.memory_info().state_bytes, 0);
      ring.synchronize();
    }
    pass(ring, shard, &found);
  });
  expect_everywhere(outcomes, "", {});
  EXPECT_EQ(first_difference(found, results_for(options, cut_at(30), inputs)), "");
}

// Documents that differ are no reason to recover, and no rank is left behind.
TEST(DocumentsMemory, PiecesNoticeThatDocumentsDiffer) {
  const Problem problem = problem_of();
  const Inputs inputs = random_inputs(problem, 5);
  const RingOptions options = ring_options(problem, Placement::contiguous(kTokens, 2));
  Results found = empty_results(options);
  const auto outcomes = run_ranks(2, [&](Transport& transport) {
    std::unique_ptr<RingAttention> ring;
    {
      const FailingMemory failing(BadMemory{.plans = 2});
      ring = std::make_unique<RingAttention>(options, transport);
    }
    EXPECT_EQ(ring->recovery(), "1 of 2 sequences at a time");
    Shard shard(options, transport.rank());
    shard.load(inputs);
    ring->set_documents(cut_at(30));
    if (transport.rank() == 1) ring->set_documents({});
    EXPECT_THROW(shard.forward(*ring), ConfigError);
    ring->set_documents({});  // rank 1 has them, and had them first
    pass(*ring, shard);
    ring->set_documents(cut_at(30));
    EXPECT_THROW((void)ring->plan(), ConfigError);
    pass(*ring, shard, &found);
  });
  expect_everywhere(outcomes, "", {});
  EXPECT_EQ(first_difference(found, results_for(options, cut_at(30), inputs)), "");
}

// Even if only one rank has no memory, before it knows what it would plan for.
TEST(DocumentsMemory, IsWhatTheErrorSays) {
  const Problem problem = problem_of();
  const Inputs inputs = random_inputs(problem, 5);
  RingOptions options = ring_options(problem, Placement::contiguous(kTokens, 2));
  options.recover = false;
  const auto outcomes = run_ranks(2, [&](Transport& transport) {
    RingAttention ring(options, transport);
    Shard shard(options, transport.rank());
    shard.load(inputs);
    const FailingMemory failing(BadMemory{.plans = transport.rank()});
    ring.set_documents(cut_at(30));
    shard.forward(ring);
  });
  expect_everywhere(outcomes, "DeviceError", {"out of memory: 0 bytes for plans"});
}

std::int64_t budget = 0;

bool within_budget(std::int64_t bytes, const char*) { return memory_in_use() + bytes <= budget; }

// While documents change, blocks are larger than necessary and old ones are kept. Neither may be
// why memory runs out.
TEST(DocumentsMemory, WhatIsEnoughForConstructionIsEnough) {
  const Problem problem = problem_of();
  const Inputs inputs = random_inputs(problem, 5);
  const RingOptions options = ring_options(problem, Placement::contiguous(kTokens, 1));
  const auto outcomes = run_ranks(1, [&](Transport& transport) {
    for (const bool recover : {true, false}) {
      RingOptions small = options;
      small.recover = recover;
      small.pattern.documents = cut_at(kTokens / 2);
      const std::int64_t before = memory_in_use();
      std::int64_t enough = 0;
      {
        const RingAttention large(options, transport);
        enough = memory_in_use() - before;
      }
      RingAttention ring(small, transport);
      Shard shard(options, 0);
      shard.load(inputs);
      // The eighth more of blocks that were taken before the last one is only got back by recovery.
      budget = before + enough + (recover ? 0 : enough / 8);
      const AllocationHook hook = set_allocation_hook(&within_budget);
      ring.set_documents({});
      pass(ring, shard);
      set_allocation_hook(hook);
      EXPECT_EQ(ring.recovery(), "");
    }
  });
  expect_everywhere(outcomes, "", {});
}

// operator new fails at every place in turn. set_documents lets nothing out, and the pass is right.
TEST(DocumentsMemory, EveryAllocationMayFail) {
  const Problem problem = problem_of(MixGradient::detached);
  const Inputs inputs = random_inputs(problem, 5);
  const RingOptions options = ring_options(problem, Placement::contiguous(kTokens, 1));
  const Results expected = results_for(options, cut_at(30), inputs);
  std::int64_t failed = 0;
  const auto outcomes = run_ranks(1, [&](Transport& transport) {
    RingAttention ring(options, transport);
    Shard shard(options, 0);
    shard.load(inputs);
    for (bool failing = true; failing; ++failed) {
      // No plans are left of earlier rounds.
      for (const std::int64_t token : {1, 2, 3, 4, 5, 6}) ring.set_documents(cut_at(token));
      std::vector<Document> documents = cut_at(30);
      news_until_failure = failed;
      try {
        ring.set_documents(std::move(documents));
      } catch (const std::bad_alloc&) {
        EXPECT_EQ(failed, 0) << "before anything has changed";
        ring.set_documents(cut_at(30));
      }
      failing = std::exchange(news_until_failure, -1) < 0;
      Results found = empty_results(options);
      pass(ring, shard, &found);
      ASSERT_EQ(first_difference(found, expected), "") << failed;
    }
  });
  expect_everywhere(outcomes, "", {});
  EXPECT_GT(failed, 50);
}

}  // namespace
}  // namespace annulus::test

// NOLINTBEGIN(misc-new-delete-overloads)
// GCC takes free() for a mistake where it has inlined only one of them.
#pragma GCC diagnostic ignored "-Wmismatched-new-delete"
void* operator new(std::size_t bytes, const std::nothrow_t& /*tag*/) noexcept {
  std::int64_t& left = annulus::test::news_until_failure;
  return left >= 0 && left-- == 0 ? nullptr : std::malloc(bytes);
}
void* operator new(std::size_t bytes) {
  void* const memory = operator new(bytes, std::nothrow);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
// NOLINTEND(misc-new-delete-overloads)
