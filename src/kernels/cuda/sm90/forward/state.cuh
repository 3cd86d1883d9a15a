#pragma once

#include "kernels/cuda/sm90/forward/shared.cuh"

// How the consumers of the Hopper forward kernel get the running state of an item's rows.
//
// O is linear in its old value, so the old value may be added late: 32 columns after each key tile,
// loaded by bulk copies into a buffer of their own while products run. If all of it were read at
// the beginning of an item, tensor cores would wait for 64 KiB. A warp that gathers the columns
// instead of bulk copies made the kernel a quarter slower: it did not keep up.
namespace annulus::cuda::sm90 {

// The number of pieces; 0: the state is never loaded in pieces. It gained nothing at head dim 64,
// where the state is half as large and tiles are shorter, nor in causal kernels, whose items have
// half as many tiles. Launches that read no state have kernels of their own, because the code alone
// cost them 4 to 7 %.
template <int kDim>
inline constexpr int kPieces = kDim == 128 ? kDim / kPieceColumns : 0;

// Items with few key tiles have no time for it. Their consumers read the state directly.
template <int kDim>
__device__ __forceinline__ bool state_by_pieces(const ForwardArguments& a, const Plan& plan) {
  return a.map_state && plan.bulk != 0 && plan.plain != 0 &&
         plan.tiles[0] + plan.tiles[1] > kPieces<kDim>;
}

// A piece is loaded with every key tile or, if an item has enough tiles, with every round through
// the stages of keys, which gives it more time.
template <int kDim>
__device__ __forceinline__ bool piece_every_tile(const Plan& plan) {
  return plan.tiles[0] + plan.tiles[1] <= kPieces<kDim> * Layout<kDim>::kKeyStages;
}

// Called by one thread; loads the last columns first.
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
