#include "kernels/cuda/sm90/forward/kernel.cuh"

namespace annulus::cuda::sm90 {

ForwardKernel forward_bf16_d64(Limits limits, PairWeights weights, bool in_pieces) {
  return choose_forward<__nv_bfloat16, 64>(limits, weights, in_pieces);
}

}  // namespace annulus::cuda::sm90
