#include "kernels/cuda/portable/dispatch.cuh"
#include "kernels/cuda/portable/kernels.h"
#include "kernels/cuda/portable/mma.cuh"
#include "kernels/cuda/portable/modifiers.cuh"
#include "kernels/cuda/portable/rows.cuh"

namespace annulus::cuda {
namespace {

constexpr int kThreads = 128;  // four warps of 16 rows
constexpr int kRows = kPortableGradientTile;

// Log-sum-exp in units of log2; a row that attends to nothing gets weights of 0.
__device__ float reference_of(const std::byte* lse) {
  const float l = lse != nullptr ? *reinterpret_cast<const float*>(lse) : -INFINITY;
  return l == -INFINITY ? INFINITY : l * kLog2E;
}

// Writes two neighbouring columns of a row of results, times a factor, to memory. The second may be
// past the row's end.
template <typename Poisoned>
__device__ void add_pair(std::byte* to, int row, int column, int head_dim, float a, float b,
                         float factor, const Poisoned& poison) {
  if (poison.any != 0) {
    a = poison.apply(row, column, a);
    b = poison.apply(row, column + 1, b);
  }
  auto* sums = reinterpret_cast<float*>(to) + column;
  sums[0] += a * factor;
  if (column + 1 < head_dim) sums[1] += b * factor;
}

// Waits for the tile of this step and, if there are two buffers, begins to load the next. Returns
// the buffer of this step.
template <int kStages, typename Load>
__device__ int arrive(int step, int steps, const Load& load) {
  const int next = step + kStages - 1;
  if (next < steps) load(next);
  commit_copies();
  wait_copies<kStages - 1>();
  __syncthreads();
  return step % kStages;
}

// sums[2 n] and sums[2 n + 1], 16 x 8 each, += a * b.
template <typename T, int kBlocks>
__device__ void multiply_two(float (&sums)[kBlocks][4], int n, const std::uint32_t (&a)[4],
                             const std::uint32_t (&b)[4]) {
  multiply<T>(sums[2 * n], a, b[0], b[1]);
  multiply<T>(sums[2 * n + 1], a, b[2], b[3]);
}

template <typename T, int kDim, typename Buffers>
struct QueryShared {
  SharedTile<T, kRows, kDim> q;
  SharedTile<T, kRows, kDim> dout;
  SharedTile<T, Buffers::kRows, kDim> k[Buffers::kStages];
  SharedTile<T, Buffers::kRows, kDim> v[Buffers::kStages];
  TileRows<kRows, 5> queries;  // q, dout, lse, delta, dq
  TileRows<Buffers::kRows, 2> keys[Buffers::kStages];
  Poison<kRows, kDim> poison;
};

// kModified: there may be a softcap, dropout or both.
template <typename T, int kDim, typename Buffers, bool kModified>
__global__ void __launch_bounds__(kThreads)
    query_gradient(const __grid_constant__ BackwardParams p) {
  constexpr int kKeys = Buffers::kRows;  // of a tile
  constexpr int kStages = Buffers::kStages;
  extern __shared__ __align__(128) unsigned char memory[];
  auto& shared = *reinterpret_cast<QueryShared<T, kDim, Buffers>*>(memory);
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
  shared.queries.fill_rows(p.tables, group, group.queries, item.begin, item.begin + item.rows,
                           query_place, p.q, p.dout, p.lse, p.delta, p.dq);
  const Walk walk = walk_keys<kKeys>(p.tables.runs, group, item);
  const auto load = [&](int step) {
    const int stage = step % kStages;
    shared.keys[stage].fill(p.tables, group, group.keys, (walk.first + step) * kKeys, walk.extent,
                            key_place, p.k, p.v);
    __syncthreads();
    shared.k[stage].load(shared.keys[stage].at[0], head_dim, p.shape.aligned, p.tables.items);
    shared.v[stage].load(shared.keys[stage].at[1], head_dim, p.shape.aligned, p.tables.items);
  };
  const int steps = walk.end - walk.first;
  __syncthreads();
  shared.q.load(shared.queries.at[0], head_dim, p.shape.aligned, p.tables.items);
  shared.dout.load(shared.queries.at[1], head_dim, p.shape.aligned, p.tables.items);
  if (kStages == 2 && steps > 0) load(0);
  commit_copies();

  int index[2];
  unsigned repeats[2];
  float reference[2];
  float delta[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = warp * 16 + half * 8 + lane / 4;
    index[half] = shared.queries.index[row];
    repeats[half] = shared.queries.repeats[row];
    reference[half] = reference_of(shared.queries.at[2][row]);
    delta[half] =
        index[half] != kAbsent ? *reinterpret_cast<const float*>(shared.queries.at[3][row]) : 0.0F;
  }
  float dq[kDim / 8][4] = {};
  const float scale = p.shape.scale * kLog2E;
  const PairWords words(p.modifiers, group, item.batch, member.head);
  dropout::Row row_words[2];
  if constexpr (kModified) {
#pragma unroll
    for (int half = 0; half < 2; ++half) row_words[half] = words.query(index[half]);
  }
  for (int step = 0; step < steps; ++step) {
    const int stage = arrive<kStages>(step, steps, load);

    float s[kKeys / 8][4] = {};
    float ds[kKeys / 8][4] = {};
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
      std::uint32_t q[4];
      std::uint32_t g[4];
      shared.q.load_a(q, warp * 16, k);
      shared.dout.load_a(g, warp * 16, k);
#pragma unroll
      for (int n = 0; n < kKeys / 16; ++n) {
        std::uint32_t b[4];
        shared.k[stage].load_b(b, n * 16, k);
        multiply_two<T>(s, n, q, b);
        shared.v[stage].load_b(b, n * 16, k);
        multiply_two<T>(ds, n, g, b);
      }
    }
    const TileRows<kKeys, 2>& rows = shared.keys[stage];
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int key = n * 8 + lane % 4 * 2 + e % 2;
        float score = s[n][e] * scale - reference[e / 2];
        float slope = 1;
        if constexpr (kModified) {
          const Score modified = modified_score(p.shape, p.modifiers, s[n][e]);
          score = modified.value - reference[e / 2];
          slope = modified.slope;
          if (p.modifiers.rate.drops())
            ds[n][e] *= kept_factor(p.modifiers.rate, row_words[e / 2], words.key(rows.index[key]));
        }
        if (group.repeats > 0) score += log2_weight(repeats[e / 2], rows.repeats[key]);
        // The slope of a hidden pair may be NaN: it is 0, whatever its factors.
        ds[n][e] = hidden_pair(group, index[e / 2], rows.index[key])
                       ? 0.0F
                       : exp2_fast(score) * (ds[n][e] - delta[e / 2]) * slope;
      }
    }
    if (limited(group)) {
      if (!ordered(group) || group.keys.by_index != 0 ||
          may_hide(group, shared.queries.index[0], shared.queries.index[item.rows - 1],
                   rows.index[0], rows.index[kKeys - 1])) {
        shared.poison.take_from(shared.k[stage], [&](int query, int key) {
          return !hidden_pair(group, shared.queries.index[query], rows.index[key]);
        });
      }
    }
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
      std::uint32_t a[4];
      as_a<T>(a, ds[2 * k], ds[2 * k + 1]);
#pragma unroll
      for (int n = 0; n < kDim / 16; ++n) {
        std::uint32_t b[4];
        shared.k[stage].load_b_transposed(b, k * 16, n);
        multiply_two<T>(dq, n, a, b);
      }
    }
    __syncthreads();
  }
  wait_copies<0>();

