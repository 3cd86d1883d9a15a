// Few queries and many cached keys, for 16-bit rows: bound by memory. The queries that share a K/V
// head are the 16 rows of mma.m16n8k16. Every warp has a pipeline of its own over every fourth tile
// of 16 keys, so that the main loop needs no barrier of the block, and its own softmax; warps are
// merged at the end, blocks by merge_splits.
//
// Keys that all queries of a tile see are computed together and need no mask. What only some of
// them see (new tokens, a window's edge) is computed token by token, and nothing of it reaches the
// other rows: 0 * NaN would.

#include "kernels/cuda/cached/kernels.h"
#include "kernels/cuda/cached/launch.cuh"
#include "kernels/cuda/portable/mma.cuh"
#include "kernels/cuda/rows/access.cuh"

#include <cmath>

namespace annulus::cuda {
namespace {

constexpr int kBlockWarps = 4;
constexpr int kTileKeys = 16;
// A stage of a warp's pipeline has 4, 8 or 16 KiB of K and V. With head dim 128 and three stages
// two blocks of four warps fit on an SM of Hopper, which then has 128 KiB under way while it
// computes. Blocks of GPUs with less shared memory have two stages.
template <int kDim>
constexpr int kMostStages = kDim <= 64    ? 4
                            : kDim <= 128 ? 3
                                          : 2;
template <int kDim, int kStages>
constexpr int kBlocks = kDim > 128     ? 1
                        : kStages == 3 ? 2
                                       : 3;
constexpr float kLn2 = 0.69314718055994530942F;

template <typename T, int kDim, int kStages>
struct Shared {
  SharedTile<T, kTensorCoreRows, kDim> q;
  struct Stage {
    SharedTile<T, kTileKeys, kDim> k;
    SharedTile<T, kTileKeys, kDim> v;
  };
  struct Ends {
    float o[kBlockWarps][kTensorCoreRows][kDim];
    float highest[kBlockWarps][kTensorCoreRows];
    float sum[kBlockWarps][kTensorCoreRows];
    float rounded_sum[kBlockWarps][kTensorCoreRows];
  };
  union {
    Stage stages[kBlockWarps][kStages];
    Ends ends;
  };
};

template <typename T>
__device__ float rounded(float x) {
  return static_cast<float>(static_cast<T>(x));
}

template <typename T, int kDim, int kStages>
class WarpAttention {
 public:
  using Smem = Shared<T, kDim, kStages>;
  static constexpr bool kQueriesInRegisters = kDim <= 128;

  __device__ WarpAttention(const AttendParams& p, Smem& shared, const QueryRun& run, int kv_head)
      : p_(p),
        shared_(shared),
        k_(p.keys.k.base + run.entry * p.keys.k.batch_step + kv_head * p.keys.k.head_step),
        v_(p.keys.v.base + run.entry * p.keys.v.batch_step + kv_head * p.keys.v.head_step),
        ring_(static_cast<unsigned>(p.keys.ring_rows)),
        lane_(static_cast<int>(threadIdx.x) % 32),
        warp_(static_cast<int>(threadIdx.x) / 32) {
    for (auto& o : o_) o[0] = o[1] = o[2] = o[3] = 0;
  }

  // Begins to load keys [begin, end), of which this warp has every fourth tile. They do not wait
  // for the queries.
  __device__ void start(std::int64_t begin, std::int64_t end) {
    for (int s = 0; s < kStages - 1; ++s)
      load(s, begin + (warp_ + s * kBlockWarps) * kTileKeys, end);
  }
  __device__ void take_queries() {
    if constexpr (kQueriesInRegisters) {
      for (int k = 0; k < kDim / 16; ++k) shared_.q.load_a(q_[k], 0, k);
    }
  }

  // The keys of start(), which all rows see.
  __device__ void attend_all(std::int64_t begin, std::int64_t end) {
    const std::int64_t step = kBlockWarps * kTileKeys;
    int stage = 0;
    for (std::int64_t key = begin + warp_ * kTileKeys; key < end; key += step) {
      wait_copies<kStages - 2>();
      __syncwarp();
      // The stage that the last tile has left.
      load(stage == 0 ? kStages - 1 : stage - 1, key + (kStages - 1) * step, end);
      attend<false>(shared_.stages[warp_][stage],
                    static_cast<int>(min(end - key, std::int64_t{kTileKeys})), true, true);
      stage = stage + 1 == kStages ? 0 : stage + 1;
      __syncwarp();
    }
    wait_copies<0>();
    __syncwarp();
  }

