#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/launch.h"
#include "kernels/cuda/work/chains.h"
#include "kernels/cuda/work/launch_traits.h"

// dQ, dK and dV in one pass on Hopper: items own key rows, and add to dQ in L2.
namespace annulus::cuda::sm90 {

inline constexpr int kBackwardTile = 128;  // most rows of an item
// Query rows of a step: as many as registers hold, with dK and dV beside them.
constexpr int backward_step(int head_dim) { return head_dim == 64 ? 128 : 64; }

// How a launch is best run; the results are the same, but for rounding.
struct BackwardSchedule {
  // Of the launch: tiles whose rows are one run of the usual place and stride go by bulk tensor
  // copies. Rows are gathered where they are not, or cannot go by such copies. A stride of 0: none.
  LaunchTraits traits;
  // Device memory, 0 when the launch begins: blocks draw their items from it, so that long ones
  // should come first. Null: items are dealt in turn.
  std::int32_t* next_item = nullptr;
  // dQ in a fixed order, so that every run gives the same bits. Both or none, and with next_item:
  // who waits for an item must know that it has been drawn.
  const ItemTurn* turns = nullptr;   // device memory, by item of the tables
  std::int32_t* progress = nullptr;  // device memory, kBackwardTurns by item of the tables, 0
};

[[nodiscard]] bool backward_fits(const KernelShape& shape);

// Enqueues: adds the pairs of items [first_item, first_item + items) to dq, dk and dv. No two of
// the items may own the same key row.
[[nodiscard]] cudaError_t launch_backward(const BackwardParams& params, cudaStream_t stream,
                                          const BackwardSchedule& schedule = {});

}  // namespace annulus::cuda::sm90
