#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/cached_rows.h"

// Kernels of a cache. Tables travel as kernel parameters: calls upload nothing, and the host never
// waits.
namespace annulus::cuda {

inline constexpr int kMostRuns = 128;    // of a launch
inline constexpr int kMostCopies = 256;  // of a launch
inline constexpr int kMostParts = 1024;  // ranks whose results are merged

// A run, and where its blocks leave their results.
struct AttendRun {
  QueryRun run;
  std::int64_t first_part = 0;
  std::int64_t split_keys = 0;  // of a block
  std::int32_t splits = 1;
};

// A block takes a tile of query rows of one K/V head and one split of the keys. Its results are a
// part: `tile_rows` rows of O and log-sum-exps; if there is one split only, those of the run. Rows
// of a K/V head are numbered token * token_rows + query head of the K/V head.
struct AttendParams {
  TensorRows q;
  CachedKeys keys;
  int heads = 1;
  int kv_heads = 1;
  int head_dim = 0;
  int padded = 0;
  int tile_rows = 1;
  int token_rows = 1;
  float scale = 1;     // of q.k, times log2(e)
  bool early = false;  // see kernels_wait
  float* part_o = nullptr;
  float* part_lse = nullptr;
  int runs = 0;
  AttendRun run[kMostRuns];

  [[nodiscard]] __host__ __device__ int ratio() const { return heads / kv_heads; }
};

// Where a block leaves the results of a row of its tile.
struct ResultRow {
  float* o;
  float* lse;

  __host__ __device__ ResultRow(const AttendParams& p, const AttendRun& item, int tile, int kv_head,
                                int split, int row) {
    std::int64_t at = 0;
    if (item.splits == 1) {
      const int of_head = tile * p.tile_rows + row;
      at = std::int64_t{of_head / p.token_rows} * p.heads + kv_head * p.ratio() +
           of_head % p.token_rows;
      o = item.run.o;
      lse = item.run.lse;
    } else {
      at = (item.first_part + (std::int64_t{tile} * p.kv_heads + kv_head) * item.splits + split) *
               p.tile_rows +
           row;
      o = p.part_o;
      lse = p.part_lse;
    }
    o += at * p.head_dim;
    lse += at;
  }
};

struct CopyRowsParams {
  TensorRows from, to;
  int heads = 1;
  std::int64_t row_bytes = 0;
  int count = 0;
  RowCopy copies[kMostCopies];
};

struct MergeRowsHeader {
  TensorRows o, lse;
  HeadNumbers sinks;
  int heads = 1;
  int head_dim = 0;
  DType dtype = DType::f32;
  bool early = false;  // see kernels_wait
  int parts = 0;
  int count = 0;
};
template <int kParts, int kCopies>
struct MergeRowsTable : MergeRowsHeader {
  PartialRows part[kParts];
  RowCopy copies[kCopies];
};
using MergeRowsParams = MergeRowsTable<kMostParts, kMostCopies>;

// Whether these kernels, as compiled for the current device, wait for those before them by
// themselves (launch.cuh).
[[nodiscard]] bool kernels_wait();

// Rows of 16-bit heads of up to 256 elements, on tensor cores; and any rows.
inline constexpr int kTensorCoreRows = 16;
inline constexpr int kPlainRows = 4;
// How many blocks run on a multiprocessor at a time, where a block may have so much shared memory;
// 0: there is no such kernel on tensor cores.
[[nodiscard]] int tensor_core_blocks(int head_dim, std::size_t shared_bytes);
[[nodiscard]] int plain_blocks(int head_dim);
[[nodiscard]] cudaError_t attend_on_tensor_cores(const AttendParams& params, DType dtype,
                                                 std::size_t shared_bytes, int most_splits,
                                                 int most_tiles, cudaStream_t stream);
[[nodiscard]] cudaError_t attend_plain(const AttendParams& params, DType dtype, int most_splits,
                                       int most_tiles, cudaStream_t stream);
// The parts of every row become its result.
[[nodiscard]] cudaError_t merge_splits(const AttendParams& params, std::int64_t most_tokens,
                                       cudaStream_t stream);

[[nodiscard]] cudaError_t copy_rows(const CopyRowsParams& params, cudaStream_t stream);
[[nodiscard]] cudaError_t merge_rows(const MergeRowsParams& params, cudaStream_t stream);

}  // namespace annulus::cuda
