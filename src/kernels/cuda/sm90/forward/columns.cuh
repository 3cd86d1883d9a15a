#pragma once

#include <cstdint>

#include "kernels/cuda/sm90/forward/shared.cuh"
#include "kernels/cuda/sm90/instructions.cuh"

// The columns of a tile that each lane of a warp has in products of the Hopper forward kernel: of
// each 8 columns of a row, the 4 lanes that share it have 2 each.
namespace annulus::cuda::sm90 {

inline constexpr float kLog2E = 1.4426950408889634F;

// Rows `row` and row + 8 are this thread's; of 8 columns, 2c and 2c + 1.
struct Place {
  int lane, c, row;
};

// Code that runs once per item computes it again. Otherwise the compiler keeps derived values in
// local memory, and tensor cores wait for them.
__device__ __forceinline__ Place place_anew() {
  const auto thread = static_cast<int>(thread_anew());
  return Place{thread & 31, thread & 3, (thread >> 5) * 16 + ((thread >> 2) & 7)};
}

// Transposes 4 x 4 values over the 4 lanes that share a row.
__device__ __forceinline__ void transpose_quad(std::uint32_t (&x)[4], int lane) {
  const auto swap = [](std::uint32_t& a, std::uint32_t& b, bool first, int distance) {
    const std::uint32_t other = __shfl_xor_sync(~0U, first ? a : b, distance);
    a = first ? other : a;
    b = first ? b : other;
  };
  const bool odd = (lane & 1) != 0;
  const bool upper = (lane & 2) != 0;
  swap(x[0], x[1], odd, 1);
  swap(x[2], x[3], odd, 1);
  swap(x[0], x[2], upper, 2);
  swap(x[1], x[3], upper, 2);
}

// How many of stride * 0, stride * 1, ..., stride * 127 are at most `last`. Avoids the branches of
// a division.
__device__ __forceinline__ int multiples_until(int last, int stride) {
  const int most = min(last, (kTile - 1) * stride);
  int k = static_cast<int>(__fdividef(static_cast<float>(most), static_cast<float>(stride)));
  if ((k + 1) * stride <= most) ++k;  // the error of the quotient is less than one
  if (k * stride > most) --k;
  return last < 0 ? 0 : k + 1;
}

// Bit 2j + e, for 16 j and 2 e: whether 8j + e < end.
__device__ __forceinline__ std::uint32_t columns_before(int end) {
  const auto first = [](int pairs) {
    return static_cast<std::uint32_t>((std::uint64_t{1} << 2 * max(0, min(pairs, 16))) - 1);
  };
  return (first((end + 7) >> 3) & 0x55555555U) | (first((end + 6) >> 3) & 0xAAAAAAAAU);
}

}  // namespace annulus::cuda::sm90
