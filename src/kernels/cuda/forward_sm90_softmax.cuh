#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/cuda/forward_sm90_shared.cuh"
#include "kernels/cuda/sm90_instructions.h"

// How scores become P in the forward kernel on Hopper. A thread has 2 rows, 4 lanes a row.
//
// A row's highest score is looked for in an item's first tile. In the others P is attempted as if
// no score were much higher: no maximum, no shuffles, and O stays as it is, a third fewer
// instructions. Only where P becomes too large, or a row has seen nothing, the maximum is looked
// for after all. A row fares as if it were alone: no bit may follow from keys that it does not see.
namespace annulus::cuda::sm90 {

inline constexpr float kLog2E = 1.4426950408889634F;
inline constexpr float kLn2 = 0.6931471805599453F;

// What P of a tile may add up to: float16 ends at 65504. With bfloat16, L loses digits to the
// logarithm of larger sums.
template <typename T>
inline constexpr float kHighSum = std::is_same_v<T, __half> ? 16384.0F : 16777216.0F;

template <PairWeights kWeights>
struct RowSums {
  static constexpr bool kPeriodic = kWeights == PairWeights::periodic;
  static constexpr int kAddends = kPeriodic ? 8 : 2;

  float less0, less1;  // by which exponents (of 2) are lessened; -inf: the row has seen nothing
  float sum0, sum1;    // of P, this lane's part
  float keep0 = 0.0F;  // what sums and O so far are multiplied by
  float keep1 = 0.0F;
  // log2 of pairs' weights, lessened: [row], or [row][2c, +1, +8, +9].
  float addend[kAddends];

  __device__ __forceinline__ void look_up_weights(const float* log2_weight, const Slot& slot, int c,
                                                  int row) {
#pragma unroll
    for (int e = 0; e < kAddends; ++e) {
      const int key = 2 * c + (e & 1) + 4 * (e & 2);
      addend[e] =
          kPeriodic ? log2_weight[slot.repeats[row + 2 * (e & 4)] & slot.key_repeats[key]] : 0.0F;
    }
  }
  // Weights have just been looked up.
  __device__ __forceinline__ void lessen(float top0, float top1) {
    // A row that has seen nothing yet: -inf - -inf would be NaN.
    const float by0 = top0 == -INFINITY ? 0.0F : top0;
    const float by1 = top1 == -INFINITY ? 0.0F : top1;
    keep0 = exp2_approx(less0 - by0);
    keep1 = exp2_approx(less1 - by1);
    less0 = top0;
    less1 = top1;
#pragma unroll
    for (int e = 0; e < kAddends; ++e) addend[e] -= e < kAddends / 2 ? by0 : by1;
  }
  // Attempts fail for rows that have seen nothing: exponents are infinite.
  __device__ __forceinline__ void mark_empty_rows() {
#pragma unroll
    for (int e = 0; e < kAddends; ++e) {
      if ((e < kAddends / 2 ? less0 : less1) == -INFINITY) addend[e] = INFINITY;
    }
  }

  // S becomes P, before rounding. The maximum is that of the plain scores, so P is at most 5.
  // General weights are log2_weight(row, j, e), of column 8j + 2c + e.
  template <typename F>
  __device__ __forceinline__ void softmax(float (&s)[kTile / 2], float scale_log2,
                                          const F& log2_weight) {
    float top0;
    float top1;
    highest(s, top0, top1);
    lessen(fmaxf(less0, scale_log2 * top0), fmaxf(less1, scale_log2 * top1));
    float add0 = 0.0F;
    float add1 = 0.0F;
    if constexpr (kPeriodic) {
#pragma unroll
      for (int e = 0; e < 8; ++e) {  // one kind of columns after the other
#pragma unroll
        for (int j = (e >> 1) & 1; j < kTile / 8; j += 2) {
          float& x = s[4 * j + 2 * (e >> 2) + (e & 1)];
          x = exp2_approx(fmaf(x, scale_log2, addend[e]));
          (e < 4 ? add0 : add1) += x;
        }
      }
    } else {
#pragma unroll
      for (int j = 0; j < kTile / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float plus = addend[e >> 1];
          if constexpr (kWeights == PairWeights::general) plus += log2_weight(e >> 1, j, e & 1);
          float& x = s[4 * j + e];
          x = exp2_approx(fmaf(x, scale_log2, plus));
          (e < 2 ? add0 : add1) += x;
        }
      }
    }
    mark_empty_rows();
    sum0 = fmaf(sum0, keep0, add0);
    sum1 = fmaf(sum1, keep1, add1);
  }

  // S becomes P, rounded. Where that fails, S is still there: `before` looks up weights again,
  // `behind` multiplies O by keep0 and keep1, and P is computed once more.
  template <typename T, typename Before, typename Behind>
  __device__ __forceinline__ void attempt(const float (&s)[kTile / 2],
                                          std::uint32_t (&weights)[kTile / 16][4], float scale_log2,
                                          const Before& before, const Behind& behind) {
    float add0;
    float add1;
    bool again = false;
#pragma unroll 1
    while (true) {
      add0 = 0.0F;
      add1 = 0.0F;
#pragma unroll
      for (int i = 0; i < kTile / 4; ++i) {
        const int row = i & 1;
        float x[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int of_row = kPeriodic ? (i & 2) + e : 0;
          x[e] = exp2_approx(fmaf(s[2 * i + e], scale_log2, addend[row * (kAddends / 2) + of_row]));
          (row == 0 ? add0 : add1) += x[e];
        }
        weights[i / 4][i % 4] = pack<T>(x[0], x[1]);
      }
      const bool high0 = !(add0 <= kHighSum<T>);  // or NaN
      const bool high1 = !(add1 <= kHighSum<T>);
      if (again || !__any_sync(~0U, high0 || high1)) break;
      again = true;
      const std::uint32_t quad = 0xFU << (thread_anew() & 28);  // a row's lanes
      const bool more0 = (__ballot_sync(~0U, high0) & quad) != 0;
      const bool more1 = (__ballot_sync(~0U, high1) & quad) != 0;
      float top0;
      float top1;
      highest(s, top0, top1);
      before();
      lessen(more0 ? fmaxf(less0, scale_log2 * top0) : less0,
             more1 ? fmaxf(less1, scale_log2 * top1) : less1);
      sum0 *= keep0;
      sum1 *= keep1;
      behind();
    }
    if (again) mark_empty_rows();
    sum0 += add0;
    sum1 += add1;
  }

 private:
  static __device__ __forceinline__ void highest(const float (&s)[kTile / 2], float& top0,
                                                 float& top1) {
    top0 = fmaxf(s[0], s[1]);
    top1 = fmaxf(s[2], s[3]);
#pragma unroll
    for (int j = 1; j < kTile / 8; ++j) {
      top0 = fmaxf(fmaxf(top0, s[4 * j]), s[4 * j + 1]);
      top1 = fmaxf(fmaxf(top1, s[4 * j + 2]), s[4 * j + 3]);
    }
    top0 = fmaxf(top0, __shfl_xor_sync(~0U, top0, 1));
    top1 = fmaxf(top1, __shfl_xor_sync(~0U, top1, 1));
    top0 = fmaxf(top0, __shfl_xor_sync(~0U, top0, 2));
    top1 = fmaxf(top1, __shfl_xor_sync(~0U, top1, 2));
  }
};

}  // namespace annulus::cuda::sm90
