#include "kernels/cuda/rows/access.cuh"
#include "kernels/cuda/rows/kept.cuh"
#include "kernels/cuda/rows/kernels.h"

#include <cmath>
#include <initializer_list>

// Row kernels before and after backward. Common rows (16 bits, head dim a power of 2, aligned) are
// processed 16 bytes per lane with several rows in flight, others element by element.
namespace annulus::cuda {
namespace {

// Rows per thread; 1 to 8 are equally fast. Persistent blocks were 7 % slower, streaming hints 5 %
// (bare loops on an H200: 4.1 TB/s before backward, 4.3 after it, a copy 4.2).
constexpr int kInFlight = 2;

bool has_usual_rows(const RowSpace& space, int head_dim, DType dtype) {
  return dtype != DType::f32 &&
         (head_dim == 32 || head_dim == 64 || head_dim == 128 || head_dim == 256) &&
         space.rows() < std::int64_t{1} << 30;
}

// Merges axes to one if the rows of all tensors are evenly spaced, so that kernels need no
// division.
RowSpace flatten(const RowSpace& space, std::initializer_list<TensorRows*> tensors) {
  for (const TensorRows* rows : tensors) {
    if (rows->row_step != space.heads * rows->head_step ||
        (space.batch > 1 && rows->batch_step != space.tokens * rows->row_step))
      return space;
  }
  for (TensorRows* rows : tensors) rows->row_step = rows->head_step;
  return {1, space.rows(), 1};
}

struct Place {
  std::uint32_t batch, token, head;
};
__device__ __forceinline__ Place place_of(const RowSpace& space, std::uint32_t row) {
  if (space.heads == 1 && space.batch == 1) return {0, row, 0};
  const auto heads = static_cast<std::uint32_t>(space.heads);
  const auto tokens = static_cast<std::uint32_t>(space.tokens);
  const std::uint32_t of_all = row / heads;
  const std::uint32_t batch = of_all / tokens;
  return {batch, of_all - batch * tokens, row - of_all * heads};
}
__device__ __forceinline__ std::byte* placed(const TensorRows& rows, const Place& at) {
  return row_at(rows, at.batch, at.token, static_cast<int>(at.head));
}

__device__ __forceinline__ float2 widen(__nv_bfloat162 pair) { return __bfloat1622float2(pair); }
__device__ __forceinline__ float2 widen(__half2 pair) { return __half22float2(pair); }
__device__ __forceinline__ std::uint32_t round_pair(float a, float b, __nv_bfloat162) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
  return *reinterpret_cast<const std::uint32_t*>(&pair);
}
__device__ __forceinline__ std::uint32_t round_pair(float a, float b, __half2) {
  const __half2 pair = __floats2half2_rn(a, b);
  return *reinterpret_cast<const std::uint32_t*>(&pair);
}

template <typename Pair>
__device__ __forceinline__ float dot(const uint4& a, const uint4& b) {
  const std::uint32_t of_a[] = {a.x, a.y, a.z, a.w};
  const std::uint32_t of_b[] = {b.x, b.y, b.z, b.w};
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 x = widen(*reinterpret_cast<const Pair*>(&of_a[i]));
    const float2 y = widen(*reinterpret_cast<const Pair*>(&of_b[i]));
    sum = fmaf(x.x, y.x, fmaf(x.y, y.y, sum));
  }
  return sum;
}

__device__ void clear_counters(const StatisticsParams& p) {
  const unsigned threads = gridDim.x * kThreads;
  for (unsigned i = blockIdx.x * kThreads + threadIdx.x; i < static_cast<unsigned>(p.counter_count);
       i += threads)
    p.counters[i] = 0;
}

// A row of o is 16 bytes for each of kLanes lanes. Statistics are stored head by head, in `space`.
template <typename Pair, int kLanes>
__global__ void __launch_bounds__(kThreads)
    usual_statistics_kernel(const __grid_constant__ StatisticsParams p, RowSpace space) {
  constexpr std::uint32_t kRows = kThreads / kLanes;  // rows per block and iteration
  const auto rows = static_cast<std::uint32_t>(p.space.batch * p.space.tokens * p.space.heads);
  const std::uint32_t lane = threadIdx.x % kLanes;
  const std::uint32_t first = blockIdx.x * kRows * kInFlight + threadIdx.x / kLanes;
  clear_counters(p);
  uint4 o[kInFlight];
  uint4 g[kInFlight];
  float lse[kInFlight];
#pragma unroll
  for (int i = 0; i < kInFlight; ++i) {
    o[i] = g[i] = {};
    lse[i] = 0;
    if (first + i * kRows >= rows) continue;
    const Place at = place_of(p.space, first + i * kRows);
    o[i] = __ldg(reinterpret_cast<const uint4*>(placed(p.o, at)) + lane);
    g[i] = __ldg(reinterpret_cast<const uint4*>(placed(p.dout, at)) + lane);
    lse[i] = *reinterpret_cast<const float*>(placed(p.lse, at));
  }
#pragma unroll
  for (int i = 0; i < kInFlight; ++i) {
    if (first + i * kRows < rows && p.dq.base != nullptr) {
      auto* dq = reinterpret_cast<uint4*>(placed(p.dq, place_of(p.space, first + i * kRows)));
      dq[lane] = uint4{};
      dq[kLanes + lane] = uint4{};
    }
  }
#pragma unroll
  for (int i = 0; i < kInFlight; ++i) {
    float sum = dot<Pair>(o[i], g[i]);
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(~0U, sum, step);
    if (lane == 0 && first + i * kRows < rows) {
      *reinterpret_cast<float4*>(placed(p.statistics, place_of(space, first + i * kRows))) =
          make_float4(lse[i], sum * p.unscale, 0, 0);
    }
  }
}

