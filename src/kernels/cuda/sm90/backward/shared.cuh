#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/sm90/backward/launch.h"
#include "kernels/cuda/sm90/instructions.cuh"

// What the warps of the Hopper backward kernel share: arguments, shared memory and barriers.
namespace annulus::cuda::sm90 {

inline constexpr int kBackwardThreads = 384;  // two warp groups of consumers, one of helpers
inline constexpr int kKeys = 128;             // of a tile: 64 for each of two warp groups
inline constexpr int kStages = 2;       // of queries: one is computed while the other is loaded
inline constexpr int kStagedRows = 64;  // of dQ per consumer group

// A block takes its next item this many steps before it loads the last one: in time for the keys to
// arrive, but no earlier, because a free block cannot take an item that this block holds, and items
// of its chain wait for it.
inline constexpr int kDrawAhead = 4;

// Maps have the shard's tokens as {columns, heads, token % stride, token / stride, batch}: a run of
// that stride is a box, wherever it begins. Received parcels: see received_rows.
struct BackwardArguments {
  CUtensorMap q, k, v, dout, dq;
  BackwardParams params;
  BackwardSchedule schedule;
  float score_scale = 1;     // scale * log2(e)
  float delta_scale = 1;     // bf16: scale, as dS is scaled; fp16: 1
  bool map_queries = false;  // the maps of that side exist
  bool map_keys = false;
};

// One per number type, in files of their own, because they take long to compile.
cudaError_t start_backward_bf16(const BackwardArguments& arguments, int blocks,
                                cudaStream_t stream);
cudaError_t start_backward_f16(const BackwardArguments& arguments, int blocks, cudaStream_t stream);

// Flags of a step. The producer writes them, the other warps read them.
enum StepFlag : int {
  kLastOfTile = 1,
  kLastOfAll = 2,
  kMasked = 4,     // some pairs are hidden: keys after the last that a query sees, or absent rows
  kPeriodic = 8,   // pairs have weights that repeat every 16 rows of either side
  kWeighted = 16,  // pairs have weights that depend on the repeats of their rows
  kBox = 32,       // its rows of dQ are a box
  kNothing = 64,   // all pairs are hidden, and nothing may be added
  kLastOfMember = 128,
  kLower = 256,  // some keys are before the first that a query sees
};
inline constexpr int kMemberShift =
    9;  // the flags of a note have the member's index from this bit on
inline constexpr int kWords =
    kMasked | kWeighted | kLower;  // steps with these need words of queries
inline constexpr int kSpecial = kWords | kPeriodic;
struct alignas(16) StepNote {
  std::int32_t flags;
  std::int32_t head;
  std::int32_t remainder;  // kBox: the box's coordinates
  std::int32_t row;        // otherwise: the first row in the group's list
  std::int32_t batch;
  std::int32_t unit;
  std::int32_t item;  // -1: none
  std::int32_t last;  // position of the last row in its member: see ItemTurn
};
inline constexpr int kStepNote = static_cast<int>(sizeof(StepNote));
// Where a tile's rows of dK and dV are: evenly spaced or, if item >= 0, looked up in the tables.
struct alignas(16) TileNote {
  std::int64_t dk;
  std::int64_t dv;
  std::int64_t dk_step;
  std::int64_t dv_step;
  std::int32_t item;
  std::int32_t rows;
  std::int32_t earlier;  // bit i % 32: row i has a sum already
  std::int32_t width;    // of the band, in words
};
inline constexpr int kTileNoteWidth = 44;  // its offset in the note
static_assert(offsetof(TileNote, width) == kTileNoteWidth);

// Masks compare words: key word <= query word. A key's word is 16 times its index, a query's is 16
// times the last index that it sees. Words of absent keys are above all others, those of absent
// queries below. The low four bits are the repeats of the group that contain the row. The first
// index that a query sees is the last one minus the width of the band.
inline constexpr int kAbsentKey = 0x7FFFFFF0;
inline constexpr int kAbsentQuery = -0x7FFFFFFF - 1;
inline constexpr int kLastIndex = 0x7FFFFFE;  // so the largest index is 2^27 - 2

// A group's band. Limits that hide nothing are clamped, so that sums with indices fit. With a lower
// limit the largest index is 2^26 - 2, so that words fit, too.
struct BandLimits {
  int least, most;
};
__device__ __forceinline__ BandLimits limits_of(const Group& group) {
  const int far = group.least == kNoLeast ? 1 << 28 : (1 << 26) - 1;
  return {max(-far, min(far, group.least)), max(-far, min(far, group.most))};
}

// Shared memory of a block, as offsets. K and dS have two buffers, because dQ lags by a step and so
// extends into the next tile.
template <int kDim>
struct Shared {
  static constexpr int kQueries = backward_step(kDim);
  static constexpr int kQueryTile = kQueries * kDim * 2;
  static constexpr int kKeyTile = kKeys * kDim * 2;
  static constexpr int kQueryBlock = kQueries * 128;  // 64 columns of a tile
  static constexpr int kKeyBlock = kKeys * 128;
  static constexpr int kGradientTile = kKeys * kQueries * 2;  // dS^T
  // A consumer group computes half of the rows of dQ, or all rows of half of the columns.
  static constexpr bool kByRows = kQueries == 128;
  static constexpr int kColumns = kByRows ? kDim : kDim / 2;
  static constexpr int kStagingBox = kStagedRows * 128;  // 32 columns
  static constexpr int kStagingOfGroup = kColumns / 32 * kStagingBox;