  // Keys [begin, end), which rows [first, last) of the tile see.
  __device__ void attend_some(std::int64_t begin, std::int64_t end, int first, int last) {
    const int row = lane_ / 4;
    const bool low = first <= row && row < last;
    const bool high = first <= row + 8 && row + 8 < last;
    for (std::int64_t key = begin; key < end; key += kTileKeys) {
      load(0, key, end);
      wait_copies<0>();
      __syncwarp();
      attend<true>(shared_.stages[warp_][0],
                   static_cast<int>(min(end - key, std::int64_t{kTileKeys})), low, high);
      __syncwarp();
    }
  }

  // By all warps of the block. `result_of`: the ResultRow of a row.
  template <typename ResultOf>
  __device__ void store(int rows, const ResultOf& result_of) {
    __syncthreads();
    typename Smem::Ends& ends = shared_.ends;
    const int row = lane_ / 4;
    const float sums[2] = {quad_sum(sum_[0]), quad_sum(sum_[1])};
    const float rounded_sums[2] = {quad_sum(rounded_sum_[0]), quad_sum(rounded_sum_[1])};
    for (int i = 0; i < 2; ++i) {
      if (lane_ % 4 != 0) continue;
      ends.highest[warp_][row + 8 * i] = highest_[i];
      ends.sum[warp_][row + 8 * i] = sums[i];
      ends.rounded_sum[warp_][row + 8 * i] = rounded_sums[i];
    }
    for (int n = 0; n < kDim / 8; ++n) {
      const int column = n * 8 + lane_ % 4 * 2;
      ends.o[warp_][row][column] = o_[n][0];
      ends.o[warp_][row][column + 1] = o_[n][1];
      ends.o[warp_][row + 8][column] = o_[n][2];
      ends.o[warp_][row + 8][column + 1] = o_[n][3];
    }
    __syncthreads();
    for (int r = warp_; r < rows; r += kBlockWarps) {
      float highest = -INFINITY;
      for (int w = 0; w < kBlockWarps; ++w) highest = fmaxf(highest, ends.highest[w][r]);
      const float reference = highest == -INFINITY ? 0.0F : highest;
      float weights[kBlockWarps];
      float sum = 0;
      float rounded_sum = 0;
      for (int w = 0; w < kBlockWarps; ++w) {
        weights[w] = exp2f(ends.highest[w][r] - reference);
        sum += ends.sum[w][r] * weights[w];
        rounded_sum += ends.rounded_sum[w][r] * weights[w];
      }
      const ResultRow to = result_of(r);
      if (lane_ == 0) *to.lse = sum == 0 ? -INFINITY : (reference + log2f(sum)) * kLn2;
      const float factor = sum == 0 ? 0.0F : 1.0F / rounded_sum;
      for (int d = lane_; d < p_.head_dim; d += 32) {
        float all = 0;
        for (int w = 0; w < kBlockWarps; ++w) all = fmaf(ends.o[w][r][d], weights[w], all);
        to.o[d] = all * factor;
      }
    }
  }

 private:
  // Rows [key, key + 16) of K and V, zeros from `end` on.
  __device__ void load(int stage, std::int64_t key, std::int64_t end) {
    if (key < end) {
      auto& to = shared_.stages[warp_][stage];
      const unsigned first = static_cast<unsigned>(key) % ring_;
      constexpr int kChunks = kDim / 8;
#pragma unroll
      for (int i = lane_; i < kTileKeys * kChunks; i += 32) {
        const int row = i / kChunks;
        const int c = i % kChunks;
        unsigned at = first + row;
        while (at >= ring_) at -= ring_;
        const bool present = key + row < end && c * 8 < p_.padded;
        const std::int64_t offset = present ? at * p_.keys.k.row_step + c * 16 : 0;
        copy_async(to.k.chunk(row, c), k_ + offset, present);
        copy_async(to.v.chunk(row, c), v_ + offset, present);
      }
    }
    commit_copies();
  }

