#include "cli/oracle_check.h"

#include <algorithm>
#include <cmath>
#include <span>

#include "annulus/half.h"
#include "annulus/reference.h"
#include "cli/job.h"
#include "kernels/reference/scales.h"

namespace annulus::cli {
namespace {

constexpr double kTolerance = 1e-6;     // fp32
constexpr double kGpuTolerance = 2e-6;  // fp32
constexpr double kLseTolerance = 2e-6;  // fp32 whatever the dtype
constexpr double kRoundings = 2.0;      // 16 bit: times the error of rounding alone
// The least limit, for gradients that are zero or exactly representable. A typical rounding error
// is 0.4 of half a unit in the last place of the result, and the scale is two to three times the
// result.
constexpr double kLeastRounding = 0.1;

using Values = std::vector<double>;

// All of a tensor in the order of the sequence.
Values in_sequence(const RingTensor& tensor, const TokenOrder& order) {
  const TensorView& view = tensor.view();
  const auto row = static_cast<std::size_t>(view.stride[1]);
  Values values(static_cast<std::size_t>(view.elements()));
  for (std::int64_t batch = 0; batch < view.shape[0]; ++batch) {
    for (std::int64_t t = 0; t < view.shape[1]; ++t) {
      const auto at = static_cast<std::size_t>(batch * view.shape[1] + t) * row;
      tensor.load_row(batch, order.index_of(t), 0, std::span(values).subspan(at, row));
    }
  }
  return values;
}

Values rounded(Values values, DType dtype) {
  for (double& value : values) {
    const auto narrow = static_cast<float>(value);
    value = dtype == DType::f32    ? narrow
            : dtype == DType::bf16 ? bf16_to_float(float_to_bf16(narrow))
                                   : f16_to_float(float_to_f16(narrow));
  }
  return values;
}

// Root mean square of the finite values.
double rms(const Values& values) {
  double sum = 0.0;
  double count = 0.0;
  for (const double x : values) {
    if (!std::isfinite(x)) continue;
    sum += x * x;
    count += 1.0;
  }
  return count > 0.0 ? std::sqrt(sum / count) : 0.0;
}

double rms_difference(const Values& a, const Values& b) {
  double sum = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (a[i] == b[i]) continue;  // infinities: their difference is NaN
    sum += (a[i] - b[i]) * (a[i] - b[i]);
  }
  return a.empty() ? 0.0 : std::sqrt(sum / static_cast<double>(a.size()));
}

struct Inputs {
  Values q, k, v, dout;
};

// The effect of a rounded o on the gradients: delta = dO.O changes by some e per row, hence dQ by
// -e * scale * sum_k P K, which is an output with K in place of V, and dK by -scale * sum_q P e Q,
// which is a dV with scale * e * Q in place of dO. Detached mixing rounds the outputs of the
// branches instead; the error of the merged output is of the same size.
void round_deltas(const RingOptions& options, const reference::Shape& shape, const Inputs& in,
                  const Values& exact_o, reference::Gradients& gradients) {
  const Pattern& pattern = options.pattern;
  const double scale = options.scale.value_or(1.0 / std::sqrt(options.head_dim));
  const Values rounded_o = rounded(exact_o, options.dtype);
  const auto width = static_cast<std::size_t>(shape.head_dim);
  Values e(exact_o.size());  // per row, repeated for all of its elements
  Values seed(exact_o.size());
  for (std::size_t row = 0; row < e.size(); row += width) {
    double sum = 0.0;  // o has the factor output_scale already, dO would get it
    for (std::size_t d = row; d < row + width; ++d) {
      sum += in.dout[d] * (rounded_o[d] - exact_o[d]);
    }
    for (std::size_t d = row; d < row + width; ++d) {
      e[d] = sum;
      seed[d] = scale * sum * in.q[d] / pattern.output_scale;
    }
  }
  // Delta is subtracted from every pair, whatever dropout does to it.
  const reference::SoftmaxOptions softmax{.softcap = options.softcap};
  const Values keys =
      reference::forward(pattern, shape, in.q, in.k, in.k, options.scale, {}, softmax).o;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    gradients.dq[i] -= scale * e[i] * keys[i] / pattern.output_scale;
  }
  const Values dk = reference::backward(pattern, shape, in.q, in.k, in.v, seed, MixGradient::full,
                                        options.scale, {}, softmax)
                        .dv;
  for (std::size_t i = 0; i < dk.size(); ++i) gradients.dk[i] -= dk[i];
}

}  // namespace

