#include "cli/oracle_check.h"

#include <cmath>
#include <limits>

#include "annulus/half.h"
#include "cli/job.h"

namespace annulus::cli {
namespace {

constexpr double kFp32Tolerance = 2e-6;
// 16-bit results may be off by twice what rounding the exact ones costs.
constexpr double kRoundings = 2.0;
// lse is fp32 whatever the dtype, but 16-bit kernels may use a cheaper exponential for it.
constexpr double kNarrowLseTolerance = 1e-5;

// All of a tensor in the order of the sequence.
std::vector<double> in_sequence(const RingTensor& tensor, const TokenOrder& order) {
  const TensorView& view = tensor.view();
  const auto row = static_cast<std::size_t>(view.stride[1]);
  std::vector<double> values(static_cast<std::size_t>(view.elements()));
  for (std::int64_t batch = 0; batch < view.shape[0]; ++batch) {
    for (std::int64_t t = 0; t < view.shape[1]; ++t) {
      const auto at = static_cast<std::size_t>(batch * view.shape[1] + t) * row;
      tensor.load_row(batch, order.index_of(t), 0, std::span(values).subspan(at, row));
    }
  }
  return values;
}

double rounded(double value, DType dtype) {
  const auto narrow = static_cast<float>(value);
  if (dtype == DType::f32) return narrow;
  return dtype == DType::bf16 ? bf16_to_float(float_to_bf16(narrow))
                              : f16_to_float(float_to_f16(narrow));
}

template <typename Found>
double relative_rms(const std::vector<double>& expected, const Found& found) {
  double error = 0.0;
  double size = 0.0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const double x = found(i);
    if (x == expected[i]) {  // equal infinities, too: their difference is NaN
      if (std::isfinite(x)) size += x * x;
      continue;
    }
    error += (x - expected[i]) * (x - expected[i]);
    size += expected[i] * expected[i];
  }
  if (error == 0.0) return 0.0;
  return std::sqrt(error / size);  // infinite if zeros were expected
}

}  // namespace

OracleCheck::OracleCheck(const RingOptions& options, std::uint64_t seed)
    : seed_(seed), dtype_(options.dtype) {
  RingOptions one = options;
  one.placement = Placement::contiguous(options.placement.tokens(), 1);
  JobTensors tensors(one);
  fill_synthetic(tensors, 0, seed, *ThreadPool::shared());
  const auto values = [&](const RingTensor& tensor) { return in_sequence(tensor, tensors.order); };
  const reference::Shape shape{.batch = options.batch,
                               .tokens = options.placement.tokens(),
                               .q_heads = options.pattern.heads,
                               .kv_heads = options.kv_heads,
                               .head_dim = options.head_dim};
  const std::vector<double> q = values(tensors.q);
  const std::vector<double> k = values(tensors.k);
  const std::vector<double> v = values(tensors.v);
  output_ = reference::forward(options.pattern, shape, q, k, v, options.scale);
  if (!options.backward) return;
  gradients_ = reference::backward(options.pattern, shape, q, k, v, values(tensors.dout),
                                   options.mix_gradient, options.scale);
}

Deviation OracleCheck::compare(const char* name, const JobTensors& tensors, const RingTensor& found,
                               const std::vector<double>& expected) const {
  const std::vector<double> values = in_sequence(found, tensors.order);
  Deviation deviation{.tensor = name, .found = 0.0, .allowed = kFp32Tolerance};
  deviation.found = relative_rms(expected, [&](std::size_t i) { return values[i]; });
  if (dtype_ == DType::f32) return deviation;
  deviation.allowed =
      found.view().dtype == DType::f32
          ? kNarrowLseTolerance
          : kRoundings *
                relative_rms(expected, [&](std::size_t i) { return rounded(expected[i], dtype_); });
  return deviation;
}

std::vector<Deviation> OracleCheck::run(const RingOptions& options) const {
  JobTensors tensors(options);
  JobSettings settings;
  settings.prepare = [&](int rank, ThreadPool& pool) { fill_synthetic(tensors, rank, seed_, pool); };
  (void)run_job(options, tensors, settings);
  std::vector<Deviation> deviations = {compare("o", tensors, tensors.o, output_.o),
                                       compare("lse", tensors, tensors.lse, output_.lse)};
  if (!options.backward) return deviations;
  deviations.push_back(compare("dq", tensors, tensors.dq, gradients_.dq));
  deviations.push_back(compare("dk", tensors, tensors.dk, gradients_.dk));
  deviations.push_back(compare("dv", tensors, tensors.dv, gradients_.dv));
  return deviations;
}

}  // namespace annulus::cli
