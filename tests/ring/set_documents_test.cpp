// Executors that get other documents: as if they had been made for them, in the memory that they
// have.

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "annulus/error.h"
#include "annulus/in_process.h"
#include "annulus/pattern.h"
#include "annulus/ring_attention.h"
#include "core/memory.h"
#include "support/random_plans.h"
#include "support/ring_fixture.h"

namespace annulus::test {
namespace {

constexpr std::int64_t kTokens = 70;
constexpr std::int64_t kBatch = 2;
using List = std::vector<std::int64_t>;

// What this thread has been asked to admit.
thread_local int allocations = 0;
thread_local int plans = 0;

bool count(std::int64_t bytes, const char* what) {
  ++(std::string_view(what) == "plans" && bytes == 0 ? plans : allocations);
  return true;
}

class CountsMemory : public testing::Test {
 protected:
  void SetUp() override { before_ = set_allocation_hook(&count); }
  void TearDown() override { set_allocation_hook(before_); }

 private:
  AllocationHook before_ = nullptr;
};

Problem problem_of(MixGradient mix) {
  Problem problem = make_problem("documents", longnet(4, List{16, 64}, List{1, 2}, true), 2,
                                 kTokens, 16, kBatch, mix);
  problem.dtype = mix == MixGradient::full ? DType::bf16 : DType::f32;
  return problem;
}

std::vector<std::vector<Document>> some_documents() {
  std::vector<std::vector<Document>> lists = {
      {}, packed_documents(List{0, 30, kTokens}), packed_documents(List{0, 1, 2, 55, 60})};
  for (std::uint64_t seed = 0; seed < 12; ++seed) {
    Random random(seed);
    lists.push_back(any_documents(random, kTokens, kTokens, kBatch));
  }
  return lists;
}

TEST(SetDocuments, GivesTheBitsOfAnExecutorThatWasMadeForThem) {
  for (const RowTravel& travel : kRowTravels) {
    for (const MixGradient mix : {MixGradient::full, MixGradient::detached}) {
      const Problem problem = problem_of(mix);
      const Inputs inputs = random_inputs(problem, 5);
      RingOptions options = ring_options(problem, Placement::zigzag(kTokens, 3));
      travel.apply(options);
      std::vector<std::vector<Document>> lists = some_documents();
      const std::size_t count = lists.size();
      for (std::size_t i = 0; i < count; ++i) lists.push_back(lists[count - 1 - i]);  // and back
      std::vector<Results> found(lists.size(), empty_results(options));
      run_in_process(3, [&](Transport& transport) {
        RingAttention ring(options, transport);
        for (std::size_t i = 0; i < lists.size(); ++i) {
          ring.set_documents(lists[i]);
          Shard shard(ring.options(), transport.rank());
          shard.load(inputs);
          const TransportCounters before = transport.counters();
          shard.forward(ring);
          shard.backward(ring);
          EXPECT_EQ(static_cast<std::int64_t>(transport.counters().bytes_sent - before.bytes_sent),
                    ring.predicted_forward_bytes() + ring.predicted_backward_bytes());
          shard.collect(found[i]);
        }
      });
      for (std::size_t i = 0; i < lists.size(); ++i) {
        SCOPED_TRACE(travel.name + ", list " + std::to_string(i) + describe(lists[i]));
        options.pattern.documents = lists[i];
        const Results expected = run_ring(options, inputs);
        EXPECT_EQ(found[i].o, expected.o);
        EXPECT_EQ(found[i].lse, expected.lse);
        EXPECT_EQ(found[i].dq, expected.dq);
        EXPECT_EQ(found[i].dk, expected.dk);
        EXPECT_EQ(found[i].dv, expected.dv);
      }
    }
  }
}

using SetDocumentsMemory = CountsMemory;

TEST_F(SetDocumentsMemory, IsUsedAgain) {
  const Problem problem = problem_of(MixGradient::full);
  RingOptions options = ring_options(problem, Placement::contiguous(kTokens, 2));
  options.schedule = Schedule::ring;
  run_in_process(2, [&](Transport& transport) {
    RingAttention ring(options, transport);  // one document: everything that may be needed
    std::int64_t workspace = 0;
    for (int round = 0; round < 2; ++round) {
      allocations = 0;
      for (std::int64_t cut = 1; cut < kTokens; ++cut)
        ring.set_documents(packed_documents(List{0, cut, kTokens}));
      const std::int64_t now = ring.memory_info().workspace_bytes;
      if (round == 0) {
        EXPECT_LT(allocations, kTokens / 2);  // 8 or more for each list without the old memory
        workspace = now;
      } else {
        EXPECT_EQ(allocations, 0);
        EXPECT_EQ(now, workspace);
      }
    }
  });
}

TEST_F(SetDocumentsMemory, TheLastPlansAreKept) {
  const Problem problem = problem_of(MixGradient::full);
  const RingOptions options = ring_options(problem, Placement::contiguous(kTokens, 2));
  run_in_process(2, [&](Transport& transport) {
    RingAttention ring(options, transport);
    const auto set = [&](std::int64_t cut) {
      plans = 0;
      ring.set_documents(packed_documents(List{0, cut, kTokens}));
      return plans;
    };
    for (const std::int64_t cut : {10, 20, 30, 40}) EXPECT_EQ(set(cut), 1);
    EXPECT_EQ(set(40), 0);
    for (const std::int64_t cut : {10, 20, 30, 40, 10}) EXPECT_EQ(set(cut), 0);
    for (const std::int64_t cut : {50, 60, 5, 6}) EXPECT_EQ(set(cut), 1);
    EXPECT_EQ(set(20), 1) << "forgotten";
  });
}

TEST(SetDocuments, WhatIsWrongOnOneRankIsAnErrorOfTheNextPassOnAll) {
  const Problem problem = problem_of(MixGradient::full);
  const Inputs inputs = random_inputs(problem, 5);
  RingOptions options = ring_options(problem, Placement::contiguous(kTokens, 3));
  const std::vector<Document> right = packed_documents(List{0, 30, kTokens});
  struct Wrong {
    std::vector<Document> documents;
    Texts texts;
  };
  const Wrong wrongs[] = {
      {packed_documents(List{0, kTokens + 1}), {"ends at query token 71"}},
      {{{.query_end = kTokens, .key_end = kTokens, .query_start = std::int64_t{1} << 31}},
       {"positions, expected fewer than 2^31"}},
      {packed_documents(List{0, 31, kTokens}),
       {"ranks disagree about the documents", "rank 1 has"}},
  };
  for (const Wrong& wrong : wrongs) {
    Results found = empty_results(options);
    run_in_process(3, [&](Transport& transport) {
      RingAttention ring(options, transport);
      Shard shard(options, transport.rank());
      shard.load(inputs);
      for (const bool backward : {false, true}) {
        ring.set_documents(right);
        if (backward) shard.forward(ring);
        ring.set_documents(transport.rank() == 1 ? wrong.documents : right);
        try {
          backward ? shard.backward(ring) : shard.forward(ring);
          ADD_FAILURE() << "rank " << transport.rank() << " has noticed nothing";
        } catch (const ConfigError& error) {
          for (const std::string& text : wrong.texts)
            EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
        }
      }
      ring.set_documents(right);
      shard.forward(ring);
      shard.backward(ring);
      shard.collect(found);
    });
    RingOptions made = options;
    made.pattern.documents = right;
    EXPECT_EQ(found.dk, run_ring(made, inputs).dk);
  }
}

TEST(SetDocuments, RefusedOnesHaveNoPlan) {
  const Problem problem = problem_of(MixGradient::full);
  const RingOptions options = ring_options(problem, Placement::contiguous(kTokens, 1));
  run_in_process(1, [&](Transport& transport) {
    RingAttention ring(options, transport);
    ring.set_documents(packed_documents(List{0, kTokens + 1}));
    EXPECT_THROW((void)ring.predicted_forward_bytes(), ConfigError);
    EXPECT_THROW((void)ring.predicted_backward_bytes(), ConfigError);
    EXPECT_THROW((void)ring.plan(), ConfigError);
    EXPECT_THROW((void)ring.schedule(), ConfigError);
    EXPECT_EQ(ring.memory_info().state_bytes, 0);
    ring.synchronize();
    ring.interrupt();
    EXPECT_THROW(ring.synchronize(), Interrupted);
  });
}

// As for passes: it would free the memory of the one that runs.
TEST(SetDocuments, IsForOneCallerAtATime) {
  const Problem problem = problem_of(MixGradient::full);
  const RingOptions options = ring_options(problem, Placement::contiguous(kTokens, 1));
  run_in_process(1, [&](Transport& transport) {
    RingAttention ring(options, transport);
    const Transport::Use pass(transport, "another pass");
    EXPECT_THROW(ring.set_documents(packed_documents(List{0, 30, kTokens})), ConfigError);
    EXPECT_TRUE(ring.options().pattern.documents.empty());
  });
}

}  // namespace
}  // namespace annulus::test
