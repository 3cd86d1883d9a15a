#pragma once

#include <cstdint>

#include "kernels/cuda/sm90/forward/columns.cuh"
#include "kernels/cuda/sm90/forward/shared.cuh"
#include "kernels/cuda/sm90/forward/state.cuh"
#include "kernels/cuda/sm90/instructions.cuh"

// O in a consumer's registers, in the forward kernel on Hopper: loading its initial value and
// storing it. Rows `row` and row + 8 of Place are [4 j + e] and [4 j + 2 + e], e = 0, 1, for
// columns 8 j + 2 c + e.
namespace annulus::cuda::sm90 {

template <int kCount>
__device__ __forceinline__ void scale_rows(float (&o)[kCount], float factor0, float factor1) {
#pragma unroll
  for (int j = 0; j < kCount / 4; ++j) {
    o[4 * j] *= factor0;
    o[4 * j + 1] *= factor0;
    o[4 * j + 2] *= factor1;
    o[4 * j + 3] *= factor1;
  }
}

// Loads O of the state; 0 for rows that have attended to nothing, whose O was never written.
template <int kDim>
__device__ __forceinline__ void read_state(const ForwardParams& p, const Slot& slot, auto& to) {
  const auto [lane, c, row] = place_anew();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const bool has = slot.old_lse[row + 8 * half] != -INFINITY;
    const auto* from = reinterpret_cast<const float2*>(slot.state + slot.token[row + 8 * half] *
                                                                        p.state.row_step) +
                       c;
#pragma unroll
    for (int j = 0; j < kDim / 8; ++j) {
      const float2 x = has ? __ldcg(from + 4 * j) : make_float2(0.0F, 0.0F);
      to[4 * j + 2 * half] = x.x;
      to[4 * j + 2 * half + 1] = x.y;
    }
  }
}

// Adds a piece of the old O, scaled like the present sums.
template <int kDim>
__device__ __forceinline__ void add_state_piece(float (&o)[kDim / 2], std::uint32_t state,
                                                const Slot& slot, int at, float less0,
                                                float less1) {
  const auto [lane, c, row] = place_anew();
  const float lse0 = slot.old_lse[row];
  const float lse1 = slot.old_lse[row + 8];
  // O of rows that have attended to nothing was never written. No branches, because they would move
  // warp-uniform values out of uniform registers.
  const bool has0 = lse0 != -INFINITY;
  const bool has1 = lse1 != -INFINITY;
  const float old0 = exp2_approx(lse0 * kLog2E - less0);
  const float old1 = exp2_approx(lse1 * kLog2E - less1);
  const float weight0 = has0 ? old0 : 0.0F;
  const float weight1 = has1 ? old1 : 0.0F;
  const std::uint32_t from = state + swizzled(row, c >> 1) + 8 * (c & 1);
#pragma unroll
  for (int piece = 0; piece < kPieces<kDim>; ++piece) {
    if (at == piece) {
#pragma unroll
      for (int j = 0; j < kPieceColumns / 8; ++j) {
        float x[4];
        load_pair(from ^ (32 * j), x[0], x[1]);
        load_pair((from ^ (32 * j)) + 8 * 128, x[2], x[3]);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float& sum = o[piece * (kPieceColumns / 2) + 4 * j + e];
          sum = fmaf((e < 2 ? has0 : has1) ? x[e] : 0.0F, e < 2 ? weight0 : weight1, sum);
        }
      }
    }
  }
}

template <typename T, int kDim>
__device__ __forceinline__ void write_rows(const ForwardParams& p, const Slot& slot,
                                           float (&o)[kDim / 2], float factor0, float factor1) {
  const auto [lane, c, row] = place_anew();
  // An empty row may have multiplied NaN or infinities in V by weights of 0, which is NaN.
  if (__any_sync(~0U, factor0 == 0.0F || factor1 == 0.0F)) {
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) {
      if (((i & 2) == 0 ? factor0 : factor1) == 0.0F) o[i] = 0.0F;
    }
  }
  // In place, before any of it is stored, because reusing a register waits for its store. At head
  // dim 64 that is O itself.
  constexpr bool kInPlace = kDim == 128;
  if constexpr (kInPlace) scale_rows(o, factor0, factor1);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float factor = half == 0 ? factor0 : factor1;
    const auto scaled = [&](int i) { return kInPlace ? o[i] : o[i] * factor; };
    const std::int64_t token = slot.token[row + 8 * half];
    const bool more =
        (slot.later >> ((row + 8 * half) & 31) & 1U) != 0;  // later launches have the row
    // No divergent branches, because they would move warp-uniform values out of uniform registers.
    if (slot.later != 0) {
      // Stores of 16 bytes per lane, after a shuffle, gained nothing.
      const bool store = more && token >= 0 && factor != 0.0F;  // 0: the row is empty
      std::byte* const to = slot.state + token * p.state.row_step + 8 * c;
#pragma unroll
      for (int j = 0; j < kDim / 8; ++j) {
        store_if(store, to + 32 * j, scaled(4 * j + 2 * half), scaled(4 * j + 2 * half + 1));
      }
    }
    if (slot.later != ~0U) {
      const bool store = !more && token >= 0;
      std::byte* const to = slot.out + token * p.out.row_step + 16 * c;
#pragma unroll
      for (int i = 0; i < kDim / 32; ++i) {  // each lane gets one of 4 chunks of 8 columns
        std::uint32_t x[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          x[j] =
              pack<T>(scaled(4 * (4 * i + j) + 2 * half), scaled(4 * (4 * i + j) + 2 * half + 1));
        }
        transpose_quad(x, lane);
        store_if(store, to + 64 * i, x);
      }
    }
  }
}

}  // namespace annulus::cuda::sm90
