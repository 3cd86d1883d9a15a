#include "kernels/cuda/forward_sm90_kernel.cuh"

namespace annulus::cuda::sm90 {

ForwardKernel forward_f16_d64(bool causal, PairWeights weights) {
  return choose_forward<__half, 64>(causal, weights);
}

}  // namespace annulus::cuda::sm90
