#pragma once

#include "kernels/cuda/sm90/forward/shared.cuh"

// How the running state of an item's rows comes to the consumers of the forward kernel on Hopper.
//
// O is linear in its old value, so that may come late: 32 columns after one key tile, 32 after
// another, by bulk copies into a place of their own, while products run. Where all of it is read as
// an item begins, tensor cores wait for 64 KiB. Gathering the columns by a warp instead of bulk
// copies made the kernel a quarter slower: that warp did not keep up.
namespace annulus::cuda::sm90 {

// How many pieces; 0: never so. At head dim 64, where the state is half as large and tiles are
// shorter, it gained nothing, nor in causal kernels, whose items have half as many tiles. Kernels
// for launches that read no state are others: the code alone cost them 4 to 7 %.
template <int kDim>
inline constexpr int kPieces = kDim == 128 ? kDim / kPieceColumns : 0;

// Items of few key tiles have no time for it. Their consumers read it themselves.
template <int kDim>
__device__ __forceinline__ bool state_by_pieces(const ForwardArguments& a, const Plan& plan) {
  return a.map_state && plan.bulk != 0 && plan.plain != 0 &&
         plan.tiles[0] + plan.tiles[1] > kPieces<kDim>;
}

// A piece comes with every key tile, or, where an item has enough of them, with every round through
// the stages of keys: it has more time then.
template <int kDim>
__device__ __forceinline__ bool piece_every_tile(const Plan& plan) {
  return plan.tiles[0] + plan.tiles[1] <= kPieces<kDim> * Layout<kDim>::kKeyStages;
}

// By one thread; the last columns come first.
template <int kDim>
__device__ __forceinline__ void load_state(const ForwardArguments& a, std::uint32_t tiles,
                                           typename Layout<kDim>::Control& control,
                                           const Plan& plan, const Slot& slot, int& parity) {
  using L = Layout<kDim>;
  const std::uint32_t full = shared_address(&control.state_full);
#pragma unroll 1
  for (int piece = slot.pieces - 1; piece >= 0; --piece) {
    barrier_wait(shared_address(&control.state_empty), parity ^ 1);
    parity ^= 1;
    barrier_arrive_expecting(full, kPieceBytes);
    load_box(tiles + L::kState, &a.state, full, piece * kPieceColumns, plan.head, plan.remainder,
             plan.quotient, plan.batch, policy_stream());
  }
}

}  // namespace annulus::cuda::sm90
