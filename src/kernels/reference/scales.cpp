#include "kernels/reference/scales.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "kernels/reference/rows.h"

namespace annulus::reference {

Scales error_scales(const Pattern& pattern, const Shape& shape, std::span<const double> q,
                    std::span<const double> k, std::span<const double> v,
                    std::span<const double> dout, MixGradient mix,
                    std::optional<double> given_scale) {
  const auto width = static_cast<std::size_t>(shape.head_dim);
  const auto index_of = [&](const Place& place, int heads) {
    return static_cast<std::size_t>((place.batch * shape.tokens + place.position) * heads +
                                    place.head);
  };
  const auto loads = [&](std::span<const double> tensor, int heads) {
    return [=](const Place& place, std::span<double> row) {
      const auto values = tensor.subspan(index_of(place, heads) * width, width);
      std::copy(values.begin(), values.end(), row.begin());
    };
  };
  const RowProblem problem{.pattern = pattern,
                           .tokens = shape.tokens,
                           .kv_heads = shape.kv_heads,
                           .head_dim = shape.head_dim,
                           .scale = given_scale.value_or(1.0 / std::sqrt(shape.head_dim)),
                           .mix = mix,
                           .q = loads(q, shape.q_heads),
                           .k = loads(k, shape.kv_heads),
                           .v = loads(v, shape.kv_heads),
                           .dout = loads(dout, shape.q_heads)};
  const auto for_places = [&](int heads, const auto& body) {
    for (std::int64_t batch = 0; batch < shape.batch; ++batch) {
      for (std::int64_t token = 0; token < shape.tokens; ++token) {
        for (int head = 0; head < heads; ++head) body(Place{batch, token, head});
      }
    }
  };
  const auto append = [&](const SizedRow& row, std::vector<double>& scales) {
    for (std::size_t d = 0; d < width; ++d) scales.push_back(row.scale(d));
  };

  struct State {
    double lse;
    std::vector<Sized> deltas;
  };
  Scales scales;
  std::vector<State> queries;
  for_places(shape.q_heads, [&](const Place& place) {
    QueryRow row = query_row(problem, place);
    append(row.o, scales.o);
    append(row.dq, scales.dq);
    queries.push_back({row.lse, std::move(row.deltas)});
  });
  for_places(shape.kv_heads, [&](const Place& place) {
    const KeyRow row = key_row(problem, place, [&](const Place& query, std::size_t branch) {
      const State& state = queries[index_of(query, shape.q_heads)];
      return QueryState{state.lse, state.deltas[branch]};
    });
    append(row.dk, scales.dk);
    append(row.dv, scales.dv);
  });
  return scales;
}

}  // namespace annulus::reference
