#include "cli/sample_check.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>
#include <vector>

#include "kernels/reference/error.h"

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

// Keeps the worst of all rows. Once NaN, always NaN.
void raise(double& most, double value) {
  if (!std::isnan(most) && !(value <= most)) most = value;
}

struct RowErrors {
  std::optional<SampledError> o, lse, dq, dk, dv;
  bool nonfinite = false;
};

void keep_worse(std::optional<SampledError>& worst, const std::optional<SampledError>& other) {
  if (!other) return;
  // An infinite error is the worst even where fp32 cannot tell and any is allowed.
  const auto severity = [](const SampledError& error) {
    return std::isinf(error.allowed) ? error.found : error.found / error.allowed;
  };
  if (!worst || (worst->ok() && !other->ok()) ||
      (worst->ok() == other->ok() && severity(*other) > severity(*worst))) {
    worst = other;
  }
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
      std::vector<Sized> dots;  // q.k, without scale
      double highest = kNegInf;
      double sum = 0.0;  // of exp(score - highest)
      Row o;
    };
    std::vector<BranchRow> branches;
    double highest = kNegInf;
    for (const Branch& branch : pattern_.branches) {
      if (!branch.selects(place.head, place.position)) continue;
      BranchRow row;
      row.keys = partners(branch, place, Role::query);
      row.o = zeros();
      for (std::int64_t i = 0; i < row.keys.count; ++i) {
        row.dots.push_back(
            reference::sized_dot(q, load(tensors_.k, {place.batch, row.keys[i], kv})));
        raise(row.highest, scale_ * row.dots.back().value);
      }
      raise(highest, row.highest);
      branches.push_back(std::move(row));
    }

    // One softmax over the multiset of all branches' keys.
    double sum = 0.0;
    for (BranchRow& row : branches) {
      for (const Sized& dot : row.dots) row.sum += std::exp(scale_ * dot.value - row.highest);
      sum += row.sum * std::exp(row.highest - highest);
    }
    const double lse = branches.empty() ? kNegInf : highest + std::log(sum);
    SizedRow o(width());
    Row mean_key = zeros();  // sum(P K), for dq
    reference::ScoreSizes sizes;
    for (BranchRow& row : branches) {
      for (std::int64_t i = 0; i < row.keys.count; ++i) {
        const Place key{place.batch, row.keys[i], kv};
        const Sized& dot = row.dots[static_cast<std::size_t>(i)];
        const double p = std::exp(scale_ * dot.value - highest) / sum;
        const double branch_p = std::exp(scale_ * dot.value - row.highest) / row.sum;
        const Row v = load(tensors_.v, key);
        o.add(p, kOne, v);
        add_scaled(row.o, branch_p, v);
        add_scaled(mean_key, p, load(tensors_.k, key));
        sizes.add(dot, scale_, lse, p);
      }
    }
    const double largest_score = sizes.largest();
    const Row merged_o(o.value().begin(), o.value().end());
    o.multiply(pattern_.output_scale);
    const Row found = load(tensors_.o, place);
    errors.o = judge(found, o, largest_score);
    errors.nonfinite =
        !errors.o && std::any_of(found.begin(), found.end(), [](double x) { return x != x; });
    errors.lse = judge_lse(load_lse(place), lse, largest_score);
    if (!options_.backward) return;

    const Row dout = load_dout(place);
    SizedRow dq(width());
    for (const BranchRow& row : branches) {
      const Sized delta =
          reference::sized_dot(dout, options_.mix_gradient == MixGradient::full ? merged_o : row.o);
      for (std::int64_t i = 0; i < row.keys.count; ++i) {
        const Place key{place.batch, row.keys[i], kv};
        const double score = scale_ * row.dots[static_cast<std::size_t>(i)].value;
        const Sized dp = reference::sized_dot(dout, load(tensors_.v, key));
        dq.add(std::exp(score - lse), difference(dp, delta), load(tensors_.k, key));
      }
      // Detached mixing has an error of delta per branch; one for all is not less.
      dq.add_common(delta.scale, mean_key);
    }
    dq.multiply(scale_);
    errors.dq = judge(load(tensors_.dq, place), dq, largest_score);
  }

  // dk and dv of one key; place.head is a key/value head.
  void check_key(const Place& place, RowErrors& errors) const {
    const Row k = load(tensors_.k, place);
    const Row v = load(tensors_.v, place);
    SizedRow dk(width());
    SizedRow dv(width());
    reference::ScoreSizes sizes;
    for (int head = place.head * ratio_; head < (place.head + 1) * ratio_; ++head) {
      for (const Branch& branch : pattern_.branches) {
        if (!branch.selects(head, place.position)) continue;
        const RowSet queries = partners(branch, {place.batch, place.position, head}, Role::key);
        for (std::int64_t i = 0; i < queries.count; ++i) {
          const Place query{place.batch, queries[i], head};
          const Row q = load(tensors_.q, query);
          const Row dout = load_dout(query);
          const double lse = load_lse(query);
          const Sized dot = reference::sized_dot(q, k);
          const double p = std::exp(scale_ * dot.value - lse);
          sizes.add(dot, scale_, lse, p);
          dv.add(p, kOne, dout);
          if (options_.mix_gradient == MixGradient::detached) continue;
          Row o = load(tensors_.o, query);
          for (double& x : o) x /= pattern_.output_scale;
          dk.add(p, difference(reference::sized_dot(dout, v), reference::sized_dot(dout, o)), q);
        }
      }
    }
    const double largest_score = sizes.largest();
    errors.dv = judge(load(tensors_.dv, place), dv, largest_score);
    if (options_.mix_gradient == MixGradient::detached) return;
    dk.multiply(scale_);
    errors.dk = judge(load(tensors_.dk, place), dk, largest_score);
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
  using Sized = reference::Sized;
  using SizedRow = reference::SizedRow;
  static constexpr Sized kOne{.value = 1.0, .scale = 1.0, .absolute = 1.0};
  enum class Role : std::uint8_t { query, key };

  // The keys that a selected query sees in a branch, or the queries that see a selected key.
  [[nodiscard]] RowSet partners(const Branch& branch, const Place& place, Role role) const {
    const std::int64_t begin = place.position - place.position % branch.segment_length;
    const std::int64_t length = std::min(branch.segment_length, tokens_ - begin);
    const std::int64_t offset = branch.offset[static_cast<std::size_t>(place.head)];
    const RowSet rows{begin + offset, (length - offset - 1) / branch.dilation + 1, branch.dilation};
    const Band band = pattern_.band();
    const Stretch own{place.position, place.position};
    const Stretch seen = role == Role::query ? band.keys_of(own) : band.queries_of(own);
    return clip(rows, seen.first, seen.last + 1);
  }

  [[nodiscard]] std::size_t width() const { return static_cast<std::size_t>(options_.head_dim); }

  static Sized difference(const Sized& a, const Sized& b) {
    return {a.value - b.value, a.scale + b.scale, a.absolute + b.absolute};
  }

  [[nodiscard]] std::optional<SampledError> judge(std::span<const double> found,
                                                  const SizedRow& expected, double score) const {
    reference::ErrorMeasure measure;
    measure.add(found, expected, options_.dtype);
    if (measure.empty()) return std::nullopt;
    return SampledError{measure.relative(),
                        reference::allowed_error(options_.dtype, score, measure.cancellation())};
  }

  // A log-sum-exp is fp32 whatever the dtype, and a logarithm: 1 is its unit.
  [[nodiscard]] static std::optional<SampledError> judge_lse(double found, double expected,
                                                             double score) {
    reference::ErrorMeasure measure;
    measure.add(found, expected, 1.0, 1.0, DType::f32);
    if (measure.empty()) return std::nullopt;
    return SampledError{measure.relative(), reference::allowed_error(DType::f32, score, 1.0)};
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
