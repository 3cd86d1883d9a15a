#include "kernels/cuda/portable/dispatch.cuh"
#include "kernels/cuda/portable/kept.cuh"
#include "kernels/cuda/portable/kernels.h"
#include "kernels/cuda/portable/key_stretch.cuh"
#include "kernels/cuda/portable/mma.cuh"
#include "kernels/cuda/portable/rows.cuh"
#include "kernels/cuda/rows/sink.cuh"

namespace annulus::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;

// A warp has kRowTiles times 16 queries: two let it use each fragment of K and V twice, which is
// what keeps shared memory from being the limit (32 KiB a tile and warp at 128 columns). With 256
// columns the accumulators of two would not fit the registers.
template <int kDim>
constexpr int kRowTiles = kDim <= 128 ? 2 : 1;
template <int kDim>
constexpr int kQueries = kWarps * 16 * kRowTiles<kDim>;

// A row's sums are scaled down only when its highest score has grown by this much (of log2):
// weights are then at most 256, which bf16, fp16 and fp32 sums hold as precisely as 1.
constexpr float kSlack = 8.0F;

// 74 KiB with 128 columns: two blocks fit a multiprocessor of sm_80, as registers want it. Buffers
// for two tiles of K and V would save one of the two barriers a tile and were 3 % slower (H200).
template <typename T, int kDim, int kKeys>
struct Shared {
  SharedTile<T, kQueries<kDim>, kDim> q;
  SharedTile<T, kKeys, kDim> k;
  SharedTile<T, kKeys, kDim> v;
  KeyStretch<kKeys> keys[2];
  TileRows<kQueries<kDim>, 4> queries;  // q, lse, state, out
  int first_key[kQueries<kDim>];        // indices of the first and the last key that a query sees
  int last_key[kQueries<kDim>];
  float weights[9];  // what counting once more, twice, ... adds to q.k
  Group group;       // these three: there are no registers for them
  RowOwner key_owner;
  int key_extent;
  Poison<kQueries<kDim>, kDim> poison;
};

// Scores of a warp's queries, fragments A at `q`, against a tile of keys, fragments B at `k`.
template <typename T, int kDim, int kTiles, int kBlocks>
__device__ void multiply_queries(float (&s)[kTiles][kBlocks][4], std::uint32_t q, std::uint32_t k) {
  using Rows = SharedTile<T, 8 * kBlocks, kDim>;
#pragma unroll
  for (int m = 0; m < kTiles; ++m) {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) s[m][n][e] = 0;
    }
  }
