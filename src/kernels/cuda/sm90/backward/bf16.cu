#include "kernels/cuda/sm90/backward/kernel.cuh"

namespace annulus::cuda::sm90 {

cudaError_t start_backward_bf16(const BackwardArguments& arguments, int blocks,
                                cudaStream_t stream) {
  return arguments.params.shape.head_dim == 64
             ? start_backward<__nv_bfloat16, 64>(arguments, blocks, stream)
             : start_backward<__nv_bfloat16, 128>(arguments, blocks, stream);
}

}  // namespace annulus::cuda::sm90
