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

// The effect of a rounded o on the gradients: delta = dO.O changes by some e per row, hence dS by
// -e * P * (the slope of a softcap). Detached mixing rounds the outputs of the branches instead;
// the error of the merged output is of the same size.
//
// The reference computes dQ and dK of dS = slope * P' * (dP - delta) for any dO, V and sinks. With
// a sink, the probabilities P' of a row are w * P and add up to w < 1. Where V is 1 in one element
// and dO is x there, dP is x and delta is x * w: dS is e * P * slope for x = e / (w * (1 - w)).
void round_deltas(const RingOptions& options, const reference::Shape& shape, const Inputs& in,
                  const reference::Output& exact, reference::Gradients& gradients) {
  const Pattern& pattern = options.pattern;
  const Values rounded_o = rounded(exact.o, options.dtype);
  const auto width = static_cast<std::size_t>(shape.head_dim);
  double sink = 0.0;  // among the log-sum-exps, so that both w and 1 - w are exact enough
  double finite = 0.0;
  for (const double lse : exact.lse) {
    if (!std::isfinite(lse)) continue;
    sink += lse;
    finite += 1.0;
  }
  if (finite > 0.0) sink /= finite;
  Values dout(exact.o.size());
  for (std::size_t row = 0; row < exact.lse.size(); ++row) {
    if (!std::isfinite(exact.lse[row])) continue;  // it has no keys, and its o is 0
    double e = 0.0;  // o has the factor output_scale already, which dO would get
    for (std::size_t d = row * width; d < (row + 1) * width; ++d)
      e += in.dout[d] * (rounded_o[d] - exact.o[d]);
    const double w = 1.0 / (1.0 + std::exp(sink - exact.lse[row]));
    const double rest = 1.0 / (1.0 + std::exp(exact.lse[row] - sink));
    dout[row * width] = e / (w * rest * pattern.output_scale);
  }
  Values v(in.v.size());
  for (std::size_t row = 0; row < v.size(); row += width) v[row] = 1.0;
  const Values sinks(static_cast<std::size_t>(shape.q_heads), sink);
  // Delta is subtracted from every pair, whatever dropout does to it.
  const reference::Gradients error =
      reference::backward(pattern, shape, in.q, in.k, v, dout, MixGradient::full, options.scale,
                          sinks, {.softcap = options.softcap});
  for (std::size_t i = 0; i < error.dq.size(); ++i) gradients.dq[i] -= error.dq[i];
  for (std::size_t i = 0; i < error.dk.size(); ++i) gradients.dk[i] -= error.dk[i];
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
  if (narrow) round_deltas(options, shape, in, output, one_piece);

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
