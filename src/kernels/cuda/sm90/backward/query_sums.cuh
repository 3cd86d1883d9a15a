#pragma once

#include "kernels/cuda/sm90/backward/rows.cuh"
#include "kernels/cuda/sm90/backward/turn.cuh"

// The warps of the Hopper backward kernel that write dQ.
namespace annulus::cuda::sm90 {

// Adds staged dQ to global memory. One warp for the half of each consumer group: if consumers added
// it themselves, they would wait for the adds at every proxy fence. If the schedule has turns, adds
// after the previous item in the chain has added.
template <int kDim>
__device__ __forceinline__ void add_query_gradients(const BackwardArguments& a,
                                                    std::uint32_t shared, int half) {
  using Memory = Shared<kDim>;
  constexpr int kColumns = Memory::kColumns;
  constexpr int kLanes = kColumns / 4;  // per row
  const BackwardParams& p = a.params;
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int first_row = Memory::kByRows ? half * kStagedRows : 0;
  const int first_column = Memory::kByRows ? 0 : half * kColumns;
  const std::uint32_t staging = shared + Memory::kStaging + half * Memory::kStagingOfGroup;
  const bool ordered = a.schedule.turns != nullptr;
  Turn<Memory::kByRows> turn;
  for (int step = 0;; ++step) {
    barrier_wait(shared + Memory::staged(half, step & 1), (step >> 1) & 1);
    const std::uint32_t note = shared + Memory::kStepNotes + (step & 3) * kStepNote;
    const int4 first = load_words4(note);
    const int4 second = load_words4(note + 16);
    if (ordered && step == 0) turn.read(a.schedule, note, half);
    __syncwarp();  // all lanes have read it; it may be overwritten once the staging is empty
    if (ordered) {
      turn.wait(half);
      fence_global_for_async();
      __syncwarp();
    }
    if ((first.x & kBox) != 0) {
      if (lane == 0) {
#pragma unroll
        for (int i = 0; i < kColumns / 32; ++i)
          add_box(&a.dq, staging + i * Memory::kStagingBox, first_column + i * 32, first.y, first.z,
                  first.w + first_row, second.x);
        bulk_commit();
        bulk_wait_read<0>();
      }
    } else if ((first.x & kNothing) == 0) {
      const RowList& list = p.tables.groups[p.tables.items[second.z].group].queries;
      const int begin = first.w + first_row;
      const int rows = min(kStagedRows, list.rows - begin);
      const int column = lane % kLanes * 4;
      for (int base = 0; base < rows; base += 32) {
        const std::byte* mine = nullptr;
        if (base + lane < rows) {
          const int row = begin + base + lane;
          mine = row_address(p.dq, p.tables.runs[run_of(p.tables.runs, list, row)], row,
                             {second.x, first.y, second.y});
        }
        for (int i = 0; i < 32; i += 32 / kLanes) {
          const int row = i + lane / kLanes;
          auto* const target =
              reinterpret_cast<float*>(const_cast<std::byte*>(from_lane(mine, row)));
          if (target != nullptr) {
            add_to_global(target + first_column + column,
                          load_floats4(staging + column / 32 * Memory::kStagingBox +
                                       swizzled(base + row, column % 32 / 4)));
          }
        }
      }
    }
    barrier_arrive(shared + Memory::staging_empty(half));
    if (ordered && turn.item >= 0) {
      if ((first.x & (kBox | kNothing)) == 0) {
        fence_gpu();  // every lane has added
        __syncwarp();
      }
      // At once, because the next item of the chain follows closely. Announcing it a step late, to
      // avoid waiting here, took up to twice as long in total. Completion of the copy is not
      // enough: without the release, the order of sums varied.
      if (lane == 0) {
        bulk_wait<0>();
        fence_global_for_async();
        store_release(turn.progress, turn.reached);
      }
    }
    if ((first.x & kLastOfAll) != 0) break;
    // The note of the next step exists already, because dQ is announced two steps late.
    if (ordered)
      turn.read(a.schedule, shared + Memory::kStepNotes + ((step + 1) & 3) * kStepNote, half);
  }
  if (lane == 0) bulk_wait<0>();
}

}  // namespace annulus::cuda::sm90