OracleCheck::OracleCheck(const RingOptions& options, std::uint64_t seed, World* world)
    : seed_(seed), world_(world) {
  if (world_ != nullptr && !world_->leads()) return;
  RingOptions one = options;
  one.placement = Placement::contiguous(options.placement.tokens(), 1);
  one.backward = true;
  JobTensors tensors(one);
  fill_synthetic(tensors, 0, seed, *ThreadPool::shared());
  const auto values = [&](const RingTensor& tensor) { return in_sequence(tensor, tensors.order); };
  const Inputs in{values(tensors.q), values(tensors.k), values(tensors.v), values(tensors.dout)};
  const reference::Shape shape{.batch = options.batch,
                               .tokens = options.placement.tokens(),
                               .q_heads = options.pattern.heads,
                               .kv_heads = options.kv_heads,
                               .head_dim = options.head_dim};
  const Pattern& pattern = options.pattern;
  const reference::SoftmaxOptions softmax{options.softcap, options.dropout_p, seed};
  const reference::Output output =
      reference::forward(pattern, shape, in.q, in.k, in.v, options.scale, {}, softmax);
  const reference::Gradients exact = reference::backward(
      pattern, shape, in.q, in.k, in.v, in.dout, options.mix_gradient, options.scale, {}, softmax);
  reference::Gradients one_piece = exact;
  const bool narrow = options.dtype != DType::f32;
  if (narrow) round_deltas(options, shape, in, output.o, one_piece);

  lse_ = {output.lse, std::max(1.0, rms(output.lse)), kLseTolerance};
  const reference::Scales scales = reference::error_scales(
      pattern, shape, in.q, in.k, in.v, in.dout, options.mix_gradient, options.scale, {}, softmax);
  const auto expected = [&](const Values& right, const Values& piece, const Values& scale) {
    Expected result{right, rms(scale),
                    options.device.kind == Device::Kind::cpu ? kTolerance : kGpuTolerance};
    if (!narrow || result.unit == 0.0) return result;
    const double least = kLeastRounding * (options.dtype == DType::bf16 ? 0x1p-8 : 0x1p-11);
    result.allowed =
        kRoundings *
        std::max(rms_difference(rounded(piece, options.dtype), right) / result.unit, least);
    return result;
  };
  o_ = expected(output.o, output.o, scales.o);
  dq_ = expected(exact.dq, one_piece.dq, scales.dq);
  dk_ = expected(exact.dk, one_piece.dk, scales.dk);
  dv_ = expected(exact.dv, one_piece.dv, scales.dv);
}

Deviation OracleCheck::compare(const char* name, const JobTensors& tensors, const RingTensor& found,
                               const Expected& expected) {
  const double difference = rms_difference(in_sequence(found, tensors.order), expected.values);
  return {.tensor = name,
          .found = difference == 0.0 ? 0.0 : difference / expected.unit,
          .allowed = expected.allowed};
}

OracleCheck::Outcome OracleCheck::run(const RingOptions& options) const {
  JobTensors tensors(options);
  tensors.dropout_seed = seed_;
  JobSettings settings;
  settings.world = world_;
  settings.prepare = [&](int rank, ThreadPool& pool) {
    fill_synthetic(tensors, rank, seed_, pool);
  };
  Outcome outcome;
  outcome.kernels = run_job(options, tensors, settings).kernels;
  if (world_ != nullptr && !world_->leads()) return outcome;
  std::vector<Deviation>& deviations = outcome.deviations;
  deviations = {compare("o", tensors, tensors.o, o_), compare("lse", tensors, tensors.lse, lse_)};
  if (!options.backward) return outcome;
  deviations.push_back(compare("dq", tensors, tensors.dq, dq_));
  deviations.push_back(compare("dk", tensors, tensors.dk, dk_));
  deviations.push_back(compare("dv", tensors, tensors.dv, dv_));
  return outcome;
}

}  // namespace annulus::cli
