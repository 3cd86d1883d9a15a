// Peak memory per rank against the formula of docs/operations.md, for the dense pattern on equal
// contiguous shards, where every rank owns n rows per head, sends all of them and receives n rows
// per head in every step.

#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "annulus/in_process.h"
#include "annulus/ring_attention.h"
#include "kernels/cpu/kernel.h"
#include "ring/limits.h"

namespace annulus {
namespace {

struct Case {
  const char* name;
  DType dtype;
  Schedule schedule;
  bool backward;
  BackwardTravel travel;
};

class Memory : public ::testing::TestWithParam<Case> {};

TEST_P(Memory, FollowsTheDocumentedFormula) {
  const Case& c = GetParam();
  constexpr int kRanks = 4;
  constexpr std::int64_t kLocal = 2048;
  constexpr std::int64_t kBatch = 2;
  constexpr int kHeads = 4;
  constexpr int kKvHeads = 2;
  constexpr std::int64_t kDim = 64;
  RingOptions options{dense(kHeads), Placement::contiguous(kLocal * kRanks, kRanks)};
  options.batch = kBatch;
  options.kv_heads = kKvHeads;
  options.head_dim = kDim;
  options.dtype = c.dtype;
  options.schedule = c.schedule;
  options.backward = c.backward;
  options.backward_travel = c.travel;

  const auto e = static_cast<std::int64_t>(size_of(c.dtype));
  const bool ring = c.schedule == Schedule::ring;
  const bool wide = c.dtype == DType::f32;
  const std::int64_t keys = kBatch * kLocal * kKvHeads;
  const std::int64_t queries = kBatch * kLocal * kHeads;
  const std::int64_t slots = ring ? 2 : kRanks - 1;  // shards held beside the own ones
  std::int64_t communication = 2 * kDim * e * keys * (1 + slots);
  std::int64_t state = wide ? 0 : queries * kDim * 4;
  // Sets that pack keys have those of a step, once per K/V head.
  const cpu::Kernels& kernels = cpu::chosen_kernels();
  if (kernels.packed_bytes != nullptr) {
    const cpu::Problem problem{c.dtype, kDim, 1.0F};
    state += kBatch * kKvHeads * kernels.packed_bytes(problem, kLocal);
  }
  if (c.backward) {
    if (!wide) state += 2 * keys * kDim * 4;
    state += queries * 16;  // statistics: a multiple of 16 bytes a row
    // Returning gradients: what was received, and what comes back (ring: one step's, gather: two
    // messages).
    const std::int64_t returning = slots + (ring ? 1 : 2);
    if (c.travel == BackwardTravel::keys) {
      communication += 2 * kDim * 4 * keys * returning;
    } else {
      communication += (2 * kDim * e + 16) * queries * (1 + slots) + kDim * 4 * queries * returning;
    }
  }

  run_in_process(kRanks, [&](Transport& transport) {
    const RingAttention executor(options, transport);
    const MemoryInfo info = executor.memory_info();
    EXPECT_EQ(info.communication_bytes, communication);
    EXPECT_EQ(info.state_bytes, state);
    EXPECT_GE(info.workspace_bytes, communication + state);
    EXPECT_LE(static_cast<double>(info.workspace_bytes),
              1.05 * static_cast<double>(communication + state));
  });
}

INSTANTIATE_TEST_SUITE_P(
    Dense, Memory,
    ::testing::Values(
        Case{"ring_forward_fp32", DType::f32, Schedule::ring, false, BackwardTravel::automatic},
        Case{"ring_forward_bf16", DType::bf16, Schedule::ring, false, BackwardTravel::automatic},
        Case{"gather_forward_fp32", DType::f32, Schedule::gather, false, BackwardTravel::automatic},
        Case{"ring_keys_fp32", DType::f32, Schedule::ring, true, BackwardTravel::keys},
        Case{"ring_keys_bf16", DType::bf16, Schedule::ring, true, BackwardTravel::keys},
        Case{"ring_queries_bf16", DType::bf16, Schedule::ring, true, BackwardTravel::queries},
        Case{"gather_keys_fp16", DType::f16, Schedule::gather, true, BackwardTravel::keys},
        Case{"gather_queries_fp32", DType::f32, Schedule::gather, true, BackwardTravel::queries}),
    [](const auto& info) { return std::string(info.param.name); });

TEST(Memory, ARowWrittenOnceNeedsNoState) {
  RingOptions options{dense(8), Placement::contiguous(512, 1)};
  options.kv_heads = 8;
  options.dtype = DType::bf16;
  options.backward = false;
  options.threads = 1;  // one item a head: nobody shares packed keys
  run_in_process(1, [&](Transport& transport) {
    EXPECT_EQ(RingAttention(options, transport).memory_info().state_bytes, 0);
  });
}

// Doubling tokens and ranks together leaves a rank's memory as it is: O(n/P). Rows of the dense
// pattern hop over the whole ring, 3 steps and 7; those of the second over the 3 ranks that share
// their segment, on either ring.
TEST(Memory, DoesNotGrowWithTheRing) {
  const std::vector<std::int64_t> segments{512, 8192};
  const std::vector<std::int64_t> dilations{1, 2};
  struct Growing {
    Pattern pattern;
    int steps_of_four, steps_of_eight;
  };
  for (const Growing& c : {Growing{dense(4), 3, 7}, Growing{dense(4, true), 3, 7},
                           Growing{longnet(4, segments, dilations), 3, 3}}) {
    const auto bytes = [&](int ranks, int steps) {
      RingOptions options{c.pattern, Placement::contiguous(std::int64_t{2048} * ranks, ranks)};
      options.kv_heads = 4;
      options.schedule = Schedule::ring;
      options.backward_travel = BackwardTravel::keys;
      std::atomic<std::int64_t> most{0};
      run_in_process(ranks, [&](Transport& transport) {
        const RingAttention executor(options, transport);
        EXPECT_EQ(executor.plan().steps(), steps);
        const std::int64_t mine = executor.memory_info().workspace_bytes;
        for (std::int64_t seen = most; mine > seen && !most.compare_exchange_weak(seen, mine);) {
        }
      });
      return static_cast<double>(most);
    };
    EXPECT_LT(bytes(8, c.steps_of_eight), 1.02 * bytes(4, c.steps_of_four)) << c.pattern.name;
  }
}

// One rule for the tool, which has to allocate all tensors, and for callers who have theirs.
TEST(MemoryLimits, AreWhatFitsIntoARanksShare) {
  constexpr std::int64_t kAvailable = 4'000'000;
  RingOptions options{dense(4), Placement::contiguous(100, 4)};
  options.kv_heads = 2;
  options.backward = false;
  const auto elements = [&](ring::Missing missing) {
    const Limits limits = ring::limits_for_memory(options, kAvailable, missing);
    EXPECT_EQ(limits.communication_bytes, 200'000);  // a fifth of a quarter
    return limits.qkv_elements;
  };
  // 800,000 bytes. Per token and element of a head q, k, v have 8 elements and o has 4.
  EXPECT_EQ(elements(ring::Missing::all_tensors), 800'000 * 8 / (12 * 4));
  EXPECT_EQ(elements(ring::Missing::results), 800'000 * 8 / (4 * 4));
  options.backward = true;
  EXPECT_EQ(elements(ring::Missing::all_tensors), 800'000 * 8 / (24 * 4));
  EXPECT_EQ(elements(ring::Missing::results), 800'000 * 8 / (8 * 4));
  options.placement = Placement::zigzag(100, 4);  // two ranges a rank: copies of all tensors
  EXPECT_EQ(elements(ring::Missing::results), 800'000 * 8 / (32 * 4));
  options.dtype = DType::bf16;  // and fp32 gradients
  EXPECT_EQ(elements(ring::Missing::results), 800'000 * 8 / (32 * 2 + 8 * 4));
  options.mix_gradient = MixGradient::detached;  // and an output per branch
  EXPECT_EQ(elements(ring::Missing::all_tensors), 800'000 * 8 / (24 * 2 + 8 * 4 + 4 * 2));
  // Of the rows that it selects: all of one, a quarter of the other.
  options.pattern = longnet(4, std::vector<std::int64_t>{4, 20}, std::vector<std::int64_t>{1, 4});
  EXPECT_EQ(elements(ring::Missing::all_tensors), 800'000 * 8 / (24 * 2 + 8 * 4 + 4 * 2 + 2));
}

}  // namespace
}  // namespace annulus
