#include <cmath>

#include "kernels/cuda/rows/access.cuh"
#include "kernels/cuda/rows/kept.cuh"
#include "kernels/cuda/rows/kernels.h"
#include "kernels/cuda/rows/sink.cuh"

// Gradients of sinks: -sum(exp(sink - L') dO.O'). The order of the sums depends only on the number
// of rows; rows are added in double precision.
namespace annulus::cuda {
namespace {

// A row's term of the gradient, divided by -output_scale, from its statistics. With detached
// mixing, also subtracts the sink's part from the deltas of branches; see CpuEngine::take_sink for
// the derivation.
__device__ float take_sink(const SinkParams& p, float sink, std::int64_t batch, std::int64_t token,
                           int head) {
  auto* const row = reinterpret_cast<float*>(row_at(p.statistics, batch, token, head));
  const float lse = row[0];
  if (p.kept.branches == 0) {
    const float delta = row[1];
    // A row without keys has O = 0, so its term is 0 even if dO is not finite.
    return lse == sink && !isfinite(delta) ? 0.0F : expf(sink - lse) * delta;
  }
  float highest = -INFINITY;
  const auto lse_of = [&](int branch) {
    const std::int64_t at = kept_row(p.kept, branch, batch, head, token);
    return at < 0 ? -INFINITY : p.branch_lse[at];
  };
  for (int branch = 0; branch < p.kept.branches; ++branch) highest = fmaxf(highest, lse_of(branch));
  if (highest == -INFINITY) return 0;
  if (isnan(lse)) return NAN;
  double keys = 0;
  double sum = 0;
  for (int branch = 0; branch < p.kept.branches; ++branch) {
    const float l = lse_of(branch);
    if (l == -INFINITY) continue;
    const double weight = exp(static_cast<double>(l) - highest);
    keys += weight;
    sum += weight * row[1 + branch];
  }
  const double mean = sum / keys;
  const double above = static_cast<double>(sink) - highest - log(keys);  // sink - L
  const double weight = 1 / (1 + exp(-above));
  for (int branch = 0; branch < p.kept.branches; ++branch)
    row[1 + branch] = static_cast<float>(row[1 + branch] - weight * mean);
  return static_cast<float>(weight / (1 + exp(above)) * mean);
}

// Block x of head y.
__global__ void take_sinks_kernel(const __grid_constant__ SinkParams p) {
  const int head = static_cast<int>(blockIdx.y);
  const float sink = sink_of(p.sinks, head);
  const std::int64_t rows = p.space.batch * p.space.tokens;
  const std::int64_t end = rows * (blockIdx.x + 1) / gridDim.x;
  double sum = 0;
  for (std::int64_t i = rows * blockIdx.x / gridDim.x + threadIdx.x; i < end && sink != -INFINITY;
       i += kThreads)
    sum += take_sink(p, sink, i / p.space.tokens, i % p.space.tokens, head);
  __shared__ double sums[kThreads];
  sums[threadIdx.x] = sum;
  for (unsigned step = kThreads / 2; step > 0; step /= 2) {
    __syncthreads();
    if (threadIdx.x < step) sums[threadIdx.x] += sums[threadIdx.x + step];
  }
  if (threadIdx.x == 0) p.sums[blockIdx.y * gridDim.x + blockIdx.x] = sums[0];
}

// A thread for every head.
__global__ void add_sinks_kernel(const __grid_constant__ SinkParams p) {
  const int head = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
  if (head >= p.space.heads) return;
  double sum = 0;
  for (int block = 0; block < kSinkBlocks; ++block) sum += p.sums[head * kSinkBlocks + block];
  auto* const out = reinterpret_cast<float*>(p.dsinks.base + head * p.dsinks.step);
  const auto gradient = static_cast<float>(-p.factor * sum);
  *out = p.adds ? *out + gradient : gradient;
}

}  // namespace

cudaError_t take_sinks(const SinkParams& params, cudaStream_t stream) {
  const dim3 blocks(kSinkBlocks, static_cast<unsigned>(params.space.heads));
  take_sinks_kernel<<<blocks, kThreads, 0, stream>>>(params);
  if (params.dsinks.base != nullptr) {
    const auto heads = static_cast<unsigned>(params.space.heads);
    add_sinks_kernel<<<(heads + kThreads - 1) / kThreads, kThreads, 0, stream>>>(params);
  }
  return cudaGetLastError();
}

}  // namespace annulus::cuda
