#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

#include "kernels/cuda/launch.h"

// How kernels find the addresses and indices of rows of lists.
namespace annulus::cuda {

// The run that contains row `row` of a list.
__device__ __forceinline__ int run_of(const Run* runs, const RowList& list, int row) {
  int low = list.begin;
  int high = list.begin + list.runs - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (runs[middle].before <= row) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

__device__ __forceinline__ int index_of(const Run& run, int row) {
  return run.index + (row - run.before) * run.index_stride;
}

// The row in its source of row `row` of the list.
__device__ __forceinline__ std::int64_t position_of(const Run& run, int row) {
  return run.first + static_cast<std::int64_t>(row - run.before) * run.stride;
}

// Whose rows: `head` for the shard, `unit` for parcels.
struct RowOwner {
  int batch = 0;
  int head = 0;
  int unit = 0;
};

__device__ __forceinline__ std::byte* row_address(const Channel& channel, const Run& run, int row,
                                                  const RowOwner& owner) {
  const std::int64_t position = position_of(run, row);
  if (run.source < 0) {
    const TensorRows& rows = channel.local;
    return rows.base + owner.batch * rows.batch_step + owner.head * rows.head_step +
           position * rows.row_step;
  }
  const Source& source = channel.sources[run.source];
  const std::int64_t before = owner.batch * source.units + owner.unit;
  return source.base + source.rows * (before * channel.bytes_all + channel.bytes_before) +
         position * channel.row_bytes + channel.row_offset;
}
// The distance of consecutive rows of the run, in bytes.
__device__ __forceinline__ std::int64_t row_step(const Channel& channel, const Run& run) {
  return run.stride * (run.source < 0 ? channel.local.row_step : channel.row_bytes);
}

// Facts about rows [begin, begin + rows) of a list: the run of the first one, whether it contains
// all of them, and their lowest and highest index.
struct RowBlock {
  int begin = 0;
  int rows = 0;
  int run = 0;
  bool whole = false;
  int low = 0;
  int high = 0;
};

__device__ __forceinline__ RowBlock row_block(const Run* runs, const RowList& list, int begin,
                                              int rows) {
  RowBlock block;
  block.begin = begin;
  block.rows = rows;
  block.run = run_of(runs, list, begin);
  block.low = std::numeric_limits<int>::max();
  block.high = std::numeric_limits<int>::min();
  int run = block.run;
  for (int row = begin;; ++run) {
    const Run& at = runs[run];
    const int end = min(begin + rows, at.before + at.count);
    block.low = min(block.low, index_of(at, row));
    block.high = max(block.high, index_of(at, end - 1));
    row = end;
    if (row >= begin + rows) break;
  }
  block.whole = run == block.run;
  return block;
}

}  // namespace annulus::cuda
