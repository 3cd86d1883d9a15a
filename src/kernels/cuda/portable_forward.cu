#include "kernels/cuda/dispatch.cuh"
#include "kernels/cuda/kept_rows.cuh"
#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/portable.h"
#include "kernels/cuda/rows.cuh"

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

template <typename T, int kDim, typename Buffers>
struct Shared {
  SharedTile<T, kQueries<kDim>, kDim> q;
  SharedTile<T, Buffers::kRows, kDim> k[Buffers::kStages];
  SharedTile<T, Buffers::kRows, kDim> v[Buffers::kStages];
  TileRows<Buffers::kRows, 2> keys[Buffers::kStages];
  TileRows<kQueries<kDim>, 4> queries;  // q, lse, state, out
  Poison<kQueries<kDim>, kDim> poison;
};

template <typename T>
__device__ void store_pair(std::byte* row, int column, float a, float b, DType dtype) {
  if (dtype == DType::f32) {
    float* to = reinterpret_cast<float*>(row) + column;
    to[0] = a;
    to[1] = b;
  } else {
    T* to = reinterpret_cast<T*>(row) + column;
    to[0] = T(a);
    to[1] = T(b);
  }
}

template <typename T, int kDim, typename Buffers>
__global__ void __launch_bounds__(kThreads) forward(const __grid_constant__ PortableForwardParams p) {
  constexpr int kTiles = kRowTiles<kDim>;
  constexpr int kKeys = Buffers::kRows;  // of a tile
  constexpr int kStages = Buffers::kStages;
  extern __shared__ __align__(128) unsigned char memory[];
  auto& shared = *reinterpret_cast<Shared<T, kDim, Buffers>*>(memory);
  const Item item = p.tables.items[p.first_item + blockIdx.x];
  if (item.rows == 0) return;
  const Group group = p.tables.groups[item.group];
  const Member member = p.tables.members[item.member];
  const RowOwner query_place{item.batch, member.head, member.unit};
  const RowOwner key_place{item.batch, member.kv_head, member.unit};
  const int head_dim = p.shape.head_dim;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  shared.poison.clear();
  const Channel lse{p.lse};
  const Channel state{p.state};
  const Channel out{p.out};

  shared.queries.fill_rows(p.tables, group, group.queries, item.begin, item.begin + item.rows,
                      query_place, p.q, lse, state, out);
  // Keys that some query of the block sees, where that can be told from their order.
  int keys = tile_extent(p.tables.runs, group.keys);
  int first_query = 0;  // smallest index; below it a tile needs no mask
  if (group.causal != 0 && group.queries.ascending != 0 && group.keys.ascending != 0) {
    first_query = place_row(p.tables.runs, group.queries, item.begin).index + group.shift;
    const int last_query =
        place_row(p.tables.runs, group.queries, item.begin + item.rows - 1).index + group.shift;
    keys = extent_up_to(p.tables.runs, group.keys, last_query);
  } else {
    first_query = INT_MIN;
  }
  const auto load = [&](int tile) {
    const int stage = tile % kStages;
    shared.keys[stage].fill(p.tables, group, group.keys, tile * kKeys, keys, key_place, p.k, p.v);
    __syncthreads();
    shared.k[stage].load(shared.keys[stage].at[0], head_dim, p.shape.aligned, p.tables.items);
    shared.v[stage].load(shared.keys[stage].at[1], head_dim, p.shape.aligned, p.tables.items);
  };
  const int tiles = (keys + kKeys - 1) / kKeys;
  __syncthreads();
  if (p.kept.tables.branches > 0) point_to_kept(shared.queries, p, group, item, member.head);
  shared.q.load(shared.queries.at[0], head_dim, p.shape.aligned, p.tables.items);
  if (kStages == 2 && tiles > 0) load(0);
  commit_copies();
  __syncthreads();

  // Rows of a thread: row tile m, upper or lower half. Scores are in units of log2.
  float o[kTiles][kDim / 8][4];
  float highest[kTiles][2];
  float sum[kTiles][2];  // this thread's columns; the quad's at the end
  int index[kTiles][2];
  unsigned repeats[kTiles][2];
#pragma unroll
  for (int m = 0; m < kTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = (warp * kTiles + m) * 16 + half * 8 + lane / 4;
      index[m][half] = shared.queries.index[row];
      repeats[m][half] = shared.queries.repeats[row];
      const bool present = index[m][half] != kAbsent;
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
        o[m][n][2 * half] = load ? from[column] : 0.0F;
        o[m][n][2 * half + 1] = load ? from[column + 1] : 0.0F;
      }
    }
  }

  const float scale = p.shape.scale * kLog2E;
  for (int tile = 0; tile < tiles; ++tile) {
    const int stage = tile % kStages;
    const int next = tile + kStages - 1;
    if (next < tiles) load(next);
    commit_copies();
    wait_copies<kStages - 1>();
    __syncthreads();

    float s[kTiles][kKeys / 8][4] = {};
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
      std::uint32_t a[kTiles][4];
#pragma unroll
      for (int m = 0; m < kTiles; ++m) shared.q.load_a(a[m], (warp * kTiles + m) * 16, k);
#pragma unroll
      for (int n = 0; n < kKeys / 16; ++n) {
        std::uint32_t b[4];
        shared.k[stage].load_b(b, n * 16, k);
#pragma unroll
        for (int m = 0; m < kTiles; ++m) {
          multiply<T>(s[m][2 * n], a[m], b[0], b[1]);
          multiply<T>(s[m][2 * n + 1], a[m], b[2], b[3]);
        }
      }
    }

    const TileRows<kKeys, 2>& rows = shared.keys[stage];
    const bool masked = (tile + 1) * kKeys > keys || group.keys.by_index != 0 ||
                        (group.causal != 0 && (first_query == INT_MIN ||
                                               rows.index[kKeys - 1] > first_query));
    const bool weighted = group.repeats > 0;
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) s[m][n][e] *= scale;
      }
    }
    if (weighted || masked) {
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int key = n * 8 + lane % 4 * 2 + e % 2;
          const int key_index = rows.index[key];
          const unsigned key_repeats = rows.repeats[key];
#pragma unroll
          for (int m = 0; m < kTiles; ++m) {
            const bool hidden = hidden_pair(group, index[m][e / 2], key_index);
            float& score = s[m][n][e];
            score = hidden ? -INFINITY : score + log2_weight(repeats[m][e / 2], key_repeats);
          }
        }
      }
    }

