#include "kernels/cuda/sm90/backward/kernel.cuh"

namespace annulus::cuda::sm90 {

cudaError_t start_backward_f16(const BackwardArguments& arguments, int blocks,
                               cudaStream_t stream) {
  return arguments.params.shape.head_dim == 64
             ? start_backward<__half, 64>(arguments, blocks, stream)
             : start_backward<__half, 128>(arguments, blocks, stream);
}

}  // namespace annulus::cuda::sm90
