#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <span>
#include <vector>

#include "annulus/reference.h"
#include "kernels/reference/error.h"

// Evaluates the definition in fp64 for single rows, which a check chooses, where
// annulus/reference.h evaluates all rows. Each row comes with the sizes that its errors are
// relative to (error.h).
namespace annulus::reference {

// A row of a tensor. `head` is a query head for q, o, lse, dout and dq, else a key/value head.
struct Place {
  std::int64_t batch = 0;
  std::int64_t position = 0;
  int head = 0;
};

struct RowProblem {
  using Load = std::function<void(const Place& place, std::span<double> row)>;

  const Pattern& pattern;
  std::int64_t query_tokens = 0;
  std::int64_t key_tokens = 0;
  int kv_heads = 1;
  int head_dim = 0;
  double scale = 1.0;
  MixGradient mix = MixGradient::full;
  Load q, k, v;
  Load dout;                      // empty: no gradients
  std::span<const double> sinks;  // one per query head, or none
  SoftmaxOptions softmax;
};

// Of dense tensors, as annulus/reference.h takes them.
[[nodiscard]] RowProblem row_problem(const Pattern& pattern, const Shape& shape,
                                     std::span<const double> q, std::span<const double> k,
                                     std::span<const double> v, std::span<const double> dout,
                                     MixGradient mix = MixGradient::full,
                                     std::optional<double> scale = std::nullopt,
                                     std::span<const double> sinks = {},
                                     const SoftmaxOptions& softmax = {});

struct QueryRow {
  SizedRow o;
  SizedRow dq;
  double lse = -std::numeric_limits<double>::infinity();
  std::vector<Sized>
      deltas;   // per branch: dO.O, or with detached mixing dO.O_b less the sink's part
  Sized dsink;  // what the row adds to the gradient of its head's sink
  double largest_score = 0.0;  // ScoreSizes::largest
};
[[nodiscard]] QueryRow query_row(const RowProblem& problem, const Place& query);

// What the gradients of a key need to know of a query that sees it.
struct QueryState {
  double lse = 0.0;
  Sized delta;
};
using StateOf = std::function<QueryState(const Place& query, std::size_t branch)>;

struct KeyRow {
  SizedRow dk;
  SizedRow dv;
  double largest_score = 0.0;
};
[[nodiscard]] KeyRow key_row(const RowProblem& problem, const Place& key, const StateOf& state_of);

}  // namespace annulus::reference
