#include "kernels/cuda/sm90/forward/kernel.cuh"

namespace annulus::cuda::sm90 {

ForwardKernel forward_f16_d64(Limits limits, PairWeights weights, bool in_pieces) {
  return choose_forward<__half, 64>(limits, weights, in_pieces);
}

}  // namespace annulus::cuda::sm90
