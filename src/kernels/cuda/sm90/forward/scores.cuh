#pragma once

#include <cstdint>

#include "kernels/cuda/sm90/forward/columns.cuh"
#include "kernels/cuda/sm90/forward/shared.cuh"
#include "kernels/cuda/sm90/instructions.cuh"

// Operations on S in a consumer's registers, in the Hopper forward kernel: masks, maxima,
// exponentials. Rows `row` and row + 8 of Place are [4 j + e] and [4 j + 2 + e], e = 0, 1, for
// columns 8 j + 2 c + e.
namespace annulus::cuda::sm90 {

// Sets scores of hidden keys to -inf.
template <Limits kLimits>
__device__ __forceinline__ void hide_scores(float (&s)[kTile / 2], const KeyStage& stage, int flags,
                                            const Slot& slot) {
  const auto [lane, c, row] = place_anew();
  if constexpr (kHides<kLimits>) {
    constexpr bool kLower = kLimits == Limits::both;
    const int index0 = slot.index[row];
    const int index1 = slot.index[row + 8];
    // Queries see indices (minus the upper limit) from here to their own.
    const int from0 = kLower ? index0 - slot.width : INT_MIN;
    const int from1 = kLower ? index1 - slot.width : INT_MIN;
    std::uint32_t seen0 = 0;  // bit 2j + e: column 8j + 2c + e
    std::uint32_t seen1 = 0;
    if ((flags & kTable) != 0) {
#pragma unroll 1
      for (int j = kTile / 8 - 1; j >= 0; --j) {
        const int2 key = *reinterpret_cast<const int2*>(&stage.index[8 * j + 2 * c]);
        const auto sees = [](int index, int from, int own) {
          return index <= own && (!kLower || index >= from);
        };
        seen0 = 4 * seen0 + (sees(key.x, from0, index0) ? 1U : 0U) +
                (sees(key.y, from0, index0) ? 2U : 0U);
        seen1 = 4 * seen1 + (sees(key.x, from1, index1) ? 1U : 0U) +
                (sees(key.y, from1, index1) ? 2U : 0U);
      }
    } else {
      int end0 = stage.rows;
      int end1 = end0;
      if ((flags & kCompare) != 0) {
        end0 = min(end0, multiples_until(index0 - stage.first, stage.stride));
        end1 = min(end1, multiples_until(index1 - stage.first, stage.stride));
      }
      seen0 = columns_before(end0 - 2 * c);
      seen1 = columns_before(end1 - 2 * c);
      if (kLower && (flags & kCompare) != 0) {
        seen0 &= ~columns_before(multiples_until(from0 - 1 - stage.first, stage.stride) - 2 * c);
        seen1 &= ~columns_before(multiples_until(from1 - 1 - stage.first, stage.stride) - 2 * c);
      }
    }
#pragma unroll
    for (int j = 0; j < kTile / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if ((seen0 & 1U << (2 * j + e)) == 0) s[4 * j + e] = -INFINITY;
        if ((seen1 & 1U << (2 * j + e)) == 0) s[4 * j + 2 + e] = -INFINITY;
      }
    }
  } else {
    const int end = stage.rows - 2 * c;
#pragma unroll
    for (int j = 0; j < kTile / 8; ++j) {
      if (8 * j >= end) s[4 * j] = s[4 * j + 2] = -INFINITY;
      if (8 * j + 1 >= end) s[4 * j + 1] = s[4 * j + 3] = -INFINITY;
    }
  }
}

__device__ __forceinline__ void highest_scores(const float (&s)[kTile / 2], float& top0,
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

// Exponentials of scores whose keys all have weight 1, or weights that repeat every 16 keys, in
// `addend`.
template <PairWeights kWeights, int kAddends>
__device__ __forceinline__ void weigh_scores(float (&s)[kTile / 2], const float (&addend)[kAddends],
                                             float scale_log2, float& add0, float& add1) {
  if constexpr (kWeights == PairWeights::periodic) {
#pragma unroll
    for (int e = 0; e < 8; ++e) {  // one kind of column after the other
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
      s[4 * j] = exp2_approx(fmaf(s[4 * j], scale_log2, addend[0]));
      s[4 * j + 1] = exp2_approx(fmaf(s[4 * j + 1], scale_log2, addend[0]));
      s[4 * j + 2] = exp2_approx(fmaf(s[4 * j + 2], scale_log2, addend[1]));
      s[4 * j + 3] = exp2_approx(fmaf(s[4 * j + 3], scale_log2, addend[1]));
      add0 += s[4 * j];
      add0 += s[4 * j + 1];
      add1 += s[4 * j + 2];
      add1 += s[4 * j + 3];
    }
  }
}

// The same with any weights: log2_weight is indexed by the branches that both rows are in.
template <typename Weights>
__device__ __forceinline__ void weigh_scores(float (&s)[kTile / 2], const KeyStage& stage,
                                             const Slot& slot, const Weights& log2_weight,
                                             float scale_log2, float by0, float by1, float& add0,
                                             float& add1) {
  const auto [lane, c, row] = place_anew();
  const std::uint32_t repeats0 = slot.repeats[row];
  const std::uint32_t repeats1 = slot.repeats[row + 8];
#pragma unroll
  for (int j = 0; j < kTile / 8; ++j) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const std::uint32_t with = stage.repeats[8 * j + 2 * c + e];
      s[4 * j + e] =
          exp2_approx(fmaf(s[4 * j + e], scale_log2, log2_weight[repeats0 & with] - by0));
      s[4 * j + 2 + e] =
          exp2_approx(fmaf(s[4 * j + 2 + e], scale_log2, log2_weight[repeats1 & with] - by1));
      add0 += s[4 * j + e];
      add1 += s[4 * j + 2 + e];
    }
  }
}

// Sets the factor of rows that see a key with a non-finite value to NaN. This and hide_scores
// rarely run, but they are in the loop, so they are kept small for the instruction cache.
__device__ __forceinline__ void spoil_rows(const std::uint32_t (&weights)[kTile / 16][4],
                                           const ValueStage& stage, float& factor0,
                                           float& factor1) {
  const auto [lane, c, row] = place_anew();
  std::uint32_t found[kTile / 16][4];
#pragma unroll
  for (int i = 0; i < kTile / 4; ++i) found[i / 4][i % 4] = weights[i / 4][i % 4];
  bool seen0 = false;
  bool seen1 = false;
#pragma unroll 1
  for (int k = 0; k < kTile / 16; ++k) {
    const std::uint32_t keys = stage.keys[k / 2] >> (16 * (k % 2) + 2 * c);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::uint32_t pair = keys >> (8 * half);
      const std::uint32_t with =
          ((pair & 1U) != 0 ? 0xFFFFU : 0U) | ((pair & 2U) != 0 ? 0xFFFF0000U : 0U);
      seen0 = seen0 || (found[k][2 * half] & with) != 0;
      seen1 = seen1 || (found[k][2 * half + 1] & with) != 0;
    }
  }
  const std::uint32_t quad = 0xFU << (lane & 28);
  if ((__ballot_sync(~0U, seen0) & quad) != 0) factor0 = NAN;
  if ((__ballot_sync(~0U, seen1) & quad) != 0) factor1 = NAN;
}

}  // namespace annulus::cuda::sm90