#pragma unroll
  for (int d = 0; d < kDim / 16; ++d) {
    std::uint32_t a[kTiles][4];
#pragma unroll
    for (int m = 0; m < kTiles; ++m) Rows::load_rows(a[m], q, m * 16, d);
#pragma unroll
    for (int n = 0; n < kBlocks; n += 2) {
      std::uint32_t b[4];
      Rows::load_rows(b, k, n * 8, d);
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        multiply<T>(s[m][n], a[m], b[0], b[1]);
        multiply<T>(s[m][n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// o += weights times values, fragments B at `v`; sum += this thread's weights.
template <typename T, int kDim, int kTiles, int kBlocks>
__device__ void add_values(float (&o)[kTiles][kDim / 8][4], float (&sum)[kTiles][2],
                           const float (&weights)[kTiles][kBlocks][4], std::uint32_t v) {
  using Rows = SharedTile<T, 8 * kBlocks, kDim>;
#pragma unroll
  for (int k = 0; k < kBlocks; k += 2) {
    std::uint32_t a[kTiles][4];
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
#pragma unroll
      for (int e = 0; e < 8; ++e) sum[m][e / 2 % 2] += weights[m][k + e / 4][e % 4];
      as_a<T>(a[m], weights[m][k], weights[m][k + 1]);
    }
#pragma unroll
    for (int n = 0; n < kDim / 16; ++n) {
      std::uint32_t b[4];
      Rows::load_transposed(b, v, k * 8, n);
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        multiply<T>(o[m][2 * n], a[m], b[0], b[1]);
        multiply<T>(o[m][2 * n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

template <typename T, int kDim, int kKeys>
__global__ void __launch_bounds__(kThreads)
    forward(const __grid_constant__ PortableForwardParams p) {
  constexpr int kTiles = kRowTiles<kDim>;
  extern __shared__ __align__(128) unsigned char memory[];
  auto& shared = *reinterpret_cast<Shared<T, kDim, kKeys>*>(memory);
  const Item item = p.tables.items[p.first_item + blockIdx.x];
  if (item.rows == 0) return;
  const Member member = p.tables.members[item.member];
  const RowOwner query_place{item.batch, member.head, member.unit};
  if (threadIdx.x == 0) {
    shared.group = p.tables.groups[item.group];
    shared.key_owner = {item.batch, member.kv_head, member.unit};
  }
  shared.poison.clear();
  __syncthreads();
  const Group& group = shared.group;
  const int head_dim = p.shape.head_dim;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;

  shared.queries.fill_rows(p.tables, group, group.queries, item.begin, item.begin + item.rows,
                           query_place, p.q, Channel{p.lse}, Channel{p.state}, Channel{p.out});
  for (int r = static_cast<int>(threadIdx.x); r < kQueries<kDim>; r += kThreads) {
    const int index = shared.queries.index[r];  // this thread's own
    shared.first_key[r] = index == kAbsent ? 0 : first_key_of(group, index);
    shared.last_key[r] = index == kAbsent ? kAbsent - 1 : last_key_of(group, index);
  }
  if (threadIdx.x < 9)
    shared.weights[threadIdx.x] = log2f(1.0F + threadIdx.x) / (p.shape.scale * kLog2E);
  const Walk walk = walk_keys<kKeys>(p.tables.runs, group, item);
  const int tiles = walk.end;
  shared.key_extent = walk.extent;  // by all threads
  const auto fill = [&](int slot, int tile) {
    return shared.keys[slot].fill(p.tables, group, tile, shared.key_extent, shared.key_owner, p.k,
                                  p.v, p.shape.aligned);
  };
  const auto load_keys = [&](int slot, int tile) {
    shared.keys[slot].template load<kThreads>(shared.k, 0, tile, head_dim, p.shape.aligned,
                                              p.tables.items);
    commit_copies();
  };
  const auto load_values = [&](int slot, int tile) {
    shared.keys[slot].template load<kThreads>(shared.v, 1, tile, head_dim, p.shape.aligned,
                                              p.tables.items);
    commit_copies();
  };
  // Which of shared.keys has the tile, and the first tile that neither has.
  int slot = 0;
  int described = walk.first < tiles ? fill(0, walk.first) : 0;
  __syncthreads();
  if (p.kept.tables.branches > 0) point_to_kept(shared.queries, p, group, item, member.head);
  shared.q.load(shared.queries.at[0], head_dim, p.shape.aligned, p.tables.items);
  if (walk.first < tiles) load_keys(0, walk.first);
  commit_copies();
  // A tile of keys that are all in between needs no mask.
  int highest_first_key = 0;
  int lowest_last_key = kAbsent;
  for (int r = lane; r < kQueries<kDim>; r += 32) {
    highest_first_key = max(highest_first_key, shared.first_key[r]);
    lowest_last_key = min(lowest_last_key, shared.last_key[r]);
  }
  highest_first_key = __reduce_max_sync(0xffffffffU, highest_first_key);
  lowest_last_key = __reduce_min_sync(0xffffffffU, lowest_last_key);
  __syncthreads();

  // Rows of a thread: row tile m, upper or lower half. `highest` is in units of log2.
  const auto row_of = [&](int m, int half) {
    return (warp * kTiles + m) * 16 + half * 8 + lane / 4;
  };
  float o[kTiles][kDim / 8][4];
  float highest[kTiles][2];  // that sums are relative to: within kSlack of the highest score
  float sum[kTiles][2];      // this thread's columns; the quad's at the end
#pragma unroll
  for (int m = 0; m < kTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row_of(m, half);
      const bool present = shared.queries.index[row] != kAbsent;
      const float l = p.load_state && present
                          ? *reinterpret_cast<const float*>(shared.queries.at[1][row])
                          : -INFINITY;
      highest[m][half] = l * kLog2E;
      sum[m][half] = l != -INFINITY && lane % 4 == 0 ? 1.0F : 0.0F;
      const auto* from = reinterpret_cast<const float*>(shared.queries.at[2][row]);
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n) {
        const int column = n * 8 + lane % 4 * 2;
        const bool load = l != -INFINITY && column < head_dim;
        float2 pair{0, 0};
        if (load) pair.x = from[column];
        if (load && column + 1 < head_dim) pair.y = from[column + 1];
        o[m][n][2 * half] = pair.x;
        o[m][n][2 * half + 1] = pair.y;
      }
    }
  }

  const std::uint32_t q_at = shared.q.a_address(warp * kTiles * 16);
  const std::uint32_t k_at = shared.k.b_address();
  const std::uint32_t v_at = shared.v.a_address();
  const float scale = p.shape.scale * kLog2E;
  for (int tile = walk.first; tile < tiles; ++tile) {
    // V arrives while K is used, and the next K while V is used.
    wait_copies<0>();
    __syncthreads();
    load_values(slot, tile);
    float s[kTiles][kKeys / 8][4];
    multiply_queries<T, kDim>(s, make_again(q_at), make_again(k_at));
    const KeyStretch<kKeys>& rows = shared.keys[slot];
    if (tile + 1 == described && tile + 1 < tiles) {
      slot ^= 1;
      described = fill(slot, tile + 1);
    }

    if (group.repeats > 0) {
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const unsigned common = shared.queries.repeats[row_of(m, e / 2)] &
                                    rows.repeats[n * 8 + lane % 4 * 2 + e % 2];
            s[m][n][e] += shared.weights[__popc(common)];
          }
        }
      }
    }
    const int offset = rows.index_offset(tile);
    const bool masked =
        rows.highest > lowest_last_key - offset || rows.index[0] < highest_first_key - offset;
    if (masked) {
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const int key = rows.index[n * 8 + lane % 4 * 2 + e % 2];
            const int row = row_of(m, e / 2);
            if (key > shared.last_key[row] - offset || key < shared.first_key[row] - offset)
              s[m][n][e] = -INFINITY;
          }
        }
      }
    }

    float reference[kTiles][2];
    bool shrinks = false;
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float top = -INFINITY;
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n)
          top = fmaxf(top, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
        top = quad_max(top) * scale;
        reference[m][half] = top > highest[m][half] + kSlack ? top : highest[m][half];
        shrinks = shrinks || reference[m][half] != highest[m][half];
      }
    }
    if (__any_sync(0xffffffffU, shrinks)) {
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float grown = reference[m][half];
          const float shrink =
              grown == highest[m][half] ? 1.0F : exp2_fast(highest[m][half] - grown);
          highest[m][half] = grown;
          sum[m][half] *= shrink;
#pragma unroll
          for (int n = 0; n < kDim / 8; ++n) {
            o[m][n][2 * half] *= shrink;
            o[m][n][2 * half + 1] *= shrink;
          }
        }
      }
    }
    // A row that has seen nothing yet: -inf - -inf would be NaN.
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (reference[m][half] == -INFINITY) reference[m][half] = 0;
      }
    }
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e)
          s[m][n][e] = exp2_fast(fmaf(s[m][n][e], scale, -reference[m][e / 2]));
      }
    }

    wait_copies<0>();
    __syncthreads();
    if (tile + 1 < tiles) load_keys(slot, tile + 1);
    if (masked && limited(group)) {
      shared.poison.take_from(shared.v, [&](int query, int key) {
        return rows.index[key] <= shared.last_key[query] - offset &&
               rows.index[key] >= shared.first_key[query] - offset;
      });
    }
    add_values<T, kDim>(o, sum, s, make_again(v_at));
  }
  wait_copies<0>();
  __syncthreads();  // without a tile: the queries are here

  // Results of 16 bits go by way of the queries' memory, of which each warp has its own part, so
  // that rows leave in stretches of 16 bytes.
  const int member_at = p.tables.items[p.first_item + blockIdx.x].member;
  const float sink = sink_of(p.sinks, p.tables.members[member_at].head);
  const bool wide = p.out_dtype == DType::f32;
  const bool pairs = head_dim % 2 == 0;  // of columns of fp32 rows are aligned and whole
  const bool staged =
      !wide && p.for_good && p.kept.tables.branches == 0 && is_aligned(p.out) && head_dim % 8 == 0;
