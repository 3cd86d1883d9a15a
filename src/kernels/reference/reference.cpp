#include "annulus/reference.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <string>

#include "annulus/error.h"
#include "kernels/reference/softmax.h"
#include "pattern/segments.h"

namespace annulus::reference {
namespace {

constexpr double kNegInf = -std::numeric_limits<double>::infinity();

// The arguments that forward and backward share, checked.
struct Problem {
  const Pattern& pattern;
  const Shape& shape;
  std::span<const double> q, k, v;
  double scale;
  std::span<const double> sinks;
  SoftmaxOptions softmax;

  // -inf: none.
  [[nodiscard]] double sink(int q_head) const {
    return sinks.empty() ? kNegInf : sinks[static_cast<std::size_t>(q_head)];
  }
  [[nodiscard]] int kv_head(int q_head) const { return q_head / (shape.q_heads / shape.kv_heads); }
};

// What one query sees of one branch; one number per key.
struct BranchRow {
  std::vector<std::int64_t> keys;
  std::vector<double> scores;
  std::vector<double> slopes;  // of the scores by scale * q.k
  std::vector<double> kept;    // 0 where dropout drops the probability, else its factor
  std::vector<double> o;
  double lse = kNegInf;
};

// One (batch, token, head): the branches, their merge, and that with the sink; before output_scale.
struct Row {
  std::vector<BranchRow> branches;
  std::vector<double> merged;
  std::vector<double> o;
  double lse = kNegInf;
  double sink_weight = 0.0;
};

// The vector [batch, token, head, :] of a dense [batch, tokens, heads, head_dim] tensor.
template <typename T>
std::span<T> vector_at(std::span<T> tensor, const Shape& shape, std::int64_t tokens, int heads,
                       std::int64_t batch, std::int64_t token, int head) {
  const std::int64_t index = (batch * tokens + token) * heads + head;
  return tensor.subspan(static_cast<std::size_t>(index * shape.head_dim),
                        static_cast<std::size_t>(shape.head_dim));
}
template <typename T>
std::span<T> query_vector(std::span<T> tensor, const Shape& shape, std::int64_t batch,
                          std::int64_t token, int head) {
  return vector_at(tensor, shape, shape.tokens, shape.q_heads, batch, token, head);
}
template <typename T>
std::span<T> key_vector(std::span<T> tensor, const Shape& shape, std::int64_t batch,
                        std::int64_t token, int head) {
  return vector_at(tensor, shape, shape.keys(), shape.kv_heads, batch, token, head);
}

double dot(std::span<const double> a, std::span<const double> b) {
  double sum = 0.0;
  for (std::size_t d = 0; d < a.size(); ++d) sum += a[d] * b[d];
  return sum;
}

// into += weight * from
void add_scaled(std::span<double> into, double weight, std::span<const double> from) {
  for (std::size_t d = 0; d < into.size(); ++d) into[d] += weight * from[d];
}

// log(sum(exp(x))). Without terms, or with nothing but -inf, it is -inf: subtracting the maximum
// would then give NaN. A NaN or +inf among the terms makes it NaN. `NaN > maximum` is false, so
// "the maximum is -inf" does not mean "all terms are -inf": a row of NaNs must not pass for empty.
double log_sum_exp(std::span<const double> terms) {
  if (std::ranges::all_of(terms, [](double x) { return x == kNegInf; })) return kNegInf;
  double maximum = kNegInf;
  for (const double x : terms) {
    if (x > maximum) maximum = x;
  }
  double sum = 0.0;
  for (const double x : terms) sum += std::exp(x - maximum);
  return maximum + std::log(sum);
}

BranchRow attend_branch(const Problem& problem, const Branch& branch, std::int64_t batch,
                        std::int64_t query, int head) {
  const Shape& shape = problem.shape;
  const int kv_head = problem.kv_head(head);
  const auto q = query_vector(problem.q, shape, batch, query, head);

  BranchRow row;
  row.o.assign(static_cast<std::size_t>(shape.head_dim), 0.0);
  for (std::int64_t key = 0; key < shape.keys(); ++key) {
    if (!problem.pattern.allows(branch, head, query, key, batch)) continue;
    row.keys.push_back(key);
    const double s = problem.scale * dot(q, key_vector(problem.k, shape, batch, key, kv_head));
    row.scores.push_back(capped(problem.softmax, s));
    row.slopes.push_back(cap_slope(problem.softmax, s));
    row.kept.push_back(kept(problem.softmax, batch, head, query, key));
  }

  row.lse = log_sum_exp(row.scores);
  if (row.lse == kNegInf) return row;  // attends to nothing: o stays 0
  for (std::size_t i = 0; i < row.keys.size(); ++i) {
    add_scaled(row.o, row.kept[i] * std::exp(row.scores[i] - row.lse),
               key_vector(problem.v, shape, batch, row.keys[i], kv_head));
  }
  return row;
}

// L = log sum_b exp(L_b) and O = sum_b exp(L_b - L) O_b. A sink is one more term of the sum,
// without a value: L' = log(exp(L) + exp(sink)) and O' = exp(L - L') O.
Row attend(const Problem& problem, std::int64_t batch, std::int64_t query, int head) {
  Row row;
  row.merged.assign(static_cast<std::size_t>(problem.shape.head_dim), 0.0);
  row.o = row.merged;
  std::vector<double> branch_lse;
  for (const Branch& branch : problem.pattern.branches) {
    row.branches.push_back(attend_branch(problem, branch, batch, query, head));
    branch_lse.push_back(row.branches.back().lse);
  }
  const double merged_lse = log_sum_exp(branch_lse);
  for (const BranchRow& branch : row.branches) {
    if (branch.lse == kNegInf) continue;  // weight 0; when all are empty L_b - L would be NaN
    add_scaled(row.merged, std::exp(branch.lse - merged_lse), branch.o);
  }
  const double sink = problem.sink(head);
  const double both[] = {merged_lse, sink};
  row.lse = log_sum_exp(both);
  if (sink != kNegInf) row.sink_weight = std::exp(sink - row.lse);
  const bool empty = merged_lse == kNegInf && !std::isnan(row.lse);
  if (!empty) add_scaled(row.o, std::exp(merged_lse - row.lse), row.merged);
  return row;
}

void check_at_least(const std::string& where, const std::string& what, std::int64_t found,
                    std::int64_t expected) {
  if (found >= expected) return;
  throw ConfigError(where + ": " + what + " is " + std::to_string(found) + ", expected at least " +
                    std::to_string(expected));
}

void check_size(const std::string& where, const std::string& what, std::size_t found,
                const Shape& shape, std::int64_t tokens, int heads) {
  const std::int64_t expected = shape.batch * tokens * heads * shape.head_dim;
  if (found == static_cast<std::size_t>(expected)) return;
  throw ConfigError(where + ": " + what + " has " + std::to_string(found) + " elements, expected " +
                    std::to_string(expected) + " for [" + std::to_string(shape.batch) + ", " +
                    std::to_string(tokens) + ", " + std::to_string(heads) + ", " +
                    std::to_string(shape.head_dim) + "]");
}

Problem checked_problem(const std::string& where, const Pattern& pattern, const Shape& shape,
                        std::span<const double> q, std::span<const double> k,
                        std::span<const double> v, std::optional<double> scale,
                        std::span<const double> sinks, const SoftmaxOptions& softmax) {
  pattern.validate();
  check_at_least(where, "batch", shape.batch, 0);
  check_at_least(where, "tokens", shape.tokens, 0);
  check_at_least(where, "key_tokens", shape.keys(), 0);
  check_documents(pattern, shape.tokens, shape.keys());
  check_at_least(where, "q_heads", shape.q_heads, 1);
  check_at_least(where, "kv_heads", shape.kv_heads, 1);
  check_at_least(where, "head_dim", shape.head_dim, 1);
  if (shape.q_heads % shape.kv_heads != 0) {
    throw ConfigError(
        where + ": found " + std::to_string(shape.q_heads) + " query heads and " +
        std::to_string(shape.kv_heads) +
        " key/value heads, expected the query heads to be a multiple of the key/value heads");
  }
  if (pattern.heads != shape.q_heads) {
    throw ConfigError(where + ": pattern '" + pattern.name + "' has " +
                      std::to_string(pattern.heads) + " heads, expected " +
                      std::to_string(shape.q_heads) + ", the number of query heads");
  }
  check_size(where, "q", q.size(), shape, shape.tokens, shape.q_heads);
  check_size(where, "k", k.size(), shape, shape.keys(), shape.kv_heads);
  check_size(where, "v", v.size(), shape, shape.keys(), shape.kv_heads);
  if (scale && !std::isfinite(*scale)) {
    throw ConfigError(where + ": scale is " + std::to_string(*scale) +
                      ", expected a finite number");
  }
  if (!sinks.empty() && sinks.size() != static_cast<std::size_t>(shape.q_heads)) {
    throw ConfigError(where + ": there are " + std::to_string(sinks.size()) + " sinks, expected " +
                      std::to_string(shape.q_heads) + ", the number of query heads");
  }
  if (!(softmax.softcap >= 0.0) || !(softmax.dropout_p >= 0.0 && softmax.dropout_p < 1.0)) {
    throw ConfigError(where + ": softcap is " + std::to_string(softmax.softcap) +
                      " and dropout_p is " + std::to_string(softmax.dropout_p) +
                      ", expected a softcap of at least 0 and a dropout_p from 0 to less than 1");
  }
  const double factor = scale.value_or(1.0 / std::sqrt(shape.head_dim));
  return {pattern, shape, q, k, v, factor, sinks, softmax};
}

}  // namespace

Output forward(const Pattern& pattern, const Shape& shape, std::span<const double> q,
               std::span<const double> k, std::span<const double> v, std::optional<double> scale,
               std::span<const double> sinks, const SoftmaxOptions& softmax) {
  const Problem problem =
      checked_problem("reference::forward", pattern, shape, q, k, v, scale, sinks, softmax);
  Output output;
  output.o.assign(q.size(), 0.0);
  for (std::int64_t batch = 0; batch < shape.batch; ++batch) {
    for (std::int64_t token = 0; token < shape.tokens; ++token) {
      for (int head = 0; head < shape.q_heads; ++head) {
        const Row row = attend(problem, batch, token, head);
        add_scaled(query_vector(std::span(output.o), shape, batch, token, head),
                   pattern.output_scale, row.o);
        output.lse.push_back(row.lse);
      }
    }
  }
  return output;
}

// With P = exp(S - L), the probability of a key in the merged softmax, and O' = output_scale * O:
//   dV = P^T dO',  dP = dO' V^T,  dS = P (dP - delta),  dQ = scale dS K,  dK = scale dS^T Q.
// full: delta = dO'.O. detached: O = sum_b w_b O_b with constant w_b = exp(L_b - L), so branch b
// is an attention of its own with output gradient w_b dO' and probabilities P_b = exp(S - L_b):
// dS = P_b (w_b dP - w_b dO'.O_b) = P (dP - dO'.O_b), that is delta = dO'.O_b.
//
// With a sink of weight p = exp(sink - L'), O' = (1 - p) O and d sink = -p dO'.O', summed over
// rows. full: nothing else changes, given L' and O'. detached holds w_b constant, but not p, which
// depends on every score: dp/dS = -p P. The additional P p dO'.O in dS makes delta = dO'.O_b - p
// dO'.O.
//
// Dropout multiplies P with D behind the softmax: dV = (D P)^T dO', dP = D dO' V^T, and O in delta
// is that with dropout. A softcap c makes S = c tanh(s / c) of s = scale * q.k: ds = (1 - (S /
// c)^2) dS.
Gradients backward(const Pattern& pattern, const Shape& shape, std::span<const double> q,
                   std::span<const double> k, std::span<const double> v,
                   std::span<const double> dout, MixGradient mix, std::optional<double> scale,
                   std::span<const double> sinks, const SoftmaxOptions& softmax) {
  const Problem problem =
      checked_problem("reference::backward", pattern, shape, q, k, v, scale, sinks, softmax);
  check_size("reference::backward", "dout", dout.size(), shape, shape.tokens, shape.q_heads);
  Gradients gradients;
  gradients.dq.assign(q.size(), 0.0);
  gradients.dk.assign(k.size(), 0.0);
  gradients.dv.assign(v.size(), 0.0);
  gradients.dsinks.assign(sinks.size(), 0.0);
  for (std::int64_t batch = 0; batch < shape.batch; ++batch) {
    for (std::int64_t token = 0; token < shape.tokens; ++token) {
      for (int head = 0; head < shape.q_heads; ++head) {
        const auto of_query = [&](auto tensor) {
          return query_vector(tensor, shape, batch, token, head);
        };
        const auto of_key = [&](auto tensor, std::int64_t key) {
          return key_vector(tensor, shape, batch, key, problem.kv_head(head));
        };
        const Row row = attend(problem, batch, token, head);
        std::vector<double> d_o(row.o.size(), 0.0);
        add_scaled(d_o, pattern.output_scale, of_query(dout));
        const bool empty = std::ranges::all_of(
            row.branches, [](const BranchRow& branch) { return branch.lse == kNegInf; });
        if (problem.sink(head) != kNegInf && !empty) {  // O' is the constant 0 where it is empty
          gradients.dsinks[static_cast<std::size_t>(head)] -= row.sink_weight * dot(d_o, row.o);
        }

        for (const BranchRow& branch : row.branches) {
          if (branch.lse == kNegInf) continue;  // its O_b is the constant 0
          const double delta = mix == MixGradient::full
                                   ? dot(d_o, row.o)
                                   : dot(d_o, branch.o) - row.sink_weight * dot(d_o, row.merged);
          for (std::size_t i = 0; i < branch.keys.size(); ++i) {
            const std::int64_t key = branch.keys[i];
            const double p = std::exp(branch.scores[i] - row.lse);
            const double dp = branch.kept[i] * dot(d_o, of_key(v, key));
            const double ds = branch.slopes[i] * p * (dp - delta);
            add_scaled(of_key(std::span(gradients.dv), key), branch.kept[i] * p, d_o);
            add_scaled(of_query(std::span(gradients.dq)), problem.scale * ds, of_key(k, key));
            add_scaled(of_key(std::span(gradients.dk), key), problem.scale * ds, of_query(q));
          }
        }
      }
    }
  }
  return gradients;
}

}  // namespace annulus::reference
