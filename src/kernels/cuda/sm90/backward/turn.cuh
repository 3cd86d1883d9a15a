#pragma once

#include "kernels/cuda/sm90/backward/shared.cuh"
#include "kernels/cuda/work/chains.h"

// dQ in a fixed order: when the Hopper backward kernel may add, and how it announces its progress.
namespace annulus::cuda::sm90 {

// Acquires what other blocks have released.
__device__ __forceinline__ std::int32_t load_acquire(const std::int32_t* address) {
  std::int32_t value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}
__device__ __forceinline__ void store_release(std::int32_t* address, std::int32_t value) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}
__device__ __forceinline__ void fence_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// Progress of an item: the position before which it has added everything.
inline constexpr int kFinished = 0x7FFFFFFF;

// Turns to add to rows of dQ, for one warp; all of its lanes call it. If halves are rows of a block
// (kByRows), both halves of the previous item must have progressed far enough: items of other
// groups have other blocks, so that the first half of one may be the second half of another.
template <bool kByRows>
struct Turn {
  ItemTurn of_item;
  std::int32_t item = -1;
  std::int32_t* progress = nullptr;      // of the item
  const std::int32_t* before = nullptr;  // of the previous item in the chain, both halves
  std::int32_t seen = kFinished;         // progress of the previous item, so far
  std::int32_t until = 0;                // required progress of the previous item
  std::int32_t reached = 0;              // progress of this item after the step

  // For the step of this note. Reads the progress once, early, so that it may have arrived when it
  // is needed.
  __device__ __forceinline__ void read(const BackwardSchedule& schedule, std::uint32_t note,
                                       int half) {
    const int flags = load_word(note);
    const int2 words = load_words2(note + 24);  // item, last
    if (words.x != item) {
      item = words.x;
      of_item = schedule.turns[item];
      progress = schedule.progress + item * kBackwardTurns + half;
      before = schedule.progress + of_item.after * kBackwardTurns;
      seen = of_item.after < 0 ? kFinished : 0;
    }
    const int member = flags >> kMemberShift;
    const bool ends = (flags & kLastOfMember) != 0 && of_item.finish != 0;
    reached = ends ? (member + 1) * of_item.span : member * of_item.span + words.y + 1;
    until = !ends && words.y < of_item.alone ? 0 : reached;
    if ((flags & kNothing) != 0) until = kFinished;  // it passes on the progress of earlier items
    if ((flags & kLastOfTile) != 0) reached = kFinished;
    if (seen < until) ask(half);
  }
  __device__ __forceinline__ void wait(int half) {
    while (seen < until) ask(half);
  }
  __device__ __forceinline__ void ask(int half) {
    seen = load_acquire(before + half);
    if constexpr (kByRows) seen = min(seen, load_acquire(before + 1 - half));
  }
};

}  // namespace annulus::cuda::sm90