#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (index[half] == kAbsent) continue;
    const int row = warp * 16 + half * 8 + lane / 4;
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      const int column = n * 8 + lane % 4 * 2;
      if (column < head_dim) {
        add_pair(shared.queries.at[4][row], row, column, head_dim, dq[n][2 * half],
                 dq[n][2 * half + 1], p.shape.scale, shared.poison);
      }
    }
  }
}

template <typename T, int kDim, typename Buffers>
struct KeyShared {
  SharedTile<T, kRows, kDim> k;
  SharedTile<T, kRows, kDim> v;
  SharedTile<T, Buffers::kRows, kDim> q[Buffers::kStages];
  SharedTile<T, Buffers::kRows, kDim> dout[Buffers::kStages];
  TileRows<kRows, 4> keys;                                // k, v, dk, dv
  TileRows<Buffers::kRows, 4> queries[Buffers::kStages];  // q, dout, lse, delta
  float reference[Buffers::kStages][Buffers::kRows];
  float delta[Buffers::kStages][Buffers::kRows];
  Poison<kRows, kDim> key_poison;
  Poison<kRows, kDim> value_poison;
};
template <typename T, int kDim, typename Buffers>
struct ModifiedKeyShared : KeyShared<T, kDim, Buffers> {
  dropout::Row words[Buffers::kStages][Buffers::kRows];  // of queries
};

