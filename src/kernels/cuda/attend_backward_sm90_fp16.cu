#include "kernels/cuda/attend_backward_sm90_kernel.h"

namespace annulus::cuda::sm90 {

void start_backward_fp16(const BackwardArguments& arguments, int blocks, cudaStream_t stream) {
  if (arguments.params.shape.head_dim == 64) {
    start_backward<__half, 64>(arguments, blocks, stream);
  } else {
    start_backward<__half, 128>(arguments, blocks, stream);
  }
}

}  // namespace annulus::cuda::sm90
