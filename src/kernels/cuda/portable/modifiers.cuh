#pragma once

#include "kernels/cuda/launch.h"
#include "kernels/cuda/portable/rows.cuh"

// Softcap and dropout, for kernels that are compiled with kModified.
namespace annulus::cuda {

// Calls use(std::bool_constant<kModified>).
template <typename Use>
cudaError_t with_modified(const Modifiers& modifiers, const Use& use) {
  return modifiers.any() ? use(std::true_type()) : use(std::false_type());
}

// A score in log2 units, and its derivative by scale * q.k.
struct Score {
  float value;
  float slope;
};
__device__ inline Score modified_score(const KernelShape& shape, const Modifiers& modifiers,
                                       float product) {
  const float s = product * shape.scale;
  const float cap = modifiers.softcap;
  if (cap == 0) return {s * kLog2E, 1.0F};
  const float u = tanhf(s / cap);
  return {u * (cap * kLog2E), fmaf(-u, u, 1.0F)};
}

// Of the pairs of one query head and batch entry.
struct PairWords {
  dropout::Head head;
  std::int64_t first_query;
  std::int64_t first_key;
  std::int64_t step;

  __device__ PairWords(const Modifiers& modifiers, const Group& group, int batch, int query_head)
      : head(dropout::head_of(modifiers.seed, batch, query_head)),
        first_query(group.first_query),
        first_key(group.first_key),
        step(group.dilation) {}

  __device__ dropout::Row query(int index) const { return head.row(first_query + step * index); }
  __device__ std::uint32_t key(int index) const { return head.key(first_key + step * index); }
};

// What dropout multiplies the probability of a pair with.
__device__ inline float kept_factor(const DropoutRate& rate, const dropout::Row& row,
                                    std::uint32_t key) {
  return dropout::pair_number(row, key) < rate.threshold ? 0.0F : rate.scale;
}

}  // namespace annulus::cuda