__device__ float dot(const std::byte* a, const std::byte* b, DType dtype, int head_dim, int lane) {
  float sum = 0;
  for (int d = lane; d < head_dim; d += 32) sum = fmaf(load(a, dtype, d), load(b, dtype, d), sum);
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffU, sum, step);
  return sum;
}

__global__ void statistics_kernel(const __grid_constant__ StatisticsParams p) {
  clear_counters(p);
  for_each_row(p.space, [&](std::int64_t b, std::int64_t t, int h, int lane) {
    if (p.dq.base != nullptr) {
      auto* dq = reinterpret_cast<float*>(row_at(p.dq, b, t, h));
      for (int d = lane; d < p.head_dim; d += 32) dq[d] = 0;
    }
    const std::byte* g = row_at(p.dout, b, t, h);
    auto* out = reinterpret_cast<float*>(row_at(p.statistics, b, t, h));
    if (lane == 0) out[0] = *reinterpret_cast<const float*>(row_at(p.lse, b, t, h));
    if (p.kept.branches == 0) {
      const float sum = dot(row_at(p.o, b, t, h), g, p.dtype, p.head_dim, lane);
      if (lane == 0) out[1] = sum * p.unscale;
      return;
    }
    const std::int64_t row_bytes = p.head_dim * (p.dtype == DType::f32 ? 4 : 2);
    for (int branch = 0; branch < p.kept.branches; ++branch) {
      const std::int64_t row = kept_row(p.kept, branch, b, h, t);
      const bool written = row >= 0 && p.branch_lse[row] != -INFINITY;
      const float sum =
          written ? dot(p.branch_o + row * row_bytes, g, p.dtype, p.head_dim, lane) : 0.0F;
      if (lane == 0) out[1 + branch] = sum;
    }
  });
}

template <typename Word>
__global__ void clear_kernel(TensorRows rows, RowSpace space, int words) {
  for_each_row(space, [&](std::int64_t b, std::int64_t t, int h, int lane) {
    auto* row = reinterpret_cast<Word*>(row_at(rows, b, t, h));
    for (int i = lane; i < words; i += 32) row[i] = Word{};
  });
}

struct RoundParams {
  RoundedRows tensors[kMostRounded];  // indexed by blockIdx.y
  int head_dim = 0;
  DType dtype = DType::f32;
  float factor = 1;
};

// Converts the columns of 8 lanes, 4 each, from the order of dealt_column to the usual one.
__device__ __forceinline__ uint2 gather_dealt(uint2 words) {
  const int to = static_cast<int>(threadIdx.x) & 7;  // columns 4 * to ... 4 * to + 3
  const int from = (threadIdx.x & 24) + (to & 1) * 4 + to / 4;
  uint2 out;
  std::uint32_t low = __shfl_sync(~0U, words.x, from);
  std::uint32_t high = __shfl_sync(~0U, words.y, from);
  out.x = (to & 2) == 0 ? low : high;
  low = __shfl_sync(~0U, words.x, from + 2);
  high = __shfl_sync(~0U, words.y, from + 2);
  out.y = (to & 2) == 0 ? low : high;
  return out;
}

// A row of sums is 16 bytes for each of kLanes lanes.
template <typename Pair, int kLanes>
__global__ void __launch_bounds__(kThreads)
    usual_round_kernel(const __grid_constant__ RoundParams p) {
  constexpr std::uint32_t kRows = kThreads / kLanes;
  const RoundedRows& of = p.tensors[blockIdx.y];
  const auto rows = static_cast<std::uint32_t>(of.space.batch * of.space.tokens * of.space.heads);
  const std::uint32_t lane = threadIdx.x % kLanes;
  const std::uint32_t first = blockIdx.x * kRows * kInFlight + threadIdx.x / kLanes;
  float4 sums[kInFlight] = {};
#pragma unroll
  for (int i = 0; i < kInFlight; ++i) {
    if (first + i * kRows < rows)
      sums[i] = reinterpret_cast<const float4*>(
          placed(of.from, place_of(of.space, first + i * kRows)))[lane];
  }
#pragma unroll
  for (int i = 0; i < kInFlight; ++i) {
    uint2 words = make_uint2(round_pair(sums[i].x * p.factor, sums[i].y * p.factor, Pair()),
                             round_pair(sums[i].z * p.factor, sums[i].w * p.factor, Pair()));
    if (of.dealt) words = gather_dealt(words);
    if (first + i * kRows >= rows) continue;
    reinterpret_cast<uint2*>(placed(of.to, place_of(of.space, first + i * kRows)))[lane] = words;
  }
}

