#include "cli/sample_check.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>
#include <vector>

namespace annulus::cli {
namespace {

constexpr double kNegInf = -std::numeric_limits<double>::infinity();

// Enough to meet every branch, offset and rank several times; fewer where rows are long, so that
// checking stays cheap beside computing.
constexpr int kMostRows = 64;
constexpr int kFewestRows = 8;
constexpr double kMultiplyAdds = 4e9;

struct Place {
  std::int64_t batch = 0;
  std::int64_t position = 0;
  int head = 0;
};

// NaN where NaN is due, and equal infinities.
bool same(double a, double b) { return a == b || (std::isnan(a) && std::isnan(b)); }

struct SquaredError {
  double error = 0.0;
  double size = 0.0;

  void add(std::span<const double> found, std::span<const double> expected) {
    for (std::size_t d = 0; d < found.size(); ++d) {
      if (std::isfinite(expected[d])) size += expected[d] * expected[d];
      if (same(found[d], expected[d])) continue;
      error += (found[d] - expected[d]) * (found[d] - expected[d]);
    }
  }
  [[nodiscard]] double relative() const {
    return error == 0.0 ? 0.0 : std::sqrt(error / size);  // infinite if zeros were expected
  }
};

struct RowErrors {
  SquaredError o, dq, dk, dv;
  double lse = 0.0;
  double largest_score = 0.0;

  // Once NaN, always NaN.
  static void raise(double& most, double value) {
    if (!std::isnan(most) && !(value <= most)) most = value;
  }
};

double dot(std::span<const double> a, std::span<const double> b) {
  double sum = 0.0;
  for (std::size_t d = 0; d < a.size(); ++d) sum += a[d] * b[d];
  return sum;
}

void add_scaled(std::span<double> into, double weight, std::span<const double> from) {
  for (std::size_t d = 0; d < into.size(); ++d) into[d] += weight * from[d];
}

class Checker {
 public:
  Checker(const RingOptions& options, const JobTensors& tensors)
      : options_(options),
        tensors_(tensors),
        pattern_(options.pattern),
        tokens_(options.placement.tokens()),
        ratio_(options.pattern.heads / options.kv_heads),
        scale_(options.scale.value_or(1.0 / std::sqrt(options.head_dim))) {}

  // o, lse and dq of one query.
  void check_query(const Place& place, RowErrors& errors) const {
    const int kv = place.head / ratio_;
    const Row q = load(tensors_.q, place);
    struct BranchRow {
      RowSet keys;
      Row scores;
      double lse = kNegInf;
      Row o;
    };
    std::vector<BranchRow> branches;
    double highest = kNegInf;
    for (const Branch& branch : pattern_.branches) {
      if (!branch.selects(place.head, place.position)) continue;
      BranchRow row{
          selected(branch, place, pattern_.causal ? Side::until : Side::all), {}, kNegInf, zeros()};
      for (std::int64_t i = 0; i < row.keys.count; ++i) {
        const double score = scale_ * dot(q, load(tensors_.k, {place.batch, row.keys[i], kv}));
        row.scores.push_back(score);
        RowErrors::raise(errors.largest_score, std::fabs(score));
        RowErrors::raise(highest, score);
      }
      branches.push_back(std::move(row));
    }

    // One softmax over the multiset of all branches' keys.
    double sum = 0.0;
    for (BranchRow& row : branches) {
      double branch_sum = 0.0;
      for (std::int64_t i = 0; i < row.keys.count; ++i) {
        const double p = std::exp(row.scores[static_cast<std::size_t>(i)] - highest);
        branch_sum += p;
        add_scaled(row.o, p, load(tensors_.v, {place.batch, row.keys[i], kv}));
      }
      row.lse = highest + std::log(branch_sum);
      sum += branch_sum;
      for (double& x : row.o) x /= branch_sum;  // a selected query attends at least itself
    }
    const double lse = branches.empty() ? kNegInf : highest + std::log(sum);
    Row o = zeros();
    for (const BranchRow& row : branches) add_scaled(o, std::exp(row.lse - lse), row.o);

    const double found_lse = load_lse(place);
    if (!same(found_lse, lse)) RowErrors::raise(errors.lse, std::fabs(found_lse - lse));
    Row scaled_o = zeros();
    add_scaled(scaled_o, pattern_.output_scale, o);
    errors.o.add(load(tensors_.o, place), scaled_o);
    if (!options_.backward) return;

    const Row dout = load_dout(place);
    Row dq = zeros();
    for (const BranchRow& row : branches) {
      const double delta = dot(dout, options_.mix_gradient == MixGradient::full ? o : row.o);
      for (std::int64_t i = 0; i < row.keys.count; ++i) {
        const Place key{place.batch, row.keys[i], kv};
        const double p = std::exp(row.scores[static_cast<std::size_t>(i)] - lse);
        const double dp = dot(dout, load(tensors_.v, key));
        add_scaled(dq, scale_ * p * (dp - delta), load(tensors_.k, key));
      }
    }
    errors.dq.add(load(tensors_.dq, place), dq);
  }

