#pragma once

#include <cstdint>
#include <span>

#include "kernels/cuda/launch.h"
#include "kernels/kept_rows.h"

// Kernels for rows, besides attention. All of them are bound by memory bandwidth.
namespace annulus::cuda {

// Rows [batch][tokens][heads] of a shard.
struct RowSpace {
  std::int64_t batch = 1;
  std::int64_t tokens = 0;
  int heads = 0;

  [[nodiscard]] std::int64_t rows() const { return batch * tokens * heads; }
};

// Whether rows can be read and written 16 bytes at a time.
[[nodiscard]] __host__ __device__ inline bool is_aligned(const TensorRows& rows) {
  const auto all = static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(rows.base)) |
                   static_cast<std::uint64_t>(rows.batch_step) |
                   static_cast<std::uint64_t>(rows.head_step) |
                   static_cast<std::uint64_t>(rows.row_step);
  return all % 16 == 0;
}

// One float per row.
[[nodiscard]] cudaError_t fill_rows(const TensorRows& rows, const RowSpace& space, float value,
                                    cudaStream_t stream);

// The end of forward: merges sinks into rows, then writes zeros to rows whose lse was -inf. Writes
// the state times a factor, as `dtype`, to the other rows or, if `only_empty`, leaves them
// unchanged.
struct FinishParams {
  RowSpace space;
  TensorRows lse, state, out;
  HeadNumbers sinks;  // not with only_empty
  int head_dim = 0;
  DType dtype = DType::f32;
  float factor = 1;
  bool only_empty = false;
};
[[nodiscard]] cudaError_t finish_rows(const FinishParams& params, cudaStream_t stream);

// KeptRows in device memory.
struct KeptTables {
  const KeptRows::Word* words = nullptr;
  const KeptRows::Head* heads = nullptr;  // [batch entry][branch][head]
  std::int64_t entry_heads = 0;           // between batch entries
  std::int64_t batch_rows = 0;
  std::int32_t branch_heads = 0;
  std::int32_t branches = 0;
};

// The end of forward with detached mixing: merges the branches in one softmax and writes the result
// times a factor, as `dtype`. Rounds the kept outputs of 16-bit calls.
struct MergeParams {
  RowSpace space;
  KeptTables kept;
  const float* branch_o = nullptr;  // fp32 rows
  const float* branch_lse = nullptr;
  std::byte* kept_o = nullptr;  // null: the fp32 rows are the kept ones
  TensorRows lse, out;
  HeadNumbers sinks;
  int head_dim = 0;
  DType dtype = DType::f32;
  float factor = 1;
};
[[nodiscard]] cudaError_t merge_branches(const MergeParams& params, cudaStream_t stream);

// Before backward: writes log-sum-exp and unscale * rowsum(dout * o) of every row, next to each
// other. With detached mixing, it writes rowsum(dout * o of the branch) for every branch instead.
// Also clears the counters of items and the sums of dQ, if they are given.
struct StatisticsParams {
  RowSpace space;
  TensorRows lse, o, dout, statistics;
  TensorRows dq;  // fp32; without a base: not cleared
  std::int32_t* counters = nullptr;
  std::int32_t counter_count = 0;
  int head_dim = 0;
  DType dtype = DType::f32;
  float unscale = 1;
  KeptTables kept;                      // branches 0: not detached
  const std::byte* branch_o = nullptr;  // of the call's dtype
  const float* branch_lse = nullptr;
};
[[nodiscard]] cudaError_t fill_statistics(const StatisticsParams& params, cudaStream_t stream);

// After fill_statistics, if there are sinks: computes their gradients, unless dsinks has no base,
// and subtracts the sinks' part from the deltas of branches (detached mixing).
inline constexpr int kSinkBlocks = 64;
struct SinkParams {
  RowSpace space;
  HeadNumbers sinks, dsinks;
  TensorRows statistics;
  KeptTables kept;  // branches 0: not detached
  const float* branch_lse = nullptr;
  double* sums = nullptr;  // [head][kSinkBlocks], scratch
  double factor = 1;       // output_scale
  bool adds = false;       // adds to the present value of dsinks
};
[[nodiscard]] cudaError_t take_sinks(const SinkParams& params, cudaStream_t stream);

[[nodiscard]] cudaError_t clear_rows(const TensorRows& rows, const RowSpace& space,
                                     std::int64_t row_bytes, cudaStream_t stream);

// After backward: fp32 rows times a factor, as `dtype`.
struct RoundedRows {
  TensorRows from, to;
  RowSpace space;
  bool dealt = false;  // columns of `from`: see dealt_column
};
inline constexpr int kMostRounded = 3;  // dQ, dK, dV
[[nodiscard]] cudaError_t round_rows(std::span<const RoundedRows> tensors, int head_dim,
                                     DType dtype, float factor, cudaStream_t stream);

// Rows of one unit between a shard and a buffer of parcels.
struct CopyItem {
  std::int64_t unit_offset = 0;  // offset of the unit's first section in the buffer
  std::int64_t unit_rows = 0;
  std::int64_t parcel_first = 0;
  std::int64_t parcel_stride = 1;
  std::int64_t local_first = 0;
  std::int64_t local_stride = 1;
  std::int32_t count = 0;
  std::int32_t head = 0;
  std::int32_t batch = 0;
};
inline constexpr int kMaxSections = 3;
inline constexpr int kCopyRows = 64;  // most rows of an item
struct CopyParams {
  const CopyItem* items = nullptr;
  std::int64_t count = 0;
  int sections = 0;
  std::int64_t section_bytes[kMaxSections] = {};  // ParcelLayout's
  std::int64_t content_bytes[kMaxSections] = {};
  TensorRows rows[kMaxSections];
  std::byte* buffer = nullptr;
};
[[nodiscard]] cudaError_t pack_rows(const CopyParams& params, cudaStream_t stream);
[[nodiscard]] cudaError_t add_rows(const CopyParams& params, cudaStream_t stream);

}  // namespace annulus::cuda
