#include "cli/sample_check.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>
#include <vector>

#include "kernels/reference/error.h"
#include "kernels/reference/rows.h"

namespace annulus::cli {
namespace {

// Enough for every branch, offset and rank to occur several times. Fewer if rows are long, so that
// checking takes much less time than computing.
constexpr int kMostRows = 64;
constexpr int kFewestRows = 8;
constexpr double kMultiplyAdds = 4e9;

using reference::Place;
using reference::SizedRow;

struct RowErrors {
  std::optional<SampledError> o, lse, dq, dk, dv;
  bool nonfinite = false;
};

void keep_worse(std::optional<SampledError>& worst, const std::optional<SampledError>& other) {
  if (!other) return;
  // An infinite error is the worst, even where any error is allowed.
  const auto severity = [](const SampledError& error) {
    return std::isinf(error.allowed) ? error.found : error.found / error.allowed;
  };
  if (!worst || (worst->ok() && !other->ok()) ||
      (worst->ok() == other->ok() && severity(*other) > severity(*worst))) {
    worst = other;
  }
}

class Checker {
 public:
  Checker(const RingOptions& options, const JobTensors& tensors)
      : options_(options),
        tensors_(tensors),
        pattern_(options.pattern),
        tokens_(options.placement.tokens()),
        ratio_(options.pattern.heads / options.kv_heads),
        problem_{.pattern = options.pattern,
                 .query_tokens = tokens_,
                 .key_tokens = tokens_,
                 .kv_heads = options.kv_heads,
                 .head_dim = options.head_dim,
                 .scale = options.scale.value_or(1.0 / std::sqrt(options.head_dim)),
                 .mix = options.mix_gradient,
                 .q = loads(tensors.q),
                 .k = loads(tensors.k),
                 .v = loads(tensors.v)} {
    problem_.softmax = {options.softcap, options.dropout_p, tensors.dropout_seed};
    if (options.backward) problem_.dout = loads(tensors.dout);
  }

  // o, lse and dq of one query.
  void check_query(const Place& place, RowErrors& errors) const {
    const reference::QueryRow expected = reference::query_row(problem_, place);
    const std::vector<double> found = load(tensors_.o, place);
    errors.o = judge(found, expected.o, expected.largest_score);
    errors.nonfinite =
        !errors.o && std::any_of(found.begin(), found.end(), [](double x) { return x != x; });
    errors.lse = judge_lse(load_lse(place), expected.lse, expected.largest_score);
    if (!options_.backward) return;
    errors.dq = judge(load(tensors_.dq, place), expected.dq, expected.largest_score);
  }

  // dk and dv of one key; place.head is a key/value head.
  void check_key(const Place& place, RowErrors& errors) const {
    const bool detached = options_.mix_gradient == MixGradient::detached;
    const auto state_of = [&](const Place& query, std::size_t) {
      reference::QueryState state{.lse = load_lse(query)};
      if (!detached) {  // o has the factor output_scale, which delta = dO.O has once
        state.delta = reference::sized_dot(load(tensors_.dout, query), load(tensors_.o, query));
      }
      return state;
    };
    const reference::KeyRow expected = reference::key_row(problem_, place, state_of);
    errors.dv = judge(load(tensors_.dv, place), expected.dv, expected.largest_score);
    if (detached) return;
    errors.dk = judge(load(tensors_.dk, place), expected.dk, expected.largest_score);
  }

  // Rows spread evenly, including the first and the last token, with heads and batch entries in
  // turn. If no branch selects a head there, take the next head, because a row of zeros proves
  // little.
  [[nodiscard]] std::vector<Place> places(int count) const {
    std::vector<Place> places;
    for (int i = 0; i < count; ++i) {
      Place place;
      place.position = count == 1 ? tokens_ - 1 : (tokens_ - 1) * i / (count - 1);
      place.batch = i % options_.batch;
      // Steps of 5 reach all heads unless 5 divides their number; the second term adds a drift.
      for (int attempt = 0; attempt < pattern_.heads; ++attempt) {
        place.head = (i * 5 + i / pattern_.heads + attempt) % pattern_.heads;
        if (std::any_of(pattern_.branches.begin(), pattern_.branches.end(), [&](const Branch& b) {
              return pattern_.allows(b, place.head, place.position, place.position, place.batch);
            })) {
          break;
        }
      }
      places.push_back(place);
    }
    return places;
  }

  // How many rows are affordable if each costs as much as the longest.
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
  [[nodiscard]] std::optional<SampledError> judge(std::span<const double> found,
                                                  const SizedRow& expected, double score) const {
    reference::ErrorMeasure measure;
    measure.add(found, expected, options_.dtype);
    if (measure.empty()) return std::nullopt;
    return SampledError{measure.relative(),
                        reference::allowed_error(options_.dtype, score, measure.cancellation())};
  }

