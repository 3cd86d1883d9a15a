#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/launch.h"
#include "kernels/cuda/work/launch_traits.h"

// Forward kernels for Hopper: bf16 and fp16, head dims 64 and 128, 128 queries per item.
namespace annulus::cuda::sm90 {

// Most rows of an item.
inline constexpr int kForwardTile = 128;

[[nodiscard]] bool forward_fits(const KernelShape& shape);

// Enqueues a launch. `traits` are those of the launch. Query rows are in the shard; items without
// rows are skipped.
[[nodiscard]] cudaError_t launch_forward(const ForwardParams& params, const LaunchTraits& traits,
                                         cudaStream_t stream);

}  // namespace annulus::cuda::sm90
