#include "kernels/reference/scales.h"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "kernels/reference/rows.h"

namespace annulus::reference {

Scales error_scales(const Pattern& pattern, const Shape& shape, std::span<const double> q,
                    std::span<const double> k, std::span<const double> v,
                    std::span<const double> dout, MixGradient mix, std::optional<double> scale,
                    std::span<const double> sinks, const SoftmaxOptions& softmax) {
  const RowProblem problem = row_problem(pattern, shape, q, k, v, dout, mix, scale, sinks, softmax);
  const auto for_places = [&](std::int64_t tokens, int heads, const auto& body) {
    for (std::int64_t batch = 0; batch < shape.batch; ++batch) {
      for (std::int64_t token = 0; token < tokens; ++token) {
        for (int head = 0; head < heads; ++head) body(Place{batch, token, head});
      }
    }
  };
  const auto append = [&](const SizedRow& row, std::vector<double>& scales) {
    for (std::size_t d = 0; d < row.value().size(); ++d) scales.push_back(row.scale(d));
  };

  struct State {
    double lse;
    std::vector<Sized> deltas;
  };
  Scales scales;
  std::vector<State> queries;
  std::vector<double> dsinks(sinks.size(), 0.0);
  std::vector<double> squares(sinks.size(), 0.0);
  for_places(shape.tokens, shape.q_heads, [&](const Place& place) {
    QueryRow row = query_row(problem, place);
    append(row.o, scales.o);
    append(row.dq, scales.dq);
    if (!sinks.empty()) {
      const auto head = static_cast<std::size_t>(place.head);
      dsinks[head] += row.dsink.value;
      squares[head] += row.dsink.scale * row.dsink.scale;
    }
    queries.push_back({row.lse, std::move(row.deltas)});
  });
  for (std::size_t h = 0; h < sinks.size(); ++h)
    scales.dsinks.push_back(std::fabs(dsinks[h]) + std::sqrt(squares[h]));
  for_places(shape.keys(), shape.kv_heads, [&](const Place& place) {
    const KeyRow row = key_row(problem, place, [&](const Place& query, std::size_t branch) {
      const State& state = queries[static_cast<std::size_t>(
          (query.batch * shape.tokens + query.position) * shape.q_heads + query.head)];
      return QueryState{state.lse, state.deltas[branch]};
    });
    append(row.dk, scales.dk);
    append(row.dv, scales.dv);
  });
  return scales;
}

}  // namespace annulus::reference
