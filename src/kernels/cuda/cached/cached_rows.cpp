#include "kernels/cuda/cached/cached_rows.h"

#include <algorithm>
#include <limits>
#include <utility>

#include <fmt/format.h>

#include "annulus/error.h"
#include "kernels/cuda/cached/kernels.h"
#include "kernels/cuda/device/runtime.h"
#include "kernels/cuda/portable/tiles.h"

namespace annulus::cuda {
namespace {

// Splits of a tile, at most: merge_splits keeps their weights in shared memory.
constexpr std::int64_t kMostSplits = kMostParts;
// Splits are whole tiles of all warps of a block.
constexpr std::int64_t kSplitStep = 64;
// What starting and ending a block costs, as the number of keys that it could read meanwhile.
constexpr std::int64_t kBlockCost = 192;
// Blocks run in waves of as many as fit: more than so many cost only.
constexpr std::int64_t kMostWaves = 8;

int attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, which, device), "asking for a device's properties");
  return value;
}

class CudaCacheKernels final : public CacheKernels {
 public:
  CudaCacheKernels(const CacheShape& shape, int device) : shape_(shape), device_(device) {
    if (shape.ranks > kMostParts) {
      throw ConfigError(
          fmt::format("the transport has {} ranks, expected {} or fewer for a cache "
                      "on CUDA devices",
                      shape.ranks, kMostParts));
    }
    const DeviceScope scope(device);
    shared_bytes_ = std::min<std::size_t>(
        static_cast<std::size_t>(attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device)),
        allowed_shared_bytes());
    int blocks = shape.dtype == DType::f32 ? 0 : tensor_core_blocks(shape.head_dim, shared_bytes_);
    on_tensor_cores_ = blocks > 0;
    if (!on_tensor_cores_) blocks = plain_blocks(shape.head_dim);
    kernels_wait_ = kernels_wait();
    slots_ = std::int64_t{attribute(cudaDevAttrMultiProcessorCount, device)} * blocks;
  }

  void copy(const TensorRows& from, const TensorRows& to, int heads, std::int64_t row_bytes,
            std::span<const RowCopy> copies, Queue& queue) override {
    const DeviceScope scope(device_);
    CopyRowsParams params;
    params.from = from;
    params.to = to;
    params.heads = heads;
    params.row_bytes = row_bytes;
    for_each_batch(copies, params, [&](const CopyRowsParams& batch) {
      check_launch(copy_rows(batch, stream_of(queue)), "copy_rows", stream_of(queue));
    });
  }

  void reserve(const CachedKeys& keys, std::span<const QueryRun> runs, Queue& queue) override {
    const AttendParams params = params_of({}, keys);
    const std::int64_t split = split_keys(params, runs);
    std::int64_t most_rows = 0;
    for_each_batch(runs, [&](std::span<const QueryRun> batch) {
      std::int64_t rows = 0;
      for (const QueryRun& run : batch) rows += part_rows(params, split, run);
      most_rows = std::max(most_rows, rows);
    });
    const std::int64_t bytes = most_rows * (shape_.head_dim + 1) * 4;
    if (bytes <= parts_.bytes()) return;
    const DeviceScope scope(device_);
    queue.record().wait();  // earlier calls use what there is
    parts_ = {};
    parts_ = allocate_device(device_, bytes, "partial results of a cache");
  }

  void attend(const TensorRows& q, const CachedKeys& keys, std::span<const QueryRun> runs,
              Queue& queue) override {
    const DeviceScope scope(device_);
    AttendParams params = params_of(q, keys);
    const std::int64_t split = split_keys(params, runs);
    for_each_batch(
        runs, [&](std::span<const QueryRun> batch) { attend_batch(params, split, batch, queue); });
  }

  void merge(std::span<const PartialRows> parts, const HeadNumbers& sinks,
             std::span<const RowCopy> copies, const TensorRows& o, const TensorRows& lse,
             Queue& queue) override {
    const DeviceScope scope(device_);
    MergeRowsParams params;
    params.o = o;
    params.lse = lse;
    params.sinks = sinks;
    params.heads = shape_.heads;
    params.head_dim = shape_.head_dim;
    params.dtype = shape_.dtype;
    params.early = kernels_wait_;
    params.parts = static_cast<int>(parts.size());
    std::copy(parts.begin(), parts.end(), params.part);
    for_each_batch(copies, params, [&](const MergeRowsParams& batch) {
      check_launch(merge_rows(batch, stream_of(queue)), "merge_rows", stream_of(queue));
    });
  }

  [[nodiscard]] std::int64_t workspace_bytes() const override { return parts_.bytes(); }

 private:
  [[nodiscard]] AttendParams params_of(const TensorRows& q, const CachedKeys& keys) const {
    const int ratio = shape_.heads / shape_.kv_heads;
    AttendParams params;
    params.q = q;
    params.keys = keys;
    params.heads = shape_.heads;
    params.kv_heads = shape_.kv_heads;
    params.head_dim = shape_.head_dim;
    params.padded = padded_head_dim(shape_.head_dim);
    params.tile_rows = on_tensor_cores_ ? kTensorCoreRows : kPlainRows;
    params.token_rows =
        on_tensor_cores_ ? ratio : (ratio + kPlainRows - 1) / kPlainRows * kPlainRows;
    params.early = kernels_wait_;
    params.scale = static_cast<float>(shape_.scale * 1.4426950408889634);
    return params;
  }

  // Of a launch.
  template <typename Use>
  static void for_each_batch(std::span<const QueryRun> runs, const Use& use) {
    for (std::size_t first = 0; first < runs.size(); first += kMostRuns)
      use(runs.subspan(first, std::min<std::size_t>(kMostRuns, runs.size() - first)));
  }
  template <typename Params, typename Launch>
  static void for_each_batch(std::span<const RowCopy> copies, Params& params,
                             const Launch& launch) {
    for (std::size_t first = 0; first < copies.size(); first += kMostCopies) {
      params.count = static_cast<int>(std::min<std::size_t>(kMostCopies, copies.size() - first));
      std::copy_n(copies.begin() + static_cast<std::ptrdiff_t>(first), params.count, params.copies);
      launch(params);
    }
  }

  [[nodiscard]] static std::int64_t seen_keys(const AttendParams& params, const QueryRun& run) {
    const std::int64_t begin = params.keys.seen_from(run.position, run.length).begin;
    const std::int64_t end = params.keys.seen_from(run.position + run.tokens - 1, run.length).end;
    return std::max<std::int64_t>(0, end - begin);
  }
  [[nodiscard]] static std::int64_t tiles_of(const AttendParams& params, const QueryRun& run) {
    return (run.tokens * params.token_rows + params.tile_rows - 1) / params.tile_rows;
  }

  [[nodiscard]] static std::int64_t splits_of(std::int64_t seen, std::int64_t keys) {
    return std::clamp<std::int64_t>((seen + keys - 1) / keys, 1, kMostSplits);
  }

  // Rows of partial results, where a block has so many keys. A single split has none.
  [[nodiscard]] std::int64_t part_rows(const AttendParams& params, std::int64_t keys,
                                       const QueryRun& run) const {
    const std::int64_t splits = splits_of(seen_keys(params, run), keys);
    return splits == 1 ? 0 : tiles_of(params, run) * shape_.kv_heads * splits * params.tile_rows;
  }

  // Keys of a block. All blocks should end together: as many as run at a time, or a multiple.
  [[nodiscard]] std::int64_t split_keys(const AttendParams& params,
                                        std::span<const QueryRun> runs) const {
    std::int64_t all = 0;
    for (const QueryRun& run : runs)
      all += seen_keys(params, run) * tiles_of(params, run) * shape_.kv_heads;
    std::int64_t best = kSplitStep;
    std::int64_t least_cost = std::numeric_limits<std::int64_t>::max();
    for (std::int64_t waves = 1; waves <= kMostWaves; ++waves) {
      // The last splits of runs are shorter: with splits a little longer there are no more blocks
      // than that.
      for (const std::int64_t longer : {0, 1, 2, 4, 8}) {
        std::int64_t keys = all / (slots_ * waves) * (64 + longer) / 64 + 1;
        keys = (keys + kSplitStep - 1) / kSplitStep * kSplitStep;
        std::int64_t blocks = 0;
        for (const QueryRun& run : runs)
          blocks += splits_of(seen_keys(params, run), keys) * tiles_of(params, run);
        blocks *= shape_.kv_heads;
        const std::int64_t cost = (blocks + slots_ - 1) / slots_ * (keys + kBlockCost);
        if (cost >= least_cost) continue;
        least_cost = cost;
        best = keys;
      }
    }
    return best;
  }

  void attend_batch(AttendParams& params, std::int64_t keys, std::span<const QueryRun> runs,
                    Queue& queue) {
    std::int64_t rows = 0;
    std::int64_t most_splits = 1;
    std::int64_t most_tiles = 1;
    std::int64_t most_tokens = 1;
    params.runs = static_cast<int>(runs.size());
    for (std::size_t i = 0; i < runs.size(); ++i) {
      const std::int64_t tiles = tiles_of(params, runs[i]);
      const std::int64_t seen = seen_keys(params, runs[i]);
      const std::int64_t splits = splits_of(seen, keys);
      const std::int64_t share = (seen + splits - 1) / splits;  // equal ones
      params.run[i] = {runs[i], rows / params.tile_rows,
                       (share + kSplitStep - 1) / kSplitStep * kSplitStep,
                       static_cast<std::int32_t>(splits)};
      rows += part_rows(params, keys, runs[i]);
      most_splits = std::max(most_splits, splits);
      most_tiles = std::max(most_tiles, tiles);
      most_tokens = std::max(most_tokens, runs[i].tokens);
    }
    params.part_lse = parts_.floats();
    params.part_o = parts_.floats() + rows;
    const cudaStream_t stream = stream_of(queue);
    const auto splits = static_cast<int>(most_splits);
    const auto tiles = static_cast<int>(most_tiles);
    check_launch(on_tensor_cores_ ? attend_on_tensor_cores(params, shape_.dtype, shared_bytes_,
                                                           splits, tiles, stream)
                                  : attend_plain(params, shape_.dtype, splits, tiles, stream),
                 "attend", stream);
    if (splits > 1) check_launch(merge_splits(params, most_tokens, stream), "merge_splits", stream);
  }

  const CacheShape shape_;
  const int device_;
  std::size_t shared_bytes_ = 0;  // that a block may have
  bool on_tensor_cores_ = false;
  bool kernels_wait_ = false;
  std::int64_t slots_ = 1;  // blocks that run at a time
  Memory parts_;            // log-sum-exps of all rows, then their O
};

}  // namespace

std::unique_ptr<CacheKernels> make_cache_kernels(const CacheShape& shape, int device) {
  return std::make_unique<CudaCacheKernels>(shape, device);
}

}  // namespace annulus::cuda