__global__ void round_kernel(const __grid_constant__ RoundParams p) {
  const RoundedRows& of = p.tensors[blockIdx.y];
  for_each_row(of.space, [&](std::int64_t b, std::int64_t t, int h, int lane) {
    const auto* source = reinterpret_cast<const float*>(row_at(of.from, b, t, h));
    std::byte* target = row_at(of.to, b, t, h);
    for (int d = lane; d < p.head_dim; d += 32)
      store(target, p.dtype, d, source[of.dealt ? dealt_column(d) : d] * p.factor);
  });
}

// Calls use(pair of numbers, std::integral_constant<int, lanes>).
template <typename Use>
void with_lanes(DType dtype, int lanes, const Use& use) {
  const auto with_pair = [&](auto pair) {
    switch (lanes) {
      case 4:
        use(pair, std::integral_constant<int, 4>());
        break;
      case 8:
        use(pair, std::integral_constant<int, 8>());
        break;
      case 16:
        use(pair, std::integral_constant<int, 16>());
        break;
      case 32:
        use(pair, std::integral_constant<int, 32>());
        break;
      default:
        use(pair, std::integral_constant<int, 64>());
        break;
    }
  };
  if (dtype == DType::bf16) {
    with_pair(__nv_bfloat162());
  } else {
    with_pair(__half2());
  }
}

unsigned usual_blocks(std::int64_t rows, int lanes) {
  const std::int64_t each = static_cast<std::int64_t>(kThreads / lanes) * kInFlight;
  return static_cast<unsigned>(std::max<std::int64_t>(1, (rows + each - 1) / each));
}

}  // namespace

cudaError_t fill_statistics(const StatisticsParams& params, cudaStream_t stream) {
  if (params.space.rows() == 0 && params.counter_count == 0) return cudaSuccess;
  const bool usual = has_usual_rows(params.space, params.head_dim, params.dtype) &&
                     params.kept.branches == 0 && is_aligned(params.o) && is_aligned(params.dout) &&
                     is_aligned(params.statistics) && is_aligned(params.dq);
  if (usual) {
    StatisticsParams p = params;
    p.space = p.dq.base == nullptr ? flatten(p.space, {&p.lse, &p.o, &p.dout})
                                   : flatten(p.space, {&p.lse, &p.o, &p.dout, &p.dq});
    const int lanes = p.head_dim / 8;
    const unsigned blocks = usual_blocks(p.space.rows(), lanes);
    with_lanes(p.dtype, lanes, [&](auto pair, auto lanes_of) {
      usual_statistics_kernel<decltype(pair), std::min(32, decltype(lanes_of)::value)>
          <<<blocks, kThreads, 0, stream>>>(p, params.space);
    });
  } else {
    statistics_kernel<<<blocks_for(params.space.rows()), kThreads, 0, stream>>>(params);
  }
  return cudaGetLastError();
}

cudaError_t clear_rows(const TensorRows& rows, const RowSpace& space, std::int64_t row_bytes,
                       cudaStream_t stream) {
  if (space.rows() == 0) return cudaSuccess;
  const unsigned blocks = blocks_for(space.rows());
  if (is_aligned(rows) && row_bytes % 16 == 0) {
    clear_kernel<uint4>
        <<<blocks, kThreads, 0, stream>>>(rows, space, static_cast<int>(row_bytes / 16));
  } else {
    clear_kernel<std::uint32_t>
        <<<blocks, kThreads, 0, stream>>>(rows, space, static_cast<int>(row_bytes / 4));
  }
  return cudaGetLastError();
}

cudaError_t round_rows(std::span<const RoundedRows> tensors, int head_dim, DType dtype,
                       float factor, cudaStream_t stream) {
  RoundParams p;
  p.head_dim = head_dim;
  p.dtype = dtype;
  p.factor = factor;
  unsigned count = 0;
  std::int64_t most = 0;
  bool usual = true;
  for (RoundedRows of : tensors) {
    if (of.space.rows() == 0) continue;
    usual = usual && has_usual_rows(of.space, head_dim, dtype) && is_aligned(of.from) &&
            is_aligned(of.to);
    most = std::max(most, of.space.rows());
    of.space = flatten(of.space, {&of.from, &of.to});
    p.tensors[count++] = of;
  }
  if (count == 0) return cudaSuccess;
  if (usual) {
    const int lanes = head_dim / 4;
    const dim3 grid(usual_blocks(most, lanes), count);
    with_lanes(dtype, lanes, [&](auto pair, auto lanes_of) {
      usual_round_kernel<decltype(pair), decltype(lanes_of)::value>
          <<<grid, kThreads, 0, stream>>>(p);
    });
  } else {
    round_kernel<<<dim3(blocks_for(most), count), kThreads, 0, stream>>>(p);
  }
  return cudaGetLastError();
}

}  // namespace annulus::cuda
