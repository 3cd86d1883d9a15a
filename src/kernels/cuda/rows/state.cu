#include "kernels/cuda/rows/access.cuh"
#include "kernels/cuda/rows/kept.cuh"
#include "kernels/cuda/rows/kernels.h"
#include "kernels/cuda/rows/sink.cuh"

#include <cmath>

namespace annulus::cuda {
namespace {

__global__ void fill_kernel(TensorRows rows, RowSpace space, float value) {
  const std::int64_t count = space.batch * space.tokens * space.heads;
  for (std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
       row < count; row += static_cast<std::int64_t>(gridDim.x) * kThreads) {
    *reinterpret_cast<float*>(row_at(rows, row / space.heads / space.tokens,
                                     row / space.heads % space.tokens,
                                     static_cast<int>(row % space.heads))) = value;
  }
}

// Four numbers as one vector.
__device__ void store4(std::byte* to, DType dtype, const float4& x) {
  if (dtype == DType::f32) {
    *reinterpret_cast<float4*>(to) = x;
    return;
  }
  const auto pair = [&](float low, float high) -> unsigned {
    if (dtype == DType::bf16) {
      const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
      return *reinterpret_cast<const unsigned*>(&both);
    }
    const __half2 both = __floats2half2_rn(low, high);
    return *reinterpret_cast<const unsigned*>(&both);
  };
  *reinterpret_cast<uint2*>(to) = make_uint2(pair(x.x, x.y), pair(x.z, x.w));
}

__global__ void finish_kernel(const __grid_constant__ FinishParams p) {
  for_each_row(p.space, [&](std::int64_t b, std::int64_t t, int h, int lane) {
    auto* const lse = reinterpret_cast<float*>(row_at(p.lse, b, t, h));
    const auto* state = reinterpret_cast<const float*>(row_at(p.state, b, t, h));
    std::byte* out = row_at(p.out, b, t, h);
    // The factor of O; for a row without keys, the new value of O.
    const auto end_row = [&](float l) {
      if (p.sinks.base == nullptr) return l == -INFINITY ? 0.0F : p.factor;
      const WithSink row = with_sink(l, sink_of(p.sinks, h));
      __syncwarp();  // every lane has read L
      if (lane == 0) *lse = row.lse;
      return row.kept * p.factor;
    };
    const bool aligned =
        (reinterpret_cast<std::uintptr_t>(state) | reinterpret_cast<std::uintptr_t>(out)) % 16 == 0;
    if (aligned && p.head_dim <= 128 && p.head_dim % 4 == 0 && !p.only_empty) {
      // Reads O of empty rows, too, although it was never written, so that the loads need not wait
      // for lse.
      const bool mine = lane * 4 < p.head_dim;
      const float4 x =
          mine ? __ldcs(reinterpret_cast<const float4*>(state) + lane) : make_float4(0, 0, 0, 0);
      const float l = *lse;
      const float f = end_row(l);
      if (!mine) return;
      store4(out + lane * (p.dtype == DType::f32 ? 16 : 8), p.dtype,
             l == -INFINITY ? make_float4(f, f, f, f)
                            : make_float4(x.x * f, x.y * f, x.z * f, x.w * f));
      return;
    }
    const float l = *lse;
    if (l != -INFINITY && p.only_empty) return;
    const float f = end_row(l);
    for (int d = lane; d < p.head_dim; d += 32)
      store(out, p.dtype, d, l == -INFINITY ? f : state[d] * f);
  });
}

__global__ void merge_kernel(const __grid_constant__ MergeParams p) {
  for_each_row(p.space, [&](std::int64_t b, std::int64_t t, int h, int lane) {
    float highest = -INFINITY;
    bool poisoned = false;
    for (int branch = 0; branch < p.kept.branches; ++branch) {
      const std::int64_t row = kept_row(p.kept, branch, b, h, t);
      if (row < 0) continue;
      const float l = p.branch_lse[row];
      poisoned = poisoned || isnan(l);
      highest = fmaxf(highest, l);
    }
    const bool empty = highest == -INFINITY && !poisoned;
    double sum = 0;
    for (int branch = 0; branch < p.kept.branches && !empty; ++branch) {
      const std::int64_t row = kept_row(p.kept, branch, b, h, t);
      if (row >= 0 && p.branch_lse[row] != -INFINITY)
        sum += exp(static_cast<double>(p.branch_lse[row]) - highest);
    }
    const WithSink end =
        with_sink(empty ? -INFINITY : static_cast<float>(highest + log(sum)), sink_of(p.sinks, h));
    if (lane == 0) *reinterpret_cast<float*>(row_at(p.lse, b, t, h)) = end.lse;
    const float factor = empty && end.kept == 0 ? p.factor : p.factor * end.kept;
    std::byte* out = row_at(p.out, b, t, h);
    const std::int64_t kept_bytes = p.head_dim * (p.dtype == DType::f32 ? 4 : 2);
    for (int d = lane; d < p.head_dim; d += 32) {
      float value = 0;
      for (int branch = 0; branch < p.kept.branches && !empty; ++branch) {
        const std::int64_t row = kept_row(p.kept, branch, b, h, t);
        if (row < 0 || p.branch_lse[row] == -INFINITY) continue;  // its O was never written
        const auto weight =
            static_cast<float>(exp(static_cast<double>(p.branch_lse[row]) - highest) / sum);
        const float o = p.branch_o[row * p.head_dim + d];
        value = fmaf(weight, o, value);
        if (p.kept_o != nullptr) store(p.kept_o + row * kept_bytes, p.dtype, d, o);
      }
      store(out, p.dtype, d, value * factor);
    }
  });
}

// Rows of a section of an item: in the parcel and in the shard.
struct CopiedRows {
  std::byte* parcel;
  std::byte* local;
  std::int64_t parcel_step;
  std::int64_t local_step;
  unsigned bytes;    // of a row
  unsigned padding;  // after it in the parcel, in bytes
  unsigned rows;