  // A log-sum-exp is fp32 in every dtype. As a logarithm, its error is absolute.
  [[nodiscard]] static std::optional<SampledError> judge_lse(double found, double expected,
                                                             double score) {
    reference::ErrorMeasure measure;
    measure.add(found, expected, 1.0, 1.0, DType::f32);
    if (measure.empty()) return std::nullopt;
    return SampledError{measure.relative(), reference::allowed_error(DType::f32, score, 1.0)};
  }

  [[nodiscard]] reference::RowProblem::Load loads(const RingTensor& tensor) const {
    return [this, &tensor](const Place& place, std::span<double> row) {
      tensor.load_row(place.batch, tensors_.order.index_of(place.position), place.head, row);
    };
  }

  [[nodiscard]] std::vector<double> load(const RingTensor& tensor, const Place& place) const {
    std::vector<double> row(static_cast<std::size_t>(options_.head_dim));
    tensor.load_row(place.batch, tensors_.order.index_of(place.position), place.head, row);
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
  reference::RowProblem problem_;
};

}  // namespace

std::optional<double> SampledErrors::worst() const {
  std::optional<double> worst;
  for (const std::optional<SampledError>& error : {o, dq, dk, dv}) {
    if (error) worst = std::max(worst.value_or(0.0), error->found);
  }
  return worst;
}

std::string SampledErrors::complaint() const {
  std::string text;
  const auto add = [&](const char* name, const std::optional<SampledError>& error) {
    if (!error || error->ok()) return;
    text += fmt::format("{}{} by {:.2g}, at most {:.2g}", text.empty() ? "" : "; ", name,
                        error->found, error->allowed);
  };
  add("o", o);
  add("lse", lse);
  add("dq", dq);
  add("dk", dk);
  add("dv", dv);
  return text;
}

bool SampledErrors::overflowed() const {
  for (const std::optional<SampledError>& error : {o, lse, dq, dk, dv}) {
    if (error && !error->ok() && std::isfinite(error->found)) return false;
  }
  return !complaint().empty();
}

std::string overflowing_products(const RingOptions& options, const JobTensors& tensors) {
  struct Input {
    const char* name;
    double largest;  // that is finite
  };
  const auto input = [&](const char* name, const RingTensor& tensor) {
    const TensorView& view = tensor.view();
    Input found{name, 0.0};
    if (view.data == nullptr) return found;
    std::vector<double> row(static_cast<std::size_t>(view.shape[3]));
    for (std::int64_t batch = 0; batch < view.shape[0]; ++batch) {
      for (std::int64_t token = 0; token < view.shape[1]; ++token) {
        for (int head = 0; head < view.shape[2]; ++head) {
          tensor.load_row(batch, token, head, row);
          for (const double x : row) {
            if (std::isfinite(x)) found.largest = std::max(found.largest, std::abs(x));
          }
        }
      }
    }
    return found;
  };
  const Input q = input("q", tensors.q);
  const Input k = input("k", tensors.k);
  const Input v = input("v", tensors.v);
  const Input dout = input("do", tensors.dout);
  const double scale = options.scale.value_or(1.0 / std::sqrt(options.head_dim));
  const auto too_large = [&](const Input& a, const Input& b, double rest) {
    return a.largest * b.largest * options.head_dim * rest > std::numeric_limits<float>::max();
  };
  const auto text = [&](const Input& a, const Input& b, const char* rest) {
    return fmt::format("{} (up to {:.2g}) times {} (up to {:.2g}), {} of them added{}", a.name,
                       a.largest, b.name, b.largest, options.head_dim, rest);
  };
  if (too_large(q, k, std::max(1.0, scale))) return text(q, k, "");
  if (too_large(dout, v, 1.0)) return text(dout, v, "");
  // A gradient of a score is at most twice that, and multiplied by keys and queries.
  for (const Input& other : {k, q}) {
    if (too_large(dout, v, 2.0 * other.largest * std::max(1.0, scale)))
      return text(dout, v,
                  fmt::format(", times {} (up to {:.2g})", other.name, other.largest).c_str());
  }
  return "";
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

  SampledErrors errors;
  errors.rows = static_cast<int>(places.size());
  for (const RowErrors& row : rows) {
    keep_worse(errors.o, row.o);
    keep_worse(errors.lse, row.lse);
    keep_worse(errors.dq, row.dq);
    keep_worse(errors.dk, row.dk);
    keep_worse(errors.dv, row.dv);
    errors.nonfinite_rows += row.nonfinite ? 1 : 0;
  }
  return errors;
}

}  // namespace annulus::cli
