#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "kernels/cuda/work/tables.h"
#include "support/random_plans.h"

// Tables of random problems, and their rows in the order of kernels.
namespace annulus::cuda {

struct Row {
  std::int32_t source;
  std::int64_t at;
  std::int32_t index;
};

inline std::vector<Row> rows_of(const Tables& tables, const RowList& list) {
  std::vector<Row> rows;
  for (std::int32_t r = 0; r < list.runs; ++r) {
    const Run& run = tables.runs[static_cast<std::size_t>(list.begin + r)];
    EXPECT_EQ(run.before, static_cast<std::int32_t>(rows.size()));
    for (std::int32_t i = 0; i < run.count; ++i) {
      rows.push_back({run.source, run.first + static_cast<std::int64_t>(i) * run.stride,
                      run.index + i * run.index_stride});
    }
  }
  EXPECT_EQ(list.rows, static_cast<std::int32_t>(rows.size()));
  const bool ascending = std::is_sorted(
      rows.begin(), rows.end(), [](const Row& a, const Row& b) { return a.index < b.index; });
  EXPECT_EQ(list.ascending != 0, ascending);
  return rows;
}

struct Case {
  Pattern pattern;
  Placement placement;
  int kv_heads;
  Travel travel;
  Schedule schedule;
};

inline Case random_case(test::Random& random) {
  const std::int64_t tokens = random.between(1, 160);
  const int ranks = static_cast<int>(random.between(1, 4));
  const int heads = static_cast<int>(random.one_of<std::int64_t>({1, 2, 4}));
  const bool causal = random.coin();
  Pattern pattern;
  if (random.coin()) {
    pattern = test::random_branches(random, tokens, heads, causal);
  } else {
    const std::vector<std::int64_t> segments{16, 32, 64};
    const std::vector<std::int64_t> dilations{1, 2, 4};
    pattern =
        longnet(heads, segments, dilations, causal,
                random.one_of<Offsets>({Offsets::blocked, Offsets::interleaved, Offsets::all}));
  }
  pattern.window = test::any_window(random, tokens, causal);
  pattern.documents = test::any_documents(random, tokens, tokens, 2);
  const std::string name =
      random.one_of<std::string>({"contiguous", "zigzag", "striped", "hilbert"});
  Placement placement = random.coin() ? test::random_placement(random, tokens, ranks)
                                      : Placement::named(name, tokens, ranks);
  const int kv_heads = random.coin() ? heads : 1;
  return {std::move(pattern), std::move(placement), kv_heads,
          random.coin() ? Travel::keys : Travel::queries,
          random.coin() ? Schedule::ring : Schedule::gather};
}

// What a rank computes, for two sequences.
inline Computation computation_of(const Case& c, int rank) {
  Computation computation;
  computation.pattern = &c.pattern;
  computation.query_tokens = computation.key_tokens = c.placement.local_tokens(rank);
  computation.kv_heads = c.kv_heads;
  computation.batch = 2;
  return computation;
}

inline PlanOptions plan_options(const Case& c) {
  return {c.pattern, c.placement, c.placement, c.kv_heads, c.schedule, c.travel};
}

// One rank with the whole sequence, and as many K/V heads as query heads.
struct WholeSequence {
  WholeSequence(const Pattern& pattern, std::int64_t tokens)
      : placement(Placement::contiguous(tokens, 1)),
        plan({pattern, placement, placement, pattern.heads, Schedule::ring, Travel::keys}, 0) {
    computation.pattern = &pattern;
    computation.query_tokens = computation.key_tokens = tokens;
    computation.kv_heads = pattern.heads;
  }

  Placement placement;
  Plan plan;
  Computation computation;
};

}  // namespace annulus::cuda