#pragma unroll
  for (int m = 0; m < kTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row_of(m, half);
      const float total = quad_sum(sum[m][half]);
      if (shared.queries.index[row] == kAbsent) continue;
      const bool empty = highest[m][half] == -INFINITY && total == 0;  // not: a NaN
      const WithSink end =
          with_sink(empty ? -INFINITY : (highest[m][half] + log2f(total)) * kLn2, sink);
      if (lane % 4 == 0)  // an empty one's, too: nobody else may have
        *reinterpret_cast<float*>(shared.queries.at[1][row]) = end.lse;
      if (empty && !p.for_good) continue;
      const float inverse = 1.0F / (empty ? 1.0F : total);
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n) {
        o[m][n][2 * half] *= inverse;
        o[m][n][2 * half + 1] *= inverse;
      }
      const float factor = end.kept * p.out_factor;  // by itself, as finish_rows multiplies states
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n) {
        const int column = n * 8 + lane % 4 * 2;
        if (column >= head_dim) continue;
        float a = empty ? factor : o[m][n][2 * half] * factor;
        float b = empty ? factor : o[m][n][2 * half + 1] * factor;
        if (shared.poison.any != 0 && !empty) {
          a = shared.poison.apply(row, column, a);
          b = shared.poison.apply(row, column + 1, b);
        }
        if (staged) {
          *reinterpret_cast<std::uint32_t*>(shared.q.chunk(row, n) + lane % 4 * 2) = pack<T>(a, b);
        } else if (wide && pairs) {
          *reinterpret_cast<float2*>(reinterpret_cast<float*>(shared.queries.at[3][row]) +
                                     column) = {a, b};
        } else if (wide) {
          float* to = reinterpret_cast<float*>(shared.queries.at[3][row]) + column;
          to[0] = a;
          if (column + 1 < head_dim) to[1] = b;
        } else {
          T* to = reinterpret_cast<T*>(shared.queries.at[3][row]) + column;
          to[0] = T(a);
          if (column + 1 < head_dim) to[1] = T(b);
        }
      }
    }
  }
  if (!staged) return;
  __syncwarp();
  constexpr int kChunks = kDim / 8;