  // A tile of `keys` keys, which the thread's two rows see or not.
  template <bool kSome>
  __device__ void attend(typename Smem::Stage& tile, int keys, bool low, bool high) {
    float scores[2][4] = {};
    const std::uint32_t k_address = tile.k.b_address();
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
      std::uint32_t b[4];
      tile.k.load_rows(b, k_address, 0, k);
      if constexpr (kQueriesInRegisters) {
        multiply<T>(scores[0], q_[k], b[0], b[1]);
        multiply<T>(scores[1], q_[k], b[2], b[3]);
      } else {
        std::uint32_t q[4];
        shared_.q.load_a(q, 0, k);
        multiply<T>(scores[0], q, b[0], b[1]);
        multiply<T>(scores[1], q, b[2], b[3]);
      }
    }
    const bool sees[2] = {low, high};
    float factors[2];
    float weights[2][4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {  // rows lane / 4 and lane / 4 + 8
      float most = -INFINITY;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float& score = scores[j / 2][i * 2 + j % 2];
        const int key = j / 2 * 8 + lane_ % 4 * 2 + j % 2;
        score = key < keys && (!kSome || sees[i]) ? score * p_.scale : -INFINITY;
        most = fmaxf(most, score);
      }
      most = fmaxf(highest_[i], quad_max(most));
      const float reference = most == -INFINITY ? 0.0F : most;
      factors[i] = highest_[i] == reference ? 1.0F : exp2f(highest_[i] - reference);
      highest_[i] = most;
      float sum = 0;
      float rounded_sum = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float weight = exp2f(scores[j / 2][i * 2 + j % 2] - reference);
        weights[j / 2][i * 2 + j % 2] = weight;
        sum += weight;
        rounded_sum += rounded<T>(weight);
      }
      sum_[i] = sum_[i] * factors[i] + sum;
      rounded_sum_[i] = rounded_sum_[i] * factors[i] + rounded_sum;
    }
    std::uint32_t a[4];
    as_a<T>(a, weights[0], weights[1]);
    const bool rescale =
        __any_sync(0xffffffffU, factors[0] != 1.0F || factors[1] != 1.0F);  // or NaN
    const std::uint32_t v_address = tile.v.a_address();
#pragma unroll
    for (int n = 0; n < kDim / 16; ++n) {
      std::uint32_t b[4];
      tile.v.load_transposed(b, v_address, 0, n);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float(&o)[4] = o_[2 * n + half];
        if (rescale) {
          o[0] *= factors[0];
          o[1] *= factors[0];
          o[2] *= factors[1];
          o[3] *= factors[1];
        }
        if constexpr (kSome) {
          float more[4] = {};
          multiply<T>(more, a, b[2 * half], b[2 * half + 1]);
          if (low) {
            o[0] += more[0];
            o[1] += more[1];
          }
          if (high) {
            o[2] += more[2];
            o[3] += more[3];
          }
        } else {
          multiply<T>(o, a, b[2 * half], b[2 * half + 1]);
        }
      }
    }
  }

  const AttendParams& p_;
  Smem& shared_;
  const std::byte* const k_;
  const std::byte* const v_;
  const unsigned ring_;
  const int lane_;
  const int warp_;
  std::uint32_t q_[kQueriesInRegisters ? kDim / 16 : 1][4];
  float o_[kDim / 8][4];
  float highest_[2] = {-INFINITY, -INFINITY};
  float sum_[2] = {};          // of this thread's weights, for the log-sum-exp
  float rounded_sum_[2] = {};  // of weights as V is multiplied with them
};

template <typename T, int kDim, int kStages>
__global__ void __launch_bounds__(kBlockWarps * 32, kBlocks<kDim, kStages>)
    tensor_core_kernel(const __grid_constant__ AttendParams p) {
  extern __shared__ __align__(128) std::byte memory[];
  auto& shared = *reinterpret_cast<Shared<T, kDim, kStages>*>(memory);
  const AttendRun& item = p.run[blockIdx.z];
  const QueryRun& run = item.run;
  const int split = static_cast<int>(blockIdx.y);
  const int kv_head = static_cast<int>(blockIdx.x) % p.kv_heads;
  const int tile = static_cast<int>(blockIdx.x) / p.kv_heads;
  wait_for_earlier_kernels();
  const int ratio = p.token_rows;
  const std::int64_t first_row = std::int64_t{tile} * kTensorCoreRows;
  const int rows =
      static_cast<int>(min(run.tokens * ratio - first_row, std::int64_t{kTensorCoreRows}));
  if (split >= item.splits || rows <= 0) return;

  const std::int64_t first_token = first_row / ratio;
  const std::int64_t last_token = (first_row + rows - 1) / ratio;
  const RowInterval first = p.keys.seen_from(run.position + first_token, run.length);
  const RowInterval last = p.keys.seen_from(run.position + last_token, run.length);
  // What all rows see.
  const std::int64_t begin = last.begin;
  const std::int64_t end = max(begin, first.end);
  WarpAttention<T, kDim, kStages> warp(p, shared, run, kv_head);
  const std::int64_t split_begin = begin + split * item.split_keys;
  const std::int64_t split_end = min(end, split_begin + item.split_keys);
  warp.start(split_begin, split_end);
  for (int row = static_cast<int>(threadIdx.x) / 32; row < kTensorCoreRows; row += kBlockWarps) {
    const int of_head = static_cast<int>(first_row) + min(row, rows - 1);
    const auto* from = reinterpret_cast<const T*>(
        row_at(p.q, run.batch, run.row + of_head / ratio, kv_head * ratio + of_head % ratio));
    for (int d = static_cast<int>(threadIdx.x) % 32; d < kDim; d += 32)
      shared.q.chunk(row, d / 8)[d % 8] = row < rows && d < p.head_dim ? from[d] : T(0.0F);
  }
  __syncthreads();
  warp.take_queries();
  warp.attend_all(split_begin, split_end);
  if (split == 0) {
    for (std::int64_t token = first_token + threadIdx.x / 32; token <= last_token;
         token += kBlockWarps) {
      const RowInterval seen = p.keys.seen_from(run.position + token, run.length);
      const int from = static_cast<int>(max(token * ratio - first_row, std::int64_t{0}));
      const int to = static_cast<int>(min((token + 1) * ratio - first_row, std::int64_t{rows}));
      warp.attend_some(seen.begin, min(seen.end, begin), from, to);
      warp.attend_some(max(seen.begin, end), seen.end, from, to);
    }
  }
  warp.store(rows, [&](int row) { return ResultRow(p, item, tile, kv_head, split, row); });
}