  // dk and dv of one key; place.head is a key/value head.
  void check_key(const Place& place, RowErrors& errors) const {
    const Row k = load(tensors_.k, place);
    const Row v = load(tensors_.v, place);
    Row dk = zeros();
    Row dv = zeros();
    for (int head = place.head * ratio_; head < (place.head + 1) * ratio_; ++head) {
      for (const Branch& branch : pattern_.branches) {
        if (!branch.selects(head, place.position)) continue;
        const RowSet queries = selected(branch, {place.batch, place.position, head},
                                        pattern_.causal ? Side::from : Side::all);
        for (std::int64_t i = 0; i < queries.count; ++i) {
          const Place query{place.batch, queries[i], head};
          const Row q = load(tensors_.q, query);
          const Row dout = load_dout(query);
          const double p = std::exp(scale_ * dot(q, k) - load_lse(query));
          add_scaled(dv, p, dout);
          if (options_.mix_gradient == MixGradient::detached) continue;
          const double delta = dot(dout, load(tensors_.o, query)) / pattern_.output_scale;
          add_scaled(dk, scale_ * p * (dot(dout, v) - delta), q);
        }
      }
    }
    errors.dv.add(load(tensors_.dv, place), dv);
    if (options_.mix_gradient == MixGradient::full) errors.dk.add(load(tensors_.dk, place), dk);
  }

  // Rows evenly spread, first and last token included, heads and batch entries in turn. Where no
  // branch selects the head, the next head is tried: rows of zeros prove little.
  [[nodiscard]] std::vector<Place> places(int count) const {
    std::vector<Place> places;
    for (int i = 0; i < count; ++i) {
      Place place;
      place.position = count == 1 ? tokens_ - 1 : (tokens_ - 1) * i / (count - 1);
      place.batch = i % options_.batch;
      // Steps of 5 heads meet all of them unless 5 divides their number; a drift sees to that.
      for (int attempt = 0; attempt < pattern_.heads; ++attempt) {
        place.head = (i * 5 + i / pattern_.heads + attempt) % pattern_.heads;
        if (std::any_of(pattern_.branches.begin(), pattern_.branches.end(),
                        [&](const Branch& b) { return b.selects(place.head, place.position); })) {
          break;
        }
      }
      places.push_back(place);
    }
    return places;
  }

  // How many rows are affordable: by the longest row there can be.
  [[nodiscard]] int affordable_rows() const {
    double keys = 0.0;
    for (const Branch& branch : pattern_.branches) {
      keys += static_cast<double>(std::min(branch.segment_length, tokens_)) /
              static_cast<double>(branch.dilation);
    }
    const double row = keys * options_.head_dim * (options_.backward ? 4.0 + 4.0 * ratio_ : 2.0);
    const auto rows = static_cast<int>(
        std::clamp(kMultiplyAdds / std::max(row, 1.0), double{kFewestRows}, double{kMostRows}));
    return static_cast<int>(std::min<std::int64_t>(rows, tokens_ * pattern_.heads));
  }

