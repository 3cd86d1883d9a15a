#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

// The kernels of a call to a cache may take a few microseconds each, like starting them. Where they
// are compiled for Hopper (kernels_wait), the blocks of one are brought to multiprocessors while
// the one before it ends, and wait there.
namespace annulus::cuda {

// At the beginning of such a kernel, by all threads: before they read or write what others do.
__device__ inline void wait_for_earlier_kernels() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// `params.early`: the kernel was compiled so that it waits.
template <typename Params>
cudaError_t launch_early(void (*kernel)(Params), const dim3& grid, int threads, std::size_t bytes,
                         const Params& params, cudaStream_t stream) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = params.early ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, params);
}

}  // namespace annulus::cuda