// dK and dV of 256 columns do not fit the registers: a block computes at most 128 of them.
template <int kDim>
constexpr int kColumns = kDim < 128 ? kDim : 128;

template <typename T, int kDim, typename Buffers, bool kModified>
__global__ void __launch_bounds__(kThreads) key_gradient(const __grid_constant__ BackwardParams p) {
  using Memory = std::conditional_t<kModified, ModifiedKeyShared<T, kDim, Buffers>,
                                    KeyShared<T, kDim, Buffers>>;
  constexpr int kPart = kColumns<kDim>;
  constexpr int kQueries = Buffers::kRows;  // of a tile
  constexpr int kStages = Buffers::kStages;
  extern __shared__ __align__(128) unsigned char memory[];
  auto& shared = *reinterpret_cast<Memory*>(memory);
  const Item item = p.tables.items[p.first_item + blockIdx.x];
  if (item.rows == 0) return;
  const Group group = p.tables.groups[item.group];
  const int head_dim = p.shape.head_dim;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int first_column = static_cast<int>(blockIdx.y) * kPart;
  {
    const Member member = p.tables.members[item.member];
    const RowOwner place{item.batch, member.kv_head, member.unit};
    shared.key_poison.clear();
    shared.value_poison.clear();
    shared.keys.fill_rows(p.tables, group, group.keys, item.begin, item.begin + item.rows, place,
                          p.k, p.v, p.dk, p.dv);
  }
  // Tiles that see no key of the block are skipped; the others keep their places in the list.
  const Walk walk = walk_queries<kQueries>(p.tables.runs, group, item);
  const int tiles = walk.end - walk.first;
  const int steps = tiles * item.members;
  const auto load = [&](int step) {
    const int stage = step % kStages;
    const Member member = p.tables.members[item.member + step / tiles];
    const RowOwner place{item.batch, member.head, member.unit};
    TileRows<kQueries, 4>& rows = shared.queries[stage];
    rows.fill(p.tables, group, group.queries, (walk.first + step % tiles) * kQueries, walk.extent,
              place, p.q, p.dout, p.lse, p.delta);
    __syncthreads();
    shared.q[stage].load(rows.at[0], head_dim, p.shape.aligned, p.tables.items);
    shared.dout[stage].load(rows.at[1], head_dim, p.shape.aligned, p.tables.items);
    if (threadIdx.x < kQueries) {
      const bool present = rows.index[threadIdx.x] != kAbsent;
      shared.reference[stage][threadIdx.x] = reference_of(rows.at[2][threadIdx.x]);
      shared.delta[stage][threadIdx.x] =
          present ? *reinterpret_cast<const float*>(rows.at[3][threadIdx.x]) : 0.0F;
      if constexpr (kModified) {
        const PairWords words(p.modifiers, group, item.batch, member.head);
        if (present) shared.words[stage][threadIdx.x] = words.query(rows.index[threadIdx.x]);
      }
    }
  };
  __syncthreads();
  shared.k.load(shared.keys.at[0], head_dim, p.shape.aligned, p.tables.items);
  shared.v.load(shared.keys.at[1], head_dim, p.shape.aligned, p.tables.items);
  if (kStages == 2 && steps > 0) load(0);
  commit_copies();

  int index[2];
  unsigned repeats[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = warp * 16 + half * 8 + lane / 4;
    index[half] = shared.keys.index[row];
    repeats[half] = shared.keys.repeats[row];
  }
  float dk[kPart / 8][4] = {};
  float dv[kPart / 8][4] = {};
  const float scale = p.shape.scale * kLog2E;
  for (int step = 0; step < steps; ++step) {
    const int stage = arrive<kStages>(step, steps, load);

    // Transposed: rows are keys, columns are queries.
    float weights[kQueries / 8][4] = {};
    float ds[kQueries / 8][4] = {};
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
      std::uint32_t a[4];
      std::uint32_t b[4];
      shared.k.load_a(a, warp * 16, k);
#pragma unroll
      for (int n = 0; n < kQueries / 16; ++n) {
        shared.q[stage].load_b(b, n * 16, k);
        multiply_two<T>(weights, n, a, b);
      }
      shared.v.load_a(a, warp * 16, k);
#pragma unroll
      for (int n = 0; n < kQueries / 16; ++n) {
        shared.dout[stage].load_b(b, n * 16, k);
        multiply_two<T>(ds, n, a, b);
      }
    }
    const TileRows<kQueries, 4>& rows = shared.queries[stage];
    std::uint32_t words[2] = {};  // of keys
    if constexpr (kModified) {
      const int head = p.tables.members[item.member + step / tiles].head;
      const PairWords of_head(p.modifiers, group, item.batch, head);
#pragma unroll
      for (int half = 0; half < 2; ++half) words[half] = of_head.key(index[half]);
    }
#pragma unroll
    for (int n = 0; n < kQueries / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int query = n * 8 + lane % 4 * 2 + e % 2;
        float score = weights[n][e] * scale - shared.reference[stage][query];
        float slope = 1;
        float kept = 1;
        if constexpr (kModified) {
          const Score modified = modified_score(p.shape, p.modifiers, weights[n][e]);
          score = modified.value - shared.reference[stage][query];
          slope = modified.slope;
          if (p.modifiers.rate.drops())
            kept = kept_factor(p.modifiers.rate, shared.words[stage][query], words[e / 2]);
        }
        if (group.repeats > 0) score += log2_weight(rows.repeats[query], repeats[e / 2]);
        const bool hidden = hidden_pair(group, rows.index[query], index[e / 2]);
        const float weight = hidden ? 0.0F : exp2_fast(score);
        weights[n][e] = weight;
        if constexpr (kModified) {
          weights[n][e] *= kept;
          ds[n][e] *= kept;
        }
        ds[n][e] = hidden ? 0.0F : weight * (ds[n][e] - shared.delta[stage][query]) * slope;
      }
    }
    if (limited(group)) {
      if (!ordered(group) || group.queries.by_index != 0 ||
          may_hide(group, rows.index[0], rows.index[kQueries - 1], shared.keys.index[0],
                   shared.keys.index[item.rows - 1])) {
        const auto sees = [&](int key, int query) {
          return !hidden_pair(group, rows.index[query], shared.keys.index[key]);
        };
        shared.value_poison.take_from(shared.dout[stage], sees);
        shared.key_poison.take_from(shared.q[stage], sees);
      }
    }