#pragma unroll
  for (int i = 0; i < kTiles * 16 * kChunks / 32; ++i) {
    const int row = warp * kTiles * 16 + (i * 32 + lane) / kChunks;
    const int c = (i * 32 + lane) % kChunks;
    if (shared.queries.index[row] == kAbsent || c * 8 >= head_dim) continue;
    reinterpret_cast<uint4*>(shared.queries.at[3][row])[c] =
        *reinterpret_cast<const uint4*>(shared.q.chunk(row, c));
  }
}

}  // namespace

int portable_forward_tile(const KernelShape& shape) {
  return shape.dtype == DType::f32 || shape.head_dim > 128 ? 64 : 128;
}

cudaError_t portable_forward(const ForwardParams& forward_params, cudaStream_t stream,
                             const ForwardKept& kept) {
  if (forward_params.items == 0) return cudaSuccess;
  const PortableForwardParams params{forward_params, kept};
  const bool wide = params.shape.head_dim > kMostTiledDim;
  if (params.shape.dtype == DType::f32)
    return wide ? forward_wide_fp32(params, stream) : forward_fp32(params, stream);
  if (wide) return forward_wide_half(params, stream);
  std::size_t most = 0;
  if (const cudaError_t error = block_shared_bytes(most); error != cudaSuccess) return error;
  const auto blocks = dim3(static_cast<unsigned>(params.items));
  return with_half(params.shape.dtype, [&](auto half) {
    using T = decltype(half);
    return with_dim(params.shape.head_dim, [&](auto dim) {
      constexpr std::size_t kBytes = sizeof(Shared<T, dim(), 64>);
      if constexpr (kBytes > kLeastSharedBytes) {
        if (kBytes > most) {
          return launch(forward<T, dim(), 32>, blocks, kThreads, sizeof(Shared<T, dim(), 32>),
                        params, stream);
        }
      }
      return launch(forward<T, dim(), 64>, blocks, kThreads, kBytes, params, stream);
    });
  });
}

}  // namespace annulus::cuda