  [[nodiscard]] __device__ bool aligned(unsigned to) const {
    return (reinterpret_cast<std::uintptr_t>(parcel) | reinterpret_cast<std::uintptr_t>(local) |
            static_cast<std::uintptr_t>(parcel_step) | static_cast<std::uintptr_t>(local_step) |
            bytes) %
               to ==
           0;
  }
};

// Calls use(CopiedRows) for every section of every item, with a block per section.
template <typename Use>
__device__ void for_each_copy(const CopyParams& p, const Use& use) {
  for (std::int64_t i = blockIdx.x; i < p.count; i += gridDim.x) {
    const CopyItem item = p.items[i];
    std::int64_t before = 0;
    for (int s = 0; s < p.sections; ++s) {
      const std::int64_t bytes = p.section_bytes[s];
      use(CopiedRows{
          p.buffer + item.unit_offset + before * item.unit_rows + item.parcel_first * bytes,
          row_at(p.rows[s], item.batch, item.local_first, item.head), item.parcel_stride * bytes,
          item.local_stride * p.rows[s].row_step, static_cast<unsigned>(p.content_bytes[s]),
          static_cast<unsigned>(bytes - p.content_bytes[s]), static_cast<unsigned>(item.count)});
      before += bytes;
    }
  }
}

// A block calls load(parcel's word, shard's word, i) for every word of the rows, then store(...)
// for the same words: four at a time, i = 0 to 3, to have enough loads in flight.
template <typename Word, typename Load, typename Store>
__device__ void for_each_word(const CopiedRows& rows, const Load& load, const Store& store) {
  constexpr unsigned kAtOnce = 4;
  const unsigned in_row = rows.bytes / sizeof(Word);
  const unsigned words = rows.rows * in_row;
  for (unsigned first = threadIdx.x; first < words; first += kAtOnce * kThreads) {
    Word* parcel[kAtOnce];
    Word* local[kAtOnce];
#pragma unroll
    for (unsigned i = 0; i < kAtOnce; ++i) {
      const unsigned word = first + i * kThreads;
      const unsigned row = word / in_row;
      const unsigned column = word - row * in_row;
      parcel[i] = reinterpret_cast<Word*>(rows.parcel + row * rows.parcel_step) + column;
      local[i] = reinterpret_cast<Word*>(rows.local + row * rows.local_step) + column;
      if (word < words) load(parcel[i], local[i], i);
    }
#pragma unroll
    for (unsigned i = 0; i < kAtOnce; ++i) {
      if (first + i * kThreads < words) store(parcel[i], local[i], i);
    }
  }
}

template <typename Word>
__device__ void pack_words(const CopiedRows& rows) {
  Word words[4];
  for_each_word<Word>(
      rows, [&](const Word*, const Word* local, unsigned i) { words[i] = *local; },
      [&](Word* parcel, const Word*, unsigned i) { *parcel = words[i]; });
}

__global__ void pack_kernel(const __grid_constant__ CopyParams p) {
  for_each_copy(p, [](const CopiedRows& rows) {
    if (rows.aligned(16)) {
      pack_words<uint4>(rows);
    } else if (rows.aligned(4)) {
      pack_words<std::uint32_t>(rows);
    } else {
      pack_words<std::uint16_t>(rows);
    }
    const unsigned zeros = rows.padding / 2;
    for (unsigned i = threadIdx.x; i < rows.rows * zeros; i += kThreads) {
      std::byte* const behind = rows.parcel + i / zeros * rows.parcel_step + rows.bytes;
      reinterpret_cast<std::uint16_t*>(behind)[i % zeros] = 0;
    }
  });
}

__global__ void add_kernel(const __grid_constant__ CopyParams p) {
  for_each_copy(p, [](const CopiedRows& rows) {
    if (rows.aligned(16)) {
      float4 more[4];
      float4 sums[4];
      for_each_word<float4>(
          rows,
          [&](const float4* parcel, const float4* local, unsigned i) {
            more[i] = __ldcs(parcel);
            sums[i] = *local;
          },
          [&](const float4*, float4* local, unsigned i) {
            *local = make_float4(sums[i].x + more[i].x, sums[i].y + more[i].y,
                                 sums[i].z + more[i].z, sums[i].w + more[i].w);
          });
    } else {
      for_each_word<float>(
          rows, [](const float*, const float*, unsigned) {},
          [](const float* parcel, float* local, unsigned) { *local += *parcel; });
    }
  });
}

}  // namespace

cudaError_t fill_rows(const TensorRows& rows, const RowSpace& space, float value,
                      cudaStream_t stream) {
  if (space.rows() == 0) return cudaSuccess;
  fill_kernel<<<blocks_for((space.rows() + 31) / 32), kThreads, 0, stream>>>(rows, space, value);
  return cudaGetLastError();
}

cudaError_t finish_rows(const FinishParams& params, cudaStream_t stream) {
  if (params.space.rows() == 0) return cudaSuccess;
  finish_kernel<<<blocks_for(params.space.rows()), kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

cudaError_t merge_branches(const MergeParams& params, cudaStream_t stream) {
  if (params.space.rows() == 0) return cudaSuccess;
  merge_kernel<<<blocks_for(params.space.rows()), kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

cudaError_t pack_rows(const CopyParams& params, cudaStream_t stream) {
  if (params.count == 0) return cudaSuccess;
  pack_kernel<<<blocks_for(params.count * kWarps), kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

cudaError_t add_rows(const CopyParams& params, cudaStream_t stream) {
  if (params.count == 0) return cudaSuccess;
  add_kernel<<<blocks_for(params.count * kWarps), kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace annulus::cuda
