#include "kernels/reference/rows.h"

#include <algorithm>
#include <cmath>

#include "kernels/reference/softmax.h"
#include "pattern/entry_groups.h"
#include "pattern/segments.h"

namespace annulus::reference {
namespace {

using Row = std::vector<double>;

constexpr double kNegInf = -std::numeric_limits<double>::infinity();
constexpr Sized kOne{.value = 1.0, .scale = 1.0, .absolute = 1.0};

// Calls visit(token) for all tokens of `side` that a token of the other side could share a pair
// with. These are the selected tokens of its segment: a long sequence has too many others to ask
// about. Whether such a pair is allowed is for Pattern::allows to say.
template <typename Visit>
void for_candidates(const RowProblem& problem, const Branch& branch, int head, const Place& row,
                    Side side, const Visit& visit) {
  const Side other = side == Side::keys ? Side::queries : Side::keys;
  const std::span<const Document> documents = documents_of(problem.pattern, row.batch);
  const Segments segments(documents, branch, problem.query_tokens, problem.key_tokens);
  const std::int64_t segment = segments.at_or_before(other, row.position);
  if (segment < 0) return;
  const std::int64_t offset = branch.offset[static_cast<std::size_t>(head)];
  if (offset < 0) return;
  const Segments::Part part = segments.part(side, segment);
  const Stretch rows = selected_indices(part, branch.dilation, offset);
  for (std::int64_t i = rows.first; i <= rows.last; ++i)
    visit(part.origin + offset + i * branch.dilation);
}

// Keeps the largest. Once NaN, always NaN.
void raise(double& most, double value) {
  if (!std::isnan(most) && !(value <= most)) most = value;
}

void add_scaled(std::span<double> into, double weight, std::span<const double> from) {
  for (std::size_t d = 0; d < into.size(); ++d) into[d] += weight * from[d];
}

Sized difference(const Sized& a, const Sized& b) {
  return {a.value - b.value, a.scale + b.scale, a.absolute + b.absolute};
}

Sized product(double factor, const Sized& a) {
  const double size = std::fabs(factor);
  return {factor * a.value, size * a.scale, size * a.absolute};
}

Row load(const RowProblem& problem, const RowProblem::Load& tensor, const Place& place) {
  Row row(static_cast<std::size_t>(problem.head_dim));
  tensor(place, row);
  return row;
}

// output_scale acts on gradients before everything else.
Row load_dout(const RowProblem& problem, const Place& place) {
  Row row = load(problem, problem.dout, place);
  for (double& x : row) x *= problem.pattern.output_scale;
  return row;
}

double score_of(const RowProblem& problem, const Sized& dot) {
  return capped(problem.softmax, problem.scale * dot.value);
}
double slope_of(const RowProblem& problem, const Sized& dot) {
  return cap_slope(problem.softmax, problem.scale * dot.value);
}
double kept_of(const RowProblem& problem, const Place& query, std::int64_t key) {
  return kept(problem.softmax, query.batch, query.head, query.position, key);
}

struct BranchRow {
  std::size_t branch = 0;
  std::vector<Place> keys;
  std::vector<Sized> dots;  // q.k, without scale
  double highest = kNegInf;
  double sum = 0.0;  // of exp(score - highest)
  Row o;
};

// The branches in which the query sees a key.
std::vector<BranchRow> branch_rows(const RowProblem& problem, const Place& query) {
  const int kv_head = query.head / (problem.pattern.heads / problem.kv_heads);
  const Row q = load(problem, problem.q, query);
  Row k(q.size());
  std::vector<BranchRow> rows;
  for (std::size_t b = 0; b < problem.pattern.branches.size(); ++b) {
    const Branch& branch = problem.pattern.branches[b];
    BranchRow row;
    row.branch = b;
    row.o.resize(q.size(), 0.0);
    for_candidates(problem, branch, query.head, query, Side::keys, [&](std::int64_t position) {
      if (!problem.pattern.allows(branch, query.head, query.position, position, query.batch))
        return;
      const Place key{query.batch, position, kv_head};
      problem.k(key, k);
      row.keys.push_back(key);
      row.dots.push_back(sized_dot(q, k));
      raise(row.highest, score_of(problem, row.dots.back()));
    });
    for (const Sized& dot : row.dots) row.sum += std::exp(score_of(problem, dot) - row.highest);
    if (!row.keys.empty()) rows.push_back(std::move(row));
  }
  return rows;
}

}  // namespace

RowProblem row_problem(const Pattern& pattern, const Shape& shape, std::span<const double> q,
                       std::span<const double> k, std::span<const double> v,
                       std::span<const double> dout, MixGradient mix, std::optional<double> scale,
                       std::span<const double> sinks, const SoftmaxOptions& softmax) {
  const auto loads = [&](std::span<const double> tensor, std::int64_t tokens, int heads) {
    return [tensor, heads, tokens](const Place& place, std::span<double> row) {
      const std::int64_t index = (place.batch * tokens + place.position) * heads + place.head;
      std::ranges::copy(tensor.subspan(static_cast<std::size_t>(index) * row.size(), row.size()),
                        row.begin());
    };
  };
  return {.pattern = pattern,
          .query_tokens = shape.tokens,
          .key_tokens = shape.keys(),
          .kv_heads = shape.kv_heads,
          .head_dim = shape.head_dim,
          .scale = scale.value_or(1.0 / std::sqrt(shape.head_dim)),
          .mix = mix,
          .q = loads(q, shape.tokens, shape.q_heads),
          .k = loads(k, shape.keys(), shape.kv_heads),
          .v = loads(v, shape.keys(), shape.kv_heads),
          .dout = loads(dout, shape.tokens, shape.q_heads),
          .sinks = sinks,
          .softmax = softmax};
}

QueryRow query_row(const RowProblem& problem, const Place& query) {
  const Pattern& pattern = problem.pattern;
  const auto width = static_cast<std::size_t>(problem.head_dim);
  QueryRow result{.o = SizedRow(width), .dq = SizedRow(width)};
  result.deltas.resize(pattern.branches.size());

  // One softmax over the multiset of all branches' keys.
  std::vector<BranchRow> branches = branch_rows(problem, query);
  double highest = kNegInf;
  for (const BranchRow& row : branches) raise(highest, row.highest);
  const double sink =
      problem.sinks.empty() ? kNegInf : problem.sinks[static_cast<std::size_t>(query.head)];
  const bool sinks = sink != kNegInf;
  if (sinks) raise(highest, sink);
  double keys = 0.0;  // the sum without the sink
  for (const BranchRow& row : branches) keys += row.sum * std::exp(row.highest - highest);
  const double sink_term = sinks ? std::exp(sink - highest) : 0.0;
  const double sum = keys + sink_term;
  const double sink_weight = sinks ? sink_term / sum : 0.0;
  if (!branches.empty() || sinks) result.lse = highest + std::log(sum);
  if (std::isnan(sink_weight)) result.o.multiply(sink_weight);  // also of a row without keys
  const auto probability = [&](const Sized& dot) {
    return std::exp(score_of(problem, dot) - highest) / sum;
  };

  ScoreSizes sizes;
  Row mean_key(width, 0.0);  // sum(P K), for dq
  Row k(width);
  Row v(width);
  for (BranchRow& row : branches) {
    for (std::size_t i = 0; i < row.keys.size(); ++i) {
      const Sized& dot = row.dots[i];
      const double p = probability(dot);
      problem.k(row.keys[i], k);
      problem.v(row.keys[i], v);
      const double weight = kept_of(problem, query, row.keys[i].position);
      result.o.add(weight * p, kOne, v);
      add_scaled(row.o, weight * std::exp(score_of(problem, dot) - row.highest) / row.sum, v);
      add_scaled(mean_key, slope_of(problem, dot) * p, k);
      sizes.add(dot, problem.scale, result.lse, p);
    }
  }
  result.largest_score = sizes.largest();
  const Row merged_o(result.o.value().begin(), result.o.value().end());
  result.o.multiply(pattern.output_scale);
  if (!problem.dout) return result;

  const Row dout = load_dout(problem, query);
  if (sinks && keys != 0.0) result.dsink = product(-sink_weight, sized_dot(dout, merged_o));
  for (const BranchRow& row : branches) {
    Sized& delta = result.deltas[row.branch];
    delta = sized_dot(dout, problem.mix == MixGradient::full ? merged_o : row.o);
    if (sinks && problem.mix == MixGradient::detached)
      delta = difference(delta, product(sink_term / keys, sized_dot(dout, merged_o)));
    for (std::size_t i = 0; i < row.keys.size(); ++i) {
      problem.k(row.keys[i], k);
      problem.v(row.keys[i], v);
      const double weight = kept_of(problem, query, row.keys[i].position);
      const double slope = slope_of(problem, row.dots[i]);
      result.dq.add(slope * probability(row.dots[i]),
                    difference(product(weight, sized_dot(dout, v)), delta), k);
    }
    // Detached mixing has an error of delta per branch; one for all is not less.
    result.dq.add_common(delta.scale, mean_key);
  }
  result.dq.multiply(problem.scale);
  return result;
}

KeyRow key_row(const RowProblem& problem, const Place& key, const StateOf& state_of) {
  const Pattern& pattern = problem.pattern;
  const auto width = static_cast<std::size_t>(problem.head_dim);
  const Row k = load(problem, problem.k, key);
  const Row v = load(problem, problem.v, key);
  KeyRow result{.dk = SizedRow(width), .dv = SizedRow(width)};
  ScoreSizes sizes;
  Row q(width);
  const int ratio = pattern.heads / problem.kv_heads;
  for (int head = key.head * ratio; head < (key.head + 1) * ratio; ++head) {
    for (std::size_t b = 0; b < pattern.branches.size(); ++b) {
      const Branch& branch = pattern.branches[b];
      for_candidates(problem, branch, head, key, Side::queries, [&](std::int64_t position) {
        if (!pattern.allows(branch, head, position, key.position, key.batch)) return;
        const Place query{key.batch, position, head};
        problem.q(query, q);
        const Row dout = load_dout(problem, query);
        const QueryState state = state_of(query, b);
        const Sized dot = sized_dot(q, k);
        const double p = std::exp(score_of(problem, dot) - state.lse);
        sizes.add(dot, problem.scale, state.lse, p);
        const double weight = kept_of(problem, query, key.position);
        result.dv.add(weight * p, kOne, dout);
        result.dk.add(slope_of(problem, dot) * p,
                      difference(product(weight, sized_dot(dout, v)), state.delta), q);
      });
    }
  }
  result.largest_score = sizes.largest();
  result.dk.multiply(problem.scale);
  return result;
}

}  // namespace annulus::reference
