// Phases of the CPU: branches whose items may run side by side.

#include <gtest/gtest.h>

#include <cstdint>
#include <set>
#include <tuple>
#include <vector>

#include "kernels/cpu/work.h"
#include "support/random_tables.h"

namespace annulus::cpu {
namespace {

using List = std::vector<std::int64_t>;

Work forward_work(const cuda::WholeSequence& whole) {
  return {{Stage::Kind::forward, &whole.plan, 0, 0}, whole.computation, 4};
}

// No query row and no key row of one branch is in another branch of the phase.
TEST(Phases, HaveNoRowInTwoBranches) {
  test::Random random(5);
  for (int trial = 0; trial < 300; ++trial) {
    SCOPED_TRACE("trial " + std::to_string(trial));
    cuda::Case c = cuda::random_case(random);
    if (random.coin()) {
      c.pattern = longnet(c.pattern.heads, List{24, 64, 64}, List{3, 1, 4}, false, Offsets::all);
    }
    const Plan plan(cuda::plan_options(c), 0);
    const Computation computation = cuda::computation_of(c, 0);
    const Work work({Stage::Kind::forward, &plan, 0, plan.steps()}, computation, 4);
    const int ratio = c.pattern.heads / c.kv_heads;
    for (const Phase& phase : work.phases()) {
      std::set<std::tuple<int, int>> seen;  // (branch, head)
      for (const WorkItem& item : phase.items)
        seen.emplace(work.group(item).branch, work.member(item).q_head);
      for (const auto& [a, head] : seen) {
        for (const auto& [b, other] : seen) {
          if (a == b || head / ratio != other / ratio) continue;
          for (std::int64_t t = 0; t < c.placement.tokens(); ++t) {
            const auto selects = [&](int branch, int h) {
              return c.pattern.branches[static_cast<std::size_t>(branch)].selects(h, t);
            };
            EXPECT_FALSE(selects(a, head) && selects(b, other)) << a << " and " << b;
          }
        }
      }
    }
  }
}

TEST(Phases, OfAllOffsetsAreOneForEachSegmentLength) {
  const Pattern alone = longnet(2, List{128}, List{16}, true, Offsets::all);
  EXPECT_EQ(forward_work(cuda::WholeSequence(alone, 128)).phases().size(), 1U);
  const Pattern both = longnet(2, List{32, 128}, List{1, 16}, true, Offsets::all);
  EXPECT_EQ(forward_work(cuda::WholeSequence(both, 128)).phases().size(), 2U);
  const Pattern blocked = longnet(2, List{32, 128}, List{1, 16}, true);
  EXPECT_EQ(forward_work(cuda::WholeSequence(blocked, 128)).phases().size(), 2U);
}

}  // namespace
}  // namespace annulus::cpu
