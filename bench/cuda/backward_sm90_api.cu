// What backward_sm90.py calls: the Hopper backward kernel by a C interface.
#include <cstring>

#include "kernels/cuda/attend_backward_sm90.h"

using namespace annulus::cuda;

// Sizes of what the script lays out by itself.
extern "C" void backward_sm90_sizes(int* sizes) {
  const int all[] = {sizeof(BackwardParams), sizeof(Channel), sizeof(Run),   sizeof(Group),
                     sizeof(Member),         sizeof(Item),    sizeof(Source)};
  std::memcpy(sizes, all, sizeof all);
}

// 0, or not: `message` then says why.
extern "C" int backward_sm90(const void* params, int row_stride, void* next_item, void* stream,
                             char* message, int size) {
  const auto& p = *static_cast<const BackwardParams*>(params);
  if (!backward_sm90_fits(p.shape)) {
    std::strncpy(message, "does not fit", size);
    return 2;
  }
  LaunchTraits traits;
  traits.query_stride = traits.key_stride = row_stride;
  const cudaError_t error = launch_backward_sm90(p, static_cast<cudaStream_t>(stream),
                                                 {traits, static_cast<std::int32_t*>(next_item)});
  if (error == cudaSuccess) return 0;
  std::strncpy(message, cudaGetErrorString(error), size);
  return 1;
}
