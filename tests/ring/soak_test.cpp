// Long runs: the thousandth answer is the first one, and memory, threads and descriptors stay where
// they were.

#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "annulus/in_process.h"
#include "annulus/pattern.h"
#include "annulus/ring_attention.h"
#include "core/thread_pool.h"
#include "support/resources.h"
#include "support/ring_fixture.h"

namespace annulus::test {
namespace {

// Sanitizers: fewer rounds of the same.
int rounds(int count) { return slowness() > 1 ? std::max(10, count / 20) : count; }

class SoakTest : public ::testing::TestWithParam<int> {};

TEST_P(SoakTest, ThousandIterationsGiveTheSameBits) {
  const int ranks = GetParam();
  const int iterations = rounds(1000);
  for (const bool reproducible : {false, true}) {
    Problem problem = make_problem("soak", longnet(4, List{16, 64}, List{1, 2}, true), 2, 131, 32);
    problem.dtype = reproducible ? DType::bf16 : DType::f32;
    RingOptions options = ring_options(problem, Placement::zigzag(131, ranks));
    options.reproducible = reproducible;
    options.schedule = reproducible ? Schedule::gather : Schedule::ring;
    const Inputs inputs = random_inputs(problem, 1);
    Results first = empty_results(options);
    std::atomic<int> changed{0};
    run_in_process(ranks, [&](Transport& transport) {
      RingAttention ring(options, transport);
      Shard shard(options, transport.rank());
      shard.load(inputs);
      shard.forward(ring);
      shard.backward(ring);
      shard.collect(first);
      const auto outputs = [&] {
        return std::vector<std::vector<std::byte>>{shard.o.bytes(), shard.lse.bytes(),
                                                   shard.dq.bytes(), shard.dk.bytes(),
                                                   shard.dv.bytes()};
      };
      const auto expected = outputs();
      for (int i = 1; i < iterations; ++i) {
        shard.forward(ring);
        shard.backward(ring);
        if (outputs() != expected) ++changed;
      }
    });
    EXPECT_EQ(changed, 0);
    expect_matches(problem, first, reference_of(problem, inputs));
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, SoakTest, ::testing::Values(2, 3, 8),
                         [](const auto& info) { return "ranks" + std::to_string(info.param); });

TEST(Soak, ResidentMemoryIsFlatOverTenThousandCalls) {
  const int calls = rounds(10'000);
  const Problem problem = make_problem("flat", dense(2), 1, 24, 8, 1, MixGradient::full);
  const RingOptions options = ring_options(problem, Placement::contiguous(24, 3));
  const Inputs inputs = random_inputs(problem, 1);
  std::int64_t before = 0;
  std::int64_t after = 0;
  run_in_process(3, [&](Transport& transport) {
    RingAttention ring(options, transport);
    Shard shard(options, transport.rank());
    shard.load(inputs);
    for (int i = 0; i < calls; ++i) {
      // Warm-up: thread stacks, the pool's scratch, the allocator's own arenas.
      if (i == calls / 10 && transport.rank() == 0) before = resident_bytes();
      shard.forward(ring);
      shard.backward(ring);
    }
    if (transport.rank() == 0) after = resident_bytes();
  });
  std::printf("[   RSS    ] %.1f MiB after a tenth of the calls, %.1f MiB after all\n",
              static_cast<double>(before) / 0x1p20, static_cast<double>(after) / 0x1p20);
  EXPECT_LE(after - before, slowness() > 1 ? 64 << 20 : 1 << 20);
}

TEST(Soak, ExecutorsComeAndGoWithoutATrace) {
  const Problem problem =
      make_problem("come and go", longnet(2, List{16, 64}, List{1, 2}), 2, 64, 16);
  const Inputs inputs = random_inputs(problem, 1);
  const auto round = [&](int i) {
    RingOptions options = ring_options(problem, Placement::contiguous(64, 2 + i % 3));
    options.schedule = i % 2 == 0 ? Schedule::ring : Schedule::gather;
    if (i % 4 == 0) options.threads = 3;
    run_in_process(2 + i % 3, [&](Transport& transport) {
      RingAttention ring(options, transport);
      RingAttention moved(std::move(ring));
      Shard shard(options, transport.rank());
      shard.load(inputs);
      if (i % 5 == 0) return;  // unused
      shard.forward(moved);
      shard.backward(moved);
    });
  };
  for (int i = 0; i < rounds(60); ++i) round(i);
  const std::int64_t memory = resident_bytes();
  const std::int64_t threads = entries_of("/proc/self/task");
  const std::int64_t descriptors = entries_of("/proc/self/fd");
  for (int i = 0; i < rounds(600); ++i) round(i);
  EXPECT_EQ(settled_threads(threads), threads);
  EXPECT_EQ(entries_of("/proc/self/fd"), descriptors);
  EXPECT_LE(resident_bytes() - memory, slowness() > 1 ? 256 << 20 : 8 << 20);
}

// Refused constructions and calls leave nothing behind either.
TEST(Soak, FailuresLeaveNoTrace) {
  const Problem problem = make_problem("failures", dense(2), 2, 20, 8);
  const auto round = [&] {
    RingOptions bad = ring_options(problem, Placement::contiguous(20, 3));
    bad.head_dim = 513;
    const auto refused =
        run_ranks(3, [&](Transport& transport) { const RingAttention ring(bad, transport); });
    EXPECT_EQ(refused[0].kind, "ConfigError");
    const RingOptions options = ring_options(problem, Placement::contiguous(20, 3));
    const auto died = run_ranks(3, [&](Transport& inner) {
      WatchedTransport transport(inner);
      RingAttention ring(options, transport);
      Shard shard(options, transport.rank());
      shard.load(random_inputs(problem, 1));
      if (transport.rank() == 1) transport.fail_after(2, 0);  // parcels
      shard.forward(ring);
    });
    EXPECT_EQ(died[0].kind, "TransportError");
  };
  for (int i = 0; i < rounds(50); ++i) round();
  const std::int64_t memory = resident_bytes();
  const std::int64_t threads = entries_of("/proc/self/task");
  const std::int64_t descriptors = entries_of("/proc/self/fd");
  for (int i = 0; i < rounds(400); ++i) round();
  EXPECT_EQ(settled_threads(threads), threads);
  EXPECT_EQ(entries_of("/proc/self/fd"), descriptors);
  EXPECT_LE(resident_bytes() - memory, slowness() > 1 ? 256 << 20 : 8 << 20);
}

// Different executors at once in different threads, on one pool: each gets its own answer.
TEST(Soak, ConcurrentExecutorsDoNotDisturbEachOther) {
  struct Job {
    Problem problem;
    RingOptions options;
    Inputs inputs;
    Results alone;
  };
  std::vector<Job> jobs;
  const auto add = [&](Problem problem, Placement placement, DType dtype, bool reproducible) {
    problem.dtype = dtype;
    RingOptions options = ring_options(problem, std::move(placement));
    options.reproducible = reproducible;
    Job job{problem, options, random_inputs(problem, seed_of(problem.name)), {}};
    job.alone = run_ring(options, job.inputs);
    jobs.push_back(std::move(job));
  };
  add(make_problem("a", dense(2, true), 1, 200, 64), Placement::zigzag(200, 3), DType::f32, false);
  add(make_problem("b", longnet(4, List{16, 128}, List{1, 4}), 4, 150, 24, 2),
      Placement::striped(150, 2), DType::bf16, false);
  add(make_problem("c", dense(1), 1, 77, 128), Placement::contiguous(77, 1), DType::f16, true);
  add(make_problem("d", longnet(4, List{32, 64}, List{1, 2}, true), 2, 180, 40, 1,
                   MixGradient::detached),
      Placement::hilbert(180, 4), DType::f32, true);
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (const Job& job : jobs) {
    threads.emplace_back([&wrong, &job] {
      for (int i = 0; i < rounds(60); ++i) {
        if (!first_difference(run_ring(job.options, job.inputs), job.alone).empty()) ++wrong;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

// Callers outnumber the pool many times over.
TEST(Soak, ManyRanksShareOneThread) {
  const Problem problem = make_problem("one thread", dense(2, true), 2, 96, 16);
  RingOptions options = ring_options(problem, Placement::zigzag(96, 8));
  options.threads = 1;
  const Inputs inputs = random_inputs(problem, 1);
  const Expected expected = reference_of(problem, inputs);
  for (int i = 0; i < rounds(100); ++i)
    expect_matches(problem, run_ring(options, inputs), expected);
}

}  // namespace
}  // namespace annulus::test
