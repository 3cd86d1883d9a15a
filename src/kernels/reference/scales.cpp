#include "kernels/reference/scales.h"

#include <cmath>
#include <cstdint>
#include <limits>

#include "kernels/reference/error.h"

namespace annulus::reference {
namespace {

constexpr Sized kOne{.value = 1.0, .scale = 1.0, .absolute = 1.0};

struct Pair {
  std::int64_t key;
  double score;
};

void copy_scales(const SizedRow& row, std::span<double> out) {
  for (std::size_t d = 0; d < out.size(); ++d) out[d] = row.scale(d);
}

}  // namespace

Scales error_scales(const Pattern& pattern, const Shape& shape, std::span<const double> q,
                    std::span<const double> k, std::span<const double> v,
                    std::span<const double> dout, MixGradient mix,
                    std::optional<double> given_scale) {
  const double scale = given_scale.value_or(1.0 / std::sqrt(shape.head_dim));
  const auto width = static_cast<std::size_t>(shape.head_dim);
  const int ratio = shape.q_heads / shape.kv_heads;
  const auto row_of = [&](std::int64_t batch, std::int64_t token, int head, int heads) {
    return static_cast<std::size_t>((batch * shape.tokens + token) * heads + head);
  };
  const auto at = [&](auto tensor, std::size_t row) { return tensor.subspan(row * width, width); };

  Scales scales{.o = std::vector<double>(q.size()),
                .dq = std::vector<double>(q.size()),
                .dk = std::vector<double>(k.size()),
                .dv = std::vector<double>(k.size())};
  std::vector<SizedRow> dk(k.size() / width, SizedRow(width));
  std::vector<SizedRow> dv = dk;
  for (std::int64_t batch = 0; batch < shape.batch; ++batch) {
    for (std::int64_t token = 0; token < shape.tokens; ++token) {
      for (int head = 0; head < shape.q_heads; ++head) {
        const std::size_t row = row_of(batch, token, head, shape.q_heads);
        const auto key_row = [&](std::int64_t key) {
          return row_of(batch, key, head / ratio, shape.kv_heads);
        };
        std::vector<std::vector<Pair>> branches;
        double highest = -std::numeric_limits<double>::infinity();
        for (const Branch& branch : pattern.branches) {
          std::vector<Pair>& pairs = branches.emplace_back();
          for (std::int64_t key = 0; key < shape.tokens; ++key) {
            if (!pattern.allows(branch, head, token, key)) continue;
            pairs.push_back({key, scale * sized_dot(at(q, row), at(k, key_row(key))).value});
            highest = std::fmax(highest, pairs.back().score);
          }
        }
        double sum = 0.0;
        for (const auto& pairs : branches) {
          for (const Pair& pair : pairs) sum += std::exp(pair.score - highest);
        }

        SizedRow o(width);
        SizedRow mean_key(width);
        std::vector<SizedRow> branch_o(branches.size(), SizedRow(width));
        for (std::size_t b = 0; b < branches.size(); ++b) {
          double branch_sum = 0.0;
          for (const Pair& pair : branches[b]) branch_sum += std::exp(pair.score - highest);
          for (const Pair& pair : branches[b]) {
            const double weight = std::exp(pair.score - highest);
            o.add(weight / sum, kOne, at(v, key_row(pair.key)));
            mean_key.add(weight / sum, kOne, at(k, key_row(pair.key)));
            branch_o[b].add(weight / branch_sum, kOne, at(v, key_row(pair.key)));
          }
        }
        std::vector<double> d_o(width);
        for (std::size_t d = 0; d < width; ++d) d_o[d] = pattern.output_scale * at(dout, row)[d];

        SizedRow dq(width);
        for (std::size_t b = 0; b < branches.size(); ++b) {
          const Sized delta =
              sized_dot(d_o, mix == MixGradient::full ? o.value() : branch_o[b].value());
          for (const Pair& pair : branches[b]) {
            const std::size_t key = key_row(pair.key);
            const double p = std::exp(pair.score - highest) / sum;
            const Sized dp = sized_dot(d_o, at(v, key));
            const Sized difference{dp.value - delta.value, dp.scale + delta.scale,
                                   dp.absolute + delta.absolute};
            dq.add(p, difference, at(k, key));
            dk[key].add(p, difference, at(q, row));
            dv[key].add(p, kOne, d_o);
          }
          if (!branches[b].empty()) dq.add_common(delta.scale, mean_key.value());
        }
        dq.multiply(scale);
        o.multiply(pattern.output_scale);
        copy_scales(o, at(std::span(scales.o), row));
        copy_scales(dq, at(std::span(scales.dq), row));
      }
    }
  }
  for (std::size_t row = 0; row < dk.size(); ++row) {
    dk[row].multiply(scale);
    copy_scales(dk[row], at(std::span(scales.dk), row));
    copy_scales(dv[row], at(std::span(scales.dv), row));
  }
  return scales;
}

}  // namespace annulus::reference