#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float top = highest[m][half];
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n)
          top = fmaxf(top, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
        top = quad_max(top);
        // A row that has seen nothing yet: -inf - -inf would be NaN.
        const float reference = top == -INFINITY ? 0.0F : top;
        const float shrink = exp2_fast(highest[m][half] - reference);
        highest[m][half] = top;
        float total = 0;
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
          for (int e = 2 * half; e < 2 * half + 2; ++e) {
            s[m][n][e] = exp2_fast(s[m][n][e] - reference);
            total += s[m][n][e];
          }
        }
        sum[m][half] = sum[m][half] * shrink + total;
#pragma unroll
        for (int n = 0; n < kDim / 8; ++n) {
          o[m][n][2 * half] *= shrink;
          o[m][n][2 * half + 1] *= shrink;
        }
      }
    }

    if (masked && group.causal != 0) {
      shared.poison.take_from(shared.v[stage], [&](int query, int key) {
        return !hidden_pair(group, shared.queries.index[query], rows.index[key]);
      });
    }
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
      std::uint32_t a[kTiles][4];
#pragma unroll
      for (int m = 0; m < kTiles; ++m) as_a<T>(a[m], s[m][2 * k], s[m][2 * k + 1]);
#pragma unroll
      for (int n = 0; n < kDim / 16; ++n) {
        std::uint32_t b[4];
        shared.v[stage].load_b_transposed(b, k * 16, n);
#pragma unroll
        for (int m = 0; m < kTiles; ++m) {
          multiply<T>(o[m][2 * n], a[m], b[0], b[1]);
          multiply<T>(o[m][2 * n + 1], a[m], b[2], b[3]);
        }
      }
    }
    __syncthreads();  // the stage is free
  }
  wait_copies<0>();

#pragma unroll
  for (int m = 0; m < kTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = (warp * kTiles + m) * 16 + half * 8 + lane / 4;
      const float total = quad_sum(sum[m][half]);
      if (index[m][half] == kAbsent) continue;
      const bool empty = highest[m][half] == -INFINITY && total == 0;  // not: a NaN
      if (empty && !p.for_good) continue;
      if (lane % 4 == 0 && !empty) {
        *reinterpret_cast<float*>(shared.queries.at[1][row]) =
            (highest[m][half] + log2f(total)) * kLn2;
      }
      const float factor = empty ? 0.0F : p.out_factor / total;
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n) {
        const int column = n * 8 + lane % 4 * 2;
        if (column < head_dim) {
          float a = empty ? 0.0F : o[m][n][2 * half] * factor;
          float b = empty ? 0.0F : o[m][n][2 * half + 1] * factor;
          if (shared.poison.any != 0) {
            a = shared.poison.apply(row, column, a);
            b = shared.poison.apply(row, column + 1, b);
          }
          store_pair<T>(shared.queries.at[3][row], column, a, b, p.out_dtype);
        }
      }
    }
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
  if (params.shape.dtype == DType::f32) return forward_fp32(params, stream);
  return with_half(params.shape.dtype, [&](auto half) {
    using T = decltype(half);
    return with_dim(params.shape.head_dim, [&](auto dim) {
      return with_buffers<Shared, T, dim()>([&](auto buffers) {
        using Buffers = decltype(buffers);
        return launch(forward<T, dim(), Buffers>, dim3(static_cast<unsigned>(params.items)), kThreads,
                      sizeof(Shared<T, dim(), Buffers>), params, stream);
      });
    });
  });
}

}  // namespace annulus::cuda
