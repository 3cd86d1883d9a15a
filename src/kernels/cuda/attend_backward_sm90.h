#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/launch.h"
#include "kernels/cuda/launch_traits.h"

// dQ, dK and dV in one pass on Hopper: items own key rows, and add to dQ in L2.
namespace annulus::cuda {

inline constexpr int kBackwardTileSm90 = 128;  // most rows of an item

// How a launch is best run; the results are the same.
struct BackwardSchedule {
  // Of the launch: tiles whose rows are one run of the usual place and stride go by bulk tensor
  // copies. Rows are gathered where they are not, or cannot go by such copies. A stride of 0: none.
  LaunchTraits traits;
  // Device memory, 0 when the launch begins: blocks draw their items from it, so that long ones
  // should come first. Null: items are dealt in turn.
  std::int32_t* next_item = nullptr;
};

[[nodiscard]] bool backward_sm90_fits(const KernelShape& shape);

// Enqueues: adds the pairs of items [first_item, first_item + items) to dq, dk and dv. No two of
// the items may own the same key row.
[[nodiscard]] cudaError_t launch_backward_sm90(const BackwardParams& params, cudaStream_t stream,
                                               const BackwardSchedule& schedule = {});

}  // namespace annulus::cuda