 private:
  using Row = std::vector<double>;
  enum class Side : std::uint8_t { all, until, from };  // relative to the place, which is included

  // The positions that a branch selects in the segment of a selected place.
  [[nodiscard]] RowSet selected(const Branch& branch, const Place& place, Side side) const {
    const std::int64_t begin = place.position - place.position % branch.segment_length;
    const std::int64_t length = std::min(branch.segment_length, tokens_ - begin);
    const std::int64_t offset = branch.offset[static_cast<std::size_t>(place.head)];
    const RowSet rows{begin + offset, (length - offset - 1) / branch.dilation + 1, branch.dilation};
    return clip(rows, side == Side::from ? place.position : begin,
                side == Side::until ? place.position + 1 : begin + length);
  }

  [[nodiscard]] Row zeros() const { return Row(static_cast<std::size_t>(options_.head_dim), 0.0); }

  [[nodiscard]] Row load(const RingTensor& tensor, const Place& place) const {
    Row row = zeros();
    tensor.load_row(place.batch, tensors_.order.index_of(place.position), place.head, row);
    return row;
  }

  // output_scale acts on gradients before everything else.
  [[nodiscard]] Row load_dout(const Place& place) const {
    Row row = load(tensors_.dout, place);
    for (double& x : row) x *= pattern_.output_scale;
    return row;
  }

  [[nodiscard]] double load_lse(const Place& place) const {
    double value = 0.0;
    tensors_.lse.load_row(place.batch, tensors_.order.index_of(place.position), place.head,
                          std::span(&value, 1));
    return value;
  }

  const RingOptions& options_;
  const JobTensors& tensors_;
  const Pattern& pattern_;
  const std::int64_t tokens_;
  const int ratio_;
  const double scale_;
};

}  // namespace

double SampledErrors::worst() const {
  double worst = o;
  for (const std::optional<double>& error : {dq, dk, dv}) {
    if (error) RowErrors::raise(worst, *error);
  }
  return worst;
}

std::optional<double> SampledErrors::tolerance(DType dtype, double largest_score) {
  constexpr double kOrdinaryScores = 30.0;
  if (!(largest_score <= kOrdinaryScores)) return std::nullopt;
  // Ten times and more what is seen: this finds wrong results, `annulus verify` measures them.
  return dtype == DType::f32 ? 2e-5 : dtype == DType::f16 ? 1e-2 : 5e-2;
}

SampledErrors check_sampled_rows(const RingOptions& options, const JobTensors& tensors,
                                 ThreadPool& pool) {
  const Checker checker(options, tensors);
  const std::vector<Place> places = checker.places(checker.affordable_rows());
  std::vector<RowErrors> rows(places.size());
  pool.run_parallel(static_cast<std::int64_t>(places.size()), [&](std::int64_t i, int) {
    RowErrors& errors = rows[static_cast<std::size_t>(i)];
    Place place = places[static_cast<std::size_t>(i)];
    checker.check_query(place, errors);
    if (!options.backward) return;
    place.head /= options.pattern.heads / options.kv_heads;
    checker.check_key(place, errors);
  });

  RowErrors sum;
  const auto add = [](SquaredError& into, const SquaredError& from) {
    into.error += from.error;
    into.size += from.size;
  };
  for (const RowErrors& row : rows) {
    add(sum.o, row.o);
    add(sum.dq, row.dq);
    add(sum.dk, row.dk);
    add(sum.dv, row.dv);
    RowErrors::raise(sum.lse, row.lse);
    RowErrors::raise(sum.largest_score, row.largest_score);
  }
  SampledErrors errors;
  errors.rows = static_cast<int>(places.size());
  errors.o = sum.o.relative();
  errors.lse = sum.lse;
  errors.largest_score = sum.largest_score;
  if (!options.backward) return errors;
  errors.dq = sum.dq.relative();
  errors.dv = sum.dv.relative();
  if (options.mix_gradient == MixGradient::full) errors.dk = sum.dk.relative();
  return errors;
}

}  // namespace annulus::cli
