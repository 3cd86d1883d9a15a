#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/launch.h"
#include "kernels/cuda/work/chains.h"
#include "kernels/cuda/work/launch_traits.h"

// dQ, dK and dV in one pass on Hopper. Items own key rows and add to dQ in L2.
namespace annulus::cuda::sm90 {

inline constexpr int kBackwardTile = 128;  // most rows of an item
// Query rows of a step: as many as fit the registers beside dK and dV.
constexpr int backward_step(int head_dim) { return head_dim == 64 ? 128 : 64; }

// How to run a launch. Results are the same up to rounding.
struct BackwardSchedule {
  // Of the launch. A tile is loaded by bulk tensor copies if its rows are one run of this source
  // and stride. Other rows are gathered. Stride 0: all rows are gathered.
  LaunchTraits traits;
  // Device memory, 0 when the launch begins. Blocks take their next item from this counter, so that
  // long items should come first. Null: block b takes items b, b + blocks, ...
  std::int32_t* next_item = nullptr;
  // For dQ in a fixed order, so that every run gives the same bits. Both or none, and only with
  // next_item, because an item may wait only for items that were taken before.
  const ItemTurn* turns = nullptr;   // device memory, by item of the tables
  std::int32_t* progress = nullptr;  // device memory, kBackwardTurns by item of the tables, 0
};

[[nodiscard]] bool backward_fits(const KernelShape& shape);

// Enqueues: adds the pairs of items [first_item, first_item + items) to dq, dk and dv. No two of
// the items may own the same key row.
[[nodiscard]] cudaError_t launch_backward(const BackwardParams& params, cudaStream_t stream,
                                          const BackwardSchedule& schedule = {});

}  // namespace annulus::cuda::sm90
