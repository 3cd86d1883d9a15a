#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/launch.h"
#include "kernels/cuda/work/launch_traits.h"

// Forward kernels for Hopper: bf16 and fp16, head dims 64 and 128, 128 queries an item.
namespace annulus::cuda::sm90 {

// Most rows of an item.
inline constexpr int kForwardTile = 128;

[[nodiscard]] bool forward_fits(const KernelShape& shape);

// Enqueues. `traits` are those of the launch. Query rows are the shard's; items without rows are
// passed over.
[[nodiscard]] cudaError_t launch_forward(const ForwardParams& params, const LaunchTraits& traits,
                                         cudaStream_t stream);

}  // namespace annulus::cuda::sm90