#pragma unroll
    for (int k = 0; k < kQueries / 16; ++k) {
      std::uint32_t a[4];
      std::uint32_t b[4];
      as_a<T>(a, weights[2 * k], weights[2 * k + 1]);
#pragma unroll
      for (int n = 0; n < kPart / 16; ++n) {
        shared.dout[stage].load_b_transposed(b, k * 16, first_column / 16 + n);
        multiply_two<T>(dv, n, a, b);
      }
      as_a<T>(a, ds[2 * k], ds[2 * k + 1]);
#pragma unroll
      for (int n = 0; n < kPart / 16; ++n) {
        shared.q[stage].load_b_transposed(b, k * 16, first_column / 16 + n);
        multiply_two<T>(dk, n, a, b);
      }
    }
    __syncthreads();
  }
  wait_copies<0>();

#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (index[half] == kAbsent) continue;
    const int row = warp * 16 + half * 8 + lane / 4;
#pragma unroll
    for (int n = 0; n < kPart / 8; ++n) {
      const int column = first_column + n * 8 + lane % 4 * 2;
      if (column >= head_dim) continue;
      add_pair(shared.keys.at[2][row], row, column, head_dim, dk[n][2 * half], dk[n][2 * half + 1],
               p.shape.scale, shared.key_poison);
      add_pair(shared.keys.at[3][row], row, column, head_dim, dv[n][2 * half], dv[n][2 * half + 1],
               1.0F, shared.value_poison);
    }
  }
}

}  // namespace

