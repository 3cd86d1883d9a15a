// Tasks with keys that were packed before, of the sets that want them so.

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "kernels/cpu/kernel.h"
#include "support/kernel_task.h"
#include "support/problem.h"
#include "support/random_plans.h"

namespace annulus::test {
namespace {

// Whoever packs keys, the bits are the same: an engine packs those that several tasks share, and
// with other numbers of threads others share them. NaN and Inf, too.
TEST(KernelPacks, PackedKeysGiveTheSameBits) {
  for (const cpu::Kernels* kernels : cpu::available_kernels()) {
    if (kernels->pack_keys == nullptr) continue;
    for (int round = 0; round < 24; ++round) {
      SCOPED_TRACE(std::string(kernels->name) + ", seed " + std::to_string(round));
      Random random(static_cast<std::uint64_t>(round));
      const std::int64_t keys = random.between(1, round % 4 == 0 ? 1500 : 300);
      TaskRun run;
      run.canonical_keys = random.coin();
      const std::int64_t stride = run.canonical_keys ? 1 : random.between(1, 3);
      TaskData data = random_task(
          static_cast<std::uint64_t>(round), DType::bf16, random.one_of<int>({8, 40, 64, 128}),
          random.coin(), progression(static_cast<std::int32_t>(random.between(0, 200)), 1, 70),
          progression(0, static_cast<std::int32_t>(stride), keys));
      if (random.coin()) {
        for (std::vector<double>* const x : {&data.k, &data.v}) {
          const std::int64_t at = random.between(0, std::ssize(*x) - 1);
          (*x)[static_cast<std::size_t>(at)] = random.one_of<double>({NAN, INFINITY, -INFINITY});
        }
      }
      if (!run.canonical_keys && keys > 3)
        run.key_cuts = {{keys / 2, 1, keys - keys / 2}, {0, 1, keys / 2}};
      TaskResult own;
      TaskResult packed;
      run_forward(*kernels, data, run, own);
      run.packed = true;
      run_forward(*kernels, data, run, packed);
      const auto same = [](const std::vector<float>& a, const std::vector<float>& b) {
        return a.size() == b.size() &&
               std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
      };
      EXPECT_TRUE(same(own.o, packed.o));
      EXPECT_TRUE(same(own.lse, packed.lse));
    }
  }
}

// Exact maxima are looked for in all rounds of packed keys, too.
TEST(KernelPacks, ReferencesMoveToKeysOfLaterRounds) {
  TaskData data =
      random_task(4, DType::bf16, 64, false, progression(0, 1, 40), progression(0, 1, 1100));
  for (std::size_t d = 0; d < 64; ++d) {
    data.k[1060 * 64 + d] = data.q[5 * 64 + d];
    data.q[5 * 64 + d] *= 512;
  }
  const TaskOracle want = oracle(data);
  for (const cpu::Kernels* kernels : cpu::available_kernels()) {
    if (kernels->pack_keys == nullptr) continue;
    TaskRun run;
    run.packed = true;
    TaskResult got;
    run_forward(*kernels, data, run, got);
    EXPECT_LE(relative_rms(got.lse, want.lse, 1.0), 2e-6) << kernels->name;
    EXPECT_LE(relative_rms(got.o, want.o), 3e-3) << kernels->name;
  }
}

// Of keys that are packed for several tasks each takes those that its filter keeps, wherever in
// blocks and chunks that begins and ends, and Inf and NaN of the others reach nobody.
TEST(KernelPacks, TasksComputeWithTheKeysThatTheirFilterKeeps) {
  constexpr std::int32_t kEnd = std::numeric_limits<std::int32_t>::max();
  const IndexFilter filters[] = {{300, kEnd, {}},
                                 {0, 1030, {}},
                                 {0, kEnd, {100, 640}},
                                 {40, 1090, {70, 1057}},
                                 {256, 1024, {288, 800}}};
  for (const int dim : {64, 128, 136}) {
    for (const bool causal : {false, true}) {
      for (const IndexFilter& filter : filters) {
        TaskData data = random_task(static_cast<std::uint64_t>(dim), DType::bf16, dim, causal,
                                    progression(1060, 1, 40), progression(0, 1, 1100));
        data.key_filter = filter;
        for (std::int64_t key = 0; key < data.keys(); ++key) {
          if (data.sees(data.queries() - 1, key)) continue;
          data.k[static_cast<std::size_t>(key * dim + 1)] = NAN;
          data.v[static_cast<std::size_t>(key * dim + 2)] = INFINITY;
        }
        const TaskOracle want = oracle(data);
        for (const cpu::Kernels* kernels : cpu::available_kernels()) {
          if (kernels->pack_keys == nullptr) continue;
          for (const bool canonical : {false, true}) {
            SCOPED_TRACE(std::string(kernels->name) + " head_dim " + std::to_string(dim) +
                         (causal ? " causal" : "") + (canonical ? " canonical" : "") + " from " +
                         std::to_string(filter.begin));
            TaskRun run;
            run.canonical_keys = canonical;
            run.packed = true;
            TaskResult packed;
            run_forward(*kernels, data, run, packed);
            EXPECT_LE(relative_rms(packed.lse, want.lse, 1.0), 2e-6);
            EXPECT_LE(relative_rms(packed.o, want.o), 3e-3);
            if (!canonical) continue;
            // A key's place is its index, whoever packs it and whatever is left out.
            run.packed = false;
            TaskResult own;
            run_forward(*kernels, data, run, own);
            EXPECT_EQ(own.o, packed.o);
            EXPECT_EQ(own.lse, packed.lse);
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace annulus::test
