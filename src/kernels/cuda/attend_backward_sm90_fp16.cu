#include "kernels/cuda/attend_backward_sm90_kernel.h"

namespace annulus::cuda::sm90 {

cudaError_t start_backward_fp16(const BackwardArguments& arguments, int blocks,
                                cudaStream_t stream) {
  return arguments.params.shape.head_dim == 64
             ? start_backward<__half, 64>(arguments, blocks, stream)
             : start_backward<__half, 128>(arguments, blocks, stream);
}

}  // namespace annulus::cuda::sm90
