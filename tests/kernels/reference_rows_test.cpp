// Single rows of the reference are those of the whole.

#include "kernels/reference/rows.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "annulus/reference.h"

namespace annulus::reference {
namespace {

using List = std::vector<std::int64_t>;
using Values = std::vector<double>;

void expect_row(std::span<const double> row, const Values& whole, std::int64_t index,
                const char* name) {
  for (std::size_t d = 0; d < row.size(); ++d) {
    EXPECT_NEAR(row[d], whole[static_cast<std::size_t>(index) * row.size() + d], 1e-12) << name;
  }
}

TEST(ReferenceRows, AreRowsOfTheWhole) {
  Pattern absent = longnet(4, List{8, 64}, List{2, 8}, true, Offsets::interleaved, true);
  absent.branches[0].offset[1] = -1;  // a head that only one branch has
  absent.branches[1].offset[3] = -1;
  const std::vector<std::pair<const char*, Pattern>> patterns = {
      {"dense", dense(4)},
      {"dense causal", dense(4, true)},
      {"longnet", longnet(4, List{8, 16, 64}, List{1, 2, 8})},
      {"head_groups", head_groups(4, List{8, 50}, List{1, 3}, true, true)},
      {"absent heads", absent}};
  const Shape shape{.batch = 2, .tokens = 37, .q_heads = 4, .kv_heads = 2, .head_dim = 4};
  std::mt19937 engine(7);
  std::normal_distribution<double> normal;
  const auto make = [&](int heads) {
    Values values(static_cast<std::size_t>(shape.batch * shape.tokens * heads * shape.head_dim));
    for (double& value : values) value = normal(engine);
    return values;
  };
  const Values q = make(4), k = make(2), v = make(2), dout = make(4);
  for (const auto& [name, pattern] : patterns) {
    for (const MixGradient mix : {MixGradient::full, MixGradient::detached}) {
      SCOPED_TRACE(std::string(name) + (mix == MixGradient::full ? "" : ", detached"));
      const Output whole = forward(pattern, shape, q, k, v);
      const Gradients gradients = backward(pattern, shape, q, k, v, dout, mix);
      const RowProblem problem = row_problem(pattern, shape, q, k, v, dout, mix);
      std::int64_t index = 0;
      std::vector<QueryRow> rows;
      for (std::int64_t batch = 0; batch < shape.batch; ++batch) {
        for (std::int64_t token = 0; token < shape.tokens; ++token) {
          for (int head = 0; head < shape.q_heads; ++head, ++index) {
            const QueryRow& row = rows.emplace_back(query_row(problem, {batch, token, head}));
            const double lse = whole.lse[static_cast<std::size_t>(index)];
            if (std::isinf(lse)) {
              EXPECT_EQ(row.lse, lse);
            } else {
              EXPECT_NEAR(row.lse, lse, 1e-12);
            }
            expect_row(row.o.value(), whole.o, index, "o");
            expect_row(row.dq.value(), gradients.dq, index, "dq");
          }
        }
      }
      const auto state_of = [&](const Place& query, std::size_t branch) {
        const QueryRow& row = rows[static_cast<std::size_t>(
            (query.batch * shape.tokens + query.position) * shape.q_heads + query.head)];
        return QueryState{row.lse, row.deltas[branch]};
      };
      index = 0;
      for (std::int64_t batch = 0; batch < shape.batch; ++batch) {
        for (std::int64_t token = 0; token < shape.tokens; ++token) {
          for (int head = 0; head < shape.kv_heads; ++head, ++index) {
            const KeyRow row = key_row(problem, {batch, token, head}, state_of);
            expect_row(row.dk.value(), gradients.dk, index, "dk");
            expect_row(row.dv.value(), gradients.dv, index, "dv");
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace annulus::reference
