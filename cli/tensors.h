#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "annulus/ring_attention.h"
#include "core/memory.h"
#include "core/thread_pool.h"

namespace annulus::cli {

// Tensors of the whole sequence are held once. Their tokens are in ring order: the shard of rank 0,
// then that of rank 1, and so on. So every shard is a strided view and never a copy, whatever the
// placement. For contiguous shards, ring order is the order of the sequence.
class TokenOrder {
 public:
  explicit TokenOrder(const Placement& placement);

  [[nodiscard]] std::int64_t tokens() const { return begins_.back(); }
  [[nodiscard]] std::int64_t begin(int rank) const {
    return begins_[static_cast<std::size_t>(rank)];
  }
  [[nodiscard]] std::int64_t end(int rank) const { return begin(rank + 1); }
  // Index in ring order <-> global position.
  [[nodiscard]] std::int64_t position_of(std::int64_t index) const {
    return positions_.empty() ? index : positions_[static_cast<std::size_t>(index)];
  }
  [[nodiscard]] std::int64_t index_of(std::int64_t position) const {
    return indices_.empty() ? position : indices_[static_cast<std::size_t>(position)];
  }

 private:
  std::vector<std::int64_t> begins_;     // per rank, and the end
  std::vector<std::int64_t> positions_;  // empty: the identity
  std::vector<std::int64_t> indices_;
};

// [batch, tokens, heads, head_dim] in ring order, uninitialised; head_dim 0 means that the axis is
// absent (log-sum-exp). Costs nothing before it is written.
class RingTensor {
 public:
  RingTensor() = default;
  RingTensor(const char* name, DType dtype, std::int64_t batch, const TokenOrder& order, int heads,
             int head_dim);

  [[nodiscard]] const TensorView& view() const { return view_; }
  [[nodiscard]] TensorView shard(const TokenOrder& order, int rank) const;
  [[nodiscard]] std::int64_t shard_bytes(const TokenOrder& order, int rank) const;
  // The vector of one (batch, token, head), in elements from the start; `index` is in ring order.
  [[nodiscard]] std::int64_t row(std::int64_t batch, std::int64_t index, int head) const {
    return batch * view_.stride[0] + index * view_.stride[1] + head * view_.stride[2];
  }
  // That vector in fp64.
  void load_row(std::int64_t batch, std::int64_t index, int head, std::span<double> out) const;

 private:
  Memory buffer_;
  TensorView view_;
};

// Everything that one forward and backward read and write.
struct JobTensors {
  explicit JobTensors(const RingOptions& options);

  TokenOrder order;
  RingTensor q, k, v, o, lse;
  RingTensor dout, dq, dk, dv;  // empty without backward
  std::uint64_t dropout_seed = 1;

  [[nodiscard]] std::int64_t shard_bytes(int rank) const;
};

// Fills a rank's shards of q, k, v and dout with numbers of mean 0 and variance 1 that depend on
// the seed and the place in the tensor alone, so that all rings compute the same problem.
void fill_synthetic(JobTensors& tensors, int rank, std::uint64_t seed, ThreadPool& pool);

// Writes to the pages of a rank's outputs, so that the first repetition does not measure the page
// allocator.
void touch_outputs(JobTensors& tensors, int rank, ThreadPool& pool);

}  // namespace annulus::cli
