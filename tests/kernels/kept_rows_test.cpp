// Where the outputs of single branches are kept, against the definition of a branch: one row for
// every selected token and none for the others.

#include "kernels/kept_rows.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "kernels/work_groups.h"
#include "pattern/entry_groups.h"
#include "support/random_plans.h"

namespace annulus {
namespace {

using List = std::vector<std::int64_t>;

bool selects(const Pattern& pattern, int branch, std::int64_t entry, int head, std::int64_t query) {
  const Branch& selecting = pattern.branches[static_cast<std::size_t>(branch)];
  if (pattern.documents.empty()) return selecting.selects(head, query);
  const std::span<const Document> documents = documents_of(pattern, entry);
  return std::any_of(documents.begin(), documents.end(), [&](const Document& d) {
    return query >= d.query_begin && query < d.query_end &&
           selecting.selects(head, query - d.query_begin + d.query_start);
  });
}

TEST(KeptRows, EverySelectedTokenHasOneRow) {
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    test::Random random(seed);
    const PlanOptions options = test::any_sides(random);
    const Pattern& pattern = options.pattern;
    SCOPED_TRACE("seed " + std::to_string(seed) + ", " + pattern.name + ", " +
                 options.queries.name());
    const std::int64_t batch =
        pattern.by_entry() ? pattern.counted_entries() : random.between(1, 3);
    for (int rank = 0; rank < options.queries.ranks(); ++rank) {
      const std::vector<std::int64_t> positions = options.queries.positions(rank);
      const KeptRows kept(pattern, options.queries, rank, batch);
      std::vector<int> used(static_cast<std::size_t>(kept.rows()), 0);
      for (std::int64_t b = 0; b < batch; ++b) {
        for (int branch = 0; branch < static_cast<int>(pattern.branches.size()); ++branch) {
          for (int head = 0; head < pattern.heads; ++head) {
            std::int64_t next = b * kept.batch_rows() + kept.first(branch, head);
            for (std::size_t t = 0; t < positions.size(); ++t) {
              const std::int64_t row = kept.row(branch, b, head, static_cast<std::int64_t>(t));
              const bool selected = selects(pattern, branch, b, head, positions[t]);
              ASSERT_EQ(row, selected ? next : -1) << "token " << t << ", head " << head;
              if (!selected) continue;
              ++next;
              ASSERT_LT(row, kept.rows());
              ++used[static_cast<std::size_t>(row)];
            }
          }
        }
      }
      // Batch entries have room for the most that one of them selects.
      for (const int count : used) ASSERT_LE(count, 1);
      if (!pattern.by_entry()) {
        for (const int count : used) ASSERT_EQ(count, 1);
      }
    }
  }
}

// A kernel writes row i of a run at `kept` + i.
TEST(KeptRows, RowsOfARunLieSideBySide) {
  std::int64_t checked = 0;
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    test::Random random(seed);
    PlanOptions options = test::any_sides(random);
    options.travel = Travel::keys;
    SCOPED_TRACE("seed " + std::to_string(seed) + ", " + options.pattern.name + ", " +
                 options.queries.name());
    for (int rank = 0; rank < options.queries.ranks(); ++rank) {
      const Plan plan(options, rank);
      const std::int64_t batch = plan.pattern().counted_entries();
      const KeptRows kept(plan.pattern(), plan.query_placement(), rank, batch);
      Computation computation;
      computation.pattern = &plan.pattern();
      computation.query_tokens = plan.query_placement().local_tokens(rank);
      computation.key_tokens = plan.key_placement().local_tokens(rank);
      computation.batch = batch;
      computation.kv_heads = options.kv_heads;
      computation.mix_gradient = MixGradient::detached;
      computation.kept = &kept;
      for (int step = 0; step <= plan.steps(); ++step) {
        const WorkGroups groups({Stage::Kind::forward, &plan, step, step}, computation, 1);
        for (const WorkGroup& group : groups.all()) {
          for (const RunTemplate& run : groups.rows(group).queries) {
            for (const Selection::Member& member : group.members) {
              const std::int64_t first = kept.first(group.branch, member.q_head) + run.kept;
              for (std::int64_t b = group.entries.begin; b < group.entries.end_in(batch); ++b) {
                for (std::int32_t i = 0; i < run.count; ++i, ++checked) {
                  ASSERT_EQ(b * kept.batch_rows() + first + i,
                            kept.row(group.branch, b, member.q_head,
                                     run.store_first + i * run.store_stride));
                }
              }
            }
          }
        }
      }
    }
  }
  EXPECT_GT(checked, 10'000);
}

// The reason for all this: LongNet's dilations 1, 2, ..., 16 select 1.94 tokens' worth of rows
// of 5.
TEST(KeptRows, LongNetKeepsLessThanTwoRowsAToken) {
  constexpr std::int64_t kTokens = 65'536;
  const Pattern pattern = longnet(8, List{2048, 4096, 8192, 16384, 32768}, List{1, 2, 4, 8, 16});
  const KeptRows kept(pattern, Placement::contiguous(kTokens, 1), 0, 1);
  EXPECT_EQ(kept.rows(), kTokens * 8 * 31 / 16);
  // Next to nothing beside the rows: less than one element of 16 bits for each.
  EXPECT_LT(kept.bytes(), 2 * kept.rows());
}

}  // namespace
}  // namespace annulus