  static constexpr int kK = 0;
  static constexpr int kV = kK + 2 * kKeyTile;
  static constexpr int kQ = kV + kKeyTile;
  static constexpr int kDout = kQ + kStages * kQueryTile;
  static constexpr int kDs = kDout + kStages * kQueryTile;
  static constexpr int kStaging = kDs + 2 * kGradientTile;
  static constexpr int kLse = kStaging + 2 * kStagingOfGroup;   // -L * log2(e)
  static constexpr int kDelta = kLse + kStages * kQueries * 4;  // -delta * delta_scale
  static constexpr int kQueryWords = kDelta + kStages * kQueries * 4;
  static constexpr int kKeyWords = kQueryWords + kStages * kQueries * 4;
  static constexpr int kPeriod = kKeyWords + kKeys * 4;   // fp16 [16 keys][4][4 queries]
  static constexpr int kWeights = kPeriod + 16 * 16 * 2;  // fp32, by common repeats
  static constexpr int kStepNotes = kWeights + 16 * 4;    // 4, because writers lag by up to 3 steps
  static constexpr int kTileNotes = kStepNotes + 4 * kStepNote;
  static constexpr int kDrawn = kTileNotes + 2 * static_cast<int>(sizeof(TileNote));  // items
  static constexpr int kBarriers = kDrawn + 4 * 4;

  // Full and empty pairs; `stage`, `buffer`: step % 2, `tile`: tile % 2, `group`: of warps.
  static constexpr int q_full(int stage) { return kBarriers + 8 * stage; }
  static constexpr int dout_full(int stage) { return kBarriers + 8 * (2 + stage); }
  static constexpr int q_empty(int stage) { return kBarriers + 8 * (4 + stage); }  // and dO
  static constexpr int ds_full(int buffer) { return kBarriers + 8 * (6 + buffer); }
  static constexpr int ds_empty(int buffer) { return kBarriers + 8 * (8 + buffer); }
  static constexpr int k_full(int tile) { return kBarriers + 8 * (10 + tile); }
  static constexpr int k_empty(int tile) { return kBarriers + 8 * (12 + tile); }
  // One for even and one for odd steps: staging is announced a step late, and a waiting thread must
  // not miss a phase.
  static constexpr int staged(int group, int buffer) {
    return kBarriers + 8 * (14 + group + 2 * buffer);
  }
  static constexpr int staging_empty(int group) { return kBarriers + 8 * (18 + group); }
  static constexpr int v_full() { return kBarriers + 8 * 20; }
  static constexpr int v_empty() { return kBarriers + 8 * 21; }
  static constexpr int drawn(int tile) { return kBarriers + 8 * (22 + tile); }
  static constexpr int draw() { return kBarriers + 8 * 24; }
  static constexpr int kBytes = kBarriers + 8 * 25;
  static_assert(kBytes <= 232448);
};

__device__ __forceinline__ std::int32_t load_word(std::uint32_t address) {
  std::int32_t word;
  asm volatile("ld.shared.s32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
  return word;
}
__device__ __forceinline__ int2 load_words2(std::uint32_t address) {
  int2 words;
  asm volatile("ld.shared.v2.s32 {%0, %1}, [%2];"
               : "=r"(words.x), "=r"(words.y)
               : "r"(address)
               : "memory");
  return words;
}
__device__ __forceinline__ int4 load_words4(std::uint32_t address) {
  int4 words;
  asm volatile("ld.shared.v4.s32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "r"(address)
               : "memory");
  return words;
}
__device__ __forceinline__ float load_float(std::uint32_t address) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
  return value;
}
// No memory clobber: the main loop may reorder these within a step.
__device__ __forceinline__ float2 load_floats2(std::uint32_t address) {
  float2 values;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(values.x), "=f"(values.y) : "r"(address));
  return values;
}
__device__ __forceinline__ float4 load_floats4(std::uint32_t address) {
  float4 values;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(values.x), "=f"(values.y), "=f"(values.z), "=f"(values.w)
               : "r"(address)
               : "memory");
  return values;
}
__device__ __forceinline__ void store_word(std::uint32_t address, std::int32_t word) {
  asm volatile("st.shared.s32 [%0], %1;" ::"r"(address), "r"(word) : "memory");
}
__device__ __forceinline__ void store_words4(std::uint32_t address, std::int32_t a, std::int32_t b,
                                             std::int32_t c, std::int32_t d) {
  asm volatile("st.shared.v4.s32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b), "r"(c),
               "r"(d)
               : "memory");
}
__device__ __forceinline__ void store_longs2(std::uint32_t address, std::int64_t a,
                                             std::int64_t b) {
  asm volatile("st.shared.v2.s64 [%0], {%1, %2};" ::"r"(address), "l"(a), "l"(b) : "memory");
}
__device__ __forceinline__ std::int64_t load_long(std::uint32_t address) {
  std::int64_t value;
  asm volatile("ld.shared.s64 %0, [%1];" : "=l"(value) : "r"(address) : "memory");
  return value;
}
__device__ __forceinline__ void store_float(std::uint32_t address, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}
__device__ __forceinline__ void store_floats2(std::uint32_t address, float a, float b) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(a), "f"(b) : "memory");
}
__device__ __forceinline__ void store_floats4(std::uint32_t address, float a, float b, float c,
                                              float d) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(a), "f"(b), "f"(c),
               "f"(d)
               : "memory");
}
// Adds in L2, without a result.
__device__ __forceinline__ void add_to_global(float* address, const float4& value) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address),
               "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w)
               : "memory");
}

}  // namespace annulus::cuda::sm90