// What the host asks of a kernel.
template <typename T, int kDim, int kStages>
struct Kernel {
  static constexpr int kBytes = static_cast<int>(sizeof(Shared<T, kDim, kStages>));

  // Cheap, and needed once for each device.
  static cudaError_t allow_shared_bytes() {
    return cudaFuncSetAttribute(&tensor_core_kernel<T, kDim, kStages>,
                                cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  }
  static int blocks() {
    int count = 0;
    if (allow_shared_bytes() != cudaSuccess) return 1;
    const cudaError_t error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(
        &count, &tensor_core_kernel<T, kDim, kStages>, kBlockWarps * 32, kBytes);
    return error == cudaSuccess && count > 0 ? count : 1;
  }
  static cudaError_t launch(const AttendParams& params, int most_splits, int most_tiles,
                            cudaStream_t stream) {
    const cudaError_t error = allow_shared_bytes();
    if (error != cudaSuccess) return error;
    // Tiles of long chunks are more than the 65,535 that the other directions of a grid may have.
    const dim3 grid(static_cast<unsigned>(most_tiles * params.kv_heads),
                    static_cast<unsigned>(most_splits), static_cast<unsigned>(params.runs));
    return launch_early(&tensor_core_kernel<T, kDim, kStages>, grid, kBlockWarps * 32, kBytes,
                        params, stream);
  }
};

// Calls use(Kernel()) with the one for a head dim that fits into so much shared memory; none does:
// returns `otherwise`.
template <typename T, typename Result, typename Use>
Result with_kernel(int head_dim, std::size_t shared_bytes, Result otherwise, const Use& use) {
  const auto fits = [&](auto kernel) {
    return static_cast<std::size_t>(decltype(kernel)::kBytes) <= shared_bytes;
  };
  using Small = Kernel<T, 64, kMostStages<64>>;
  using Usual = Kernel<T, 128, kMostStages<128>>;
  using UsualLess = Kernel<T, 128, 2>;
  using Large = Kernel<T, 256, kMostStages<256>>;
  if (head_dim <= 64) return fits(Small()) ? use(Small()) : otherwise;
  if (head_dim <= 128) {
    if (fits(Usual())) return use(Usual());
    return fits(UsualLess()) ? use(UsualLess()) : otherwise;
  }
  return head_dim <= 256 && fits(Large()) ? use(Large()) : otherwise;
}

}  // namespace

int tensor_core_blocks(int head_dim, std::size_t shared_bytes) {
  return with_kernel<__nv_bfloat16>(head_dim, shared_bytes, 0,
                                    [](auto kernel) { return kernel.blocks(); });
}

cudaError_t attend_on_tensor_cores(const AttendParams& params, DType dtype,
                                   std::size_t shared_bytes, int most_splits, int most_tiles,
                                   cudaStream_t stream) {
  const auto launch = [&](auto kernel) {
    return kernel.launch(params, most_splits, most_tiles, stream);
  };
  return dtype == DType::bf16
             ? with_kernel<__nv_bfloat16>(params.head_dim, shared_bytes, cudaErrorInvalidValue,
                                          launch)
             : with_kernel<__half>(params.head_dim, shared_bytes, cudaErrorInvalidValue, launch);
}

}  // namespace annulus::cuda