cudaError_t portable_query_gradient(const BackwardParams& params, cudaStream_t stream) {
  if (params.items == 0) return cudaSuccess;
  const bool wide = params.shape.head_dim > kMostTiledDim;
  if (params.shape.dtype == DType::f32)
    return wide ? query_gradient_wide_fp32(params, stream) : query_gradient_fp32(params, stream);
  if (wide) return query_gradient_wide_half(params, stream);
  return with_half(params.shape.dtype, [&](auto half) {
    using T = decltype(half);
    return with_dim(params.shape.head_dim, [&](auto dim) {
      return with_buffers<QueryShared, T, dim()>([&](auto buffers) {
        using Buffers = decltype(buffers);
        return with_modified(params.modifiers, [&](auto modified) {
          return launch(query_gradient<T, dim(), Buffers, modified()>,
                        dim3(static_cast<unsigned>(params.items)), kThreads,
                        sizeof(QueryShared<T, dim(), Buffers>), params, stream);
        });
      });
    });
  });
}

cudaError_t portable_key_gradient(const BackwardParams& params, cudaStream_t stream) {
  if (params.items == 0) return cudaSuccess;
  const bool wide = params.shape.head_dim > kMostTiledDim;
  if (params.shape.dtype == DType::f32)
    return wide ? key_gradient_wide_fp32(params, stream) : key_gradient_fp32(params, stream);
  if (wide) return key_gradient_wide_half(params, stream);
  return with_half(params.shape.dtype, [&](auto half) {
    using T = decltype(half);
    return with_dim(params.shape.head_dim, [&](auto dim) {
      const unsigned parts = params.shape.head_dim > 128 ? 2 : 1;
      const auto grid = dim3(static_cast<unsigned>(params.items), parts);
      if (params.modifiers.any()) {
        return with_buffers<ModifiedKeyShared, T, dim()>([&](auto buffers) {
          using Buffers = decltype(buffers);
          return launch(key_gradient<T, dim(), Buffers, true>, grid, kThreads,
                        sizeof(ModifiedKeyShared<T, dim(), Buffers>), params, stream);
        });
      }
      return with_buffers<KeyShared, T, dim()>([&](auto buffers) {
        using Buffers = decltype(buffers);
        return launch(key_gradient<T, dim(), Buffers, false>, grid, kThreads,
                      sizeof(KeyShared<T, dim(), Buffers>), params, stream);
      });
    });
  });
}

}  // namespace annulus::cuda
