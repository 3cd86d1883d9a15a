#include "kernels/cuda/portable/dispatch.cuh"
#include "kernels/cuda/portable/kept.cuh"
#include "kernels/cuda/portable/kernels.h"
#include "kernels/cuda/portable/rows.cuh"
#include "kernels/cuda/portable/tiles.h"
#include "kernels/cuda/rows/sink.cuh"

namespace annulus::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kItemRows = kPortableGradientTile;

// What a kernel is compiled for: see Fp32Tile.
template <int kDimOfHead, int kOwnRows, int kOtherRows>
struct Shape {
  static constexpr int kDim = kDimOfHead;
  static constexpr int kOwn = kOwnRows;
  static constexpr int kOther = kOtherRows;
  static constexpr int kParts = kItemRows / kOwn;  // blocks of an item, by rows that they own
};

// What a block owns of an item.
template <typename Shape, typename Params>
__device__ Item part_of_item(const Params& p) {
  Item item = p.tables.items[p.first_item + blockIdx.x / Shape::kParts];
  const int before = static_cast<int>(blockIdx.x) % Shape::kParts * Shape::kOwn;
  item.begin += before;
  item.rows = max(0, min(Shape::kOwn, item.rows - before));
  return item;
}

// Rows of kDim floats, padded by four, so that 16 bytes of eight rows are in different banks.
template <int kRows, int kDim>
struct FloatTile {
  static constexpr int kStep = kDim + 4;
  float data[kRows * kStep];

  __device__ const float* row(int r) const { return data + r * kStep; }
  __device__ void load(std::byte* const* at, int head_dim) {
    for (int i = static_cast<int>(threadIdx.x); i < kRows * kDim; i += kThreads) {
      const int r = i / kDim;
      const int d = i % kDim;
      const bool present = at[r] != nullptr && d < head_dim;
      data[r * kStep + d] = present ? reinterpret_cast<const float*>(at[r])[d] : 0.0F;
    }
  }
};

// result[i][j] = row (ty + 16 i) of a times row (tx + 16 j) of b.
template <int kDim, int kA, int kB>
__device__ void multiply_rows(float (&result)[kA / 16][kB / 16], const FloatTile<kA, kDim>& a,
                              const FloatTile<kB, kDim>& b, int ty, int tx) {
#pragma unroll
  for (int i = 0; i < kA / 16; ++i) {
#pragma unroll
    for (int j = 0; j < kB / 16; ++j) result[i][j] = 0;
  }
  for (int d = 0; d < kDim; d += 4) {
    float4 x[kA / 16];
    float4 y[kB / 16];
#pragma unroll
    for (int i = 0; i < kA / 16; ++i)
      x[i] = *reinterpret_cast<const float4*>(a.row(ty + 16 * i) + d);
#pragma unroll
    for (int j = 0; j < kB / 16; ++j)
      y[j] = *reinterpret_cast<const float4*>(b.row(tx + 16 * j) + d);
#pragma unroll
    for (int i = 0; i < kA / 16; ++i) {
#pragma unroll
      for (int j = 0; j < kB / 16; ++j) {
        float& sum = result[i][j];
        sum = fmaf(x[i].x, y[j].x, sum);
        sum = fmaf(x[i].y, y[j].y, sum);
        sum = fmaf(x[i].z, y[j].z, sum);
        sum = fmaf(x[i].w, y[j].w, sum);
      }
    }
  }
}

// 0 * NaN is NaN, but a row with NaN must not reach rows that do not see it. So hidden pairs have a
// weight of -0, which no other pair has.
constexpr float kHidden = -0.0F;
__device__ bool is_hidden(float weight) { return __float_as_uint(weight) == 0x80000000U; }

// sums[i][c] += sum over rows r of weights[ty + 16 i][r] * rows[r][tx + 16 c]; the sum over a tile
// starts from zero, so that errors grow with the number of tiles, not of rows.
template <int kDim, int kOwn, int kRows>
__device__ void add_weighted(float (&sums)[kOwn / 16][kDim / 16],
                             const float (&weights)[kOwn][kRows + 1],
                             const FloatTile<kRows, kDim>& rows, int ty, int tx) {
  constexpr int kOwnPerThread = kOwn / 16;
#pragma unroll
  for (int c = 0; c < kDim / 16; ++c) {
    float part[kOwnPerThread] = {};
#pragma unroll 8
    for (int r = 0; r < kRows; ++r) {
      const float value = rows.row(r)[tx + 16 * c];
#pragma unroll
      for (int i = 0; i < kOwnPerThread; ++i) {
        const float weight = weights[ty + 16 * i][r];
        if (!is_hidden(weight)) part[i] = fmaf(weight, value, part[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < kOwnPerThread; ++i) sums[i][c] += part[i];
  }
}

// Over the 16 threads that have a row.
__device__ float row_sum(float x) {
  for (int step = 8; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffU, x, step);
  return x;
}
__device__ float row_max(float x) {
  for (int step = 8; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffU, x, step));
  return x;
}

template <typename Shape>
struct ForwardShared {
  static constexpr int kDim = Shape::kDim;
  static constexpr int kOwn = Shape::kOwn;
  static constexpr int kOther = Shape::kOther;
  FloatTile<kOwn, kDim> q;
  FloatTile<kOther, kDim> k;
  FloatTile<kOther, kDim> v;
  float weights[kOwn][kOther + 1];
  TileRows<kOwn, 4> queries;  // q, lse, state, out
  TileRows<kOther, 2> keys;
};

template <typename Shape>
__global__ void __launch_bounds__(kThreads)
    forward(const __grid_constant__ PortableForwardParams p) {
  constexpr int kDim = Shape::kDim;
  constexpr int kOther = Shape::kOther;
  constexpr int kOwnPerThread = Shape::kOwn / 16;
  constexpr int kOtherPerThread = kOther / 16;
  extern __shared__ __align__(128) unsigned char memory[];
  auto& shared = *reinterpret_cast<ForwardShared<Shape>*>(memory);
  const Item item = part_of_item<Shape>(p);
  if (item.rows == 0) return;
  const Group group = p.tables.groups[item.group];
  const Member member = p.tables.members[item.member];
  const RowOwner query_place{item.batch, member.head, member.unit};
  const RowOwner key_place{item.batch, member.kv_head, member.unit};
  const int head_dim = p.shape.head_dim;
  const int tx = static_cast<int>(threadIdx.x) % 16;
  const int ty = static_cast<int>(threadIdx.x) / 16;

  shared.queries.fill_rows(p.tables, group, group.queries, item.begin, item.begin + item.rows,
                           query_place, p.q, Channel{p.lse}, Channel{p.state}, Channel{p.out});
  const Walk walk = walk_keys<kOther>(p.tables.runs, group, item);
  __syncthreads();
  if (p.kept.tables.branches > 0) {
    point_to_kept(shared.queries, p, group, item, member.head);
    __syncthreads();
  }
  shared.q.load(shared.queries.at[0], head_dim);
  float o[kOwnPerThread][kDim / 16];
  float highest[kOwnPerThread];
  float sum[kOwnPerThread];
#pragma unroll
  for (int i = 0; i < kOwnPerThread; ++i) {
    const int row = ty + 16 * i;
    const bool present = shared.queries.index[row] != kAbsent;
    const float l = p.load_state && present
                        ? *reinterpret_cast<const float*>(shared.queries.at[1][row])
                        : -INFINITY;
    highest[i] = l * kLog2E;
    sum[i] = l != -INFINITY ? 1.0F : 0.0F;
    const auto* from = reinterpret_cast<const float*>(shared.queries.at[2][row]);
#pragma unroll
    for (int c = 0; c < kDim / 16; ++c) {
      const int column = tx + 16 * c;
      o[i][c] = l != -INFINITY && column < head_dim ? from[column] : 0.0F;
    }
  }
  const float scale = p.shape.scale * kLog2E;
  for (int first = walk.first * kOther; first < walk.extent; first += kOther) {
    __syncthreads();
    shared.keys.fill(p.tables, group, group.keys, first, walk.extent, key_place, p.k, p.v);
    __syncthreads();
    shared.k.load(shared.keys.at[0], head_dim);
    shared.v.load(shared.keys.at[1], head_dim);
    __syncthreads();
    float s[kOwnPerThread][kOtherPerThread];
    multiply_rows(s, shared.q, shared.k, ty, tx);
#pragma unroll
    for (int i = 0; i < kOwnPerThread; ++i) {
      const int row = ty + 16 * i;
      float top = highest[i];
#pragma unroll
      for (int j = 0; j < kOtherPerThread; ++j) {
        const int key = shared.keys.index[tx + 16 * j];
        const bool hidden = hidden_pair(group, shared.queries.index[row], key);
        s[i][j] =
            hidden
                ? -INFINITY
                : fmaf(s[i][j], scale,
                       log2_weight(shared.queries.repeats[row], shared.keys.repeats[tx + 16 * j]));
        top = fmaxf(top, s[i][j]);
      }
      top = row_max(top);
      const float reference = top == -INFINITY ? 0.0F : top;
      const float shrink = exp2f(highest[i] - reference);
      highest[i] = top;
      float total = 0;
#pragma unroll
      for (int j = 0; j < kOtherPerThread; ++j) {
        const bool hidden =
            hidden_pair(group, shared.queries.index[row], shared.keys.index[tx + 16 * j]);
        const float weight = exp2f(s[i][j] - reference);
        shared.weights[row][tx + 16 * j] = hidden ? kHidden : weight;
        total += weight;
      }
      sum[i] = fmaf(sum[i], shrink, row_sum(total));
#pragma unroll
      for (int c = 0; c < kDim / 16; ++c) o[i][c] *= shrink;
    }
    __syncthreads();
    add_weighted<kDim, Shape::kOwn, kOther>(o, shared.weights, shared.v, ty, tx);
  }
  const float sink = sink_of(p.sinks, member.head);
#pragma unroll
  for (int i = 0; i < kOwnPerThread; ++i) {
    const int row = ty + 16 * i;
    if (shared.queries.index[row] == kAbsent) continue;
    const bool empty = highest[i] == -INFINITY && sum[i] == 0;  // not: a NaN
    const WithSink end = with_sink(empty ? -INFINITY : (highest[i] + log2f(sum[i])) * kLn2, sink);
    if (tx == 0)  // an empty one's, too: nobody else may have
      *reinterpret_cast<float*>(shared.queries.at[1][row]) = end.lse;
    if (empty && !p.for_good) continue;
    const float inverse = 1.0F / (empty ? 1.0F : sum[i]);
    const float factor = end.kept * p.out_factor;  // by itself, as finish_rows multiplies states
    auto* to = reinterpret_cast<float*>(shared.queries.at[3][row]);
#pragma unroll
    for (int c = 0; c < kDim / 16; ++c) {
      const int column = tx + 16 * c;
      if (column < head_dim) to[column] = empty ? factor : o[i][c] * inverse * factor;
    }
  }
}

template <typename Shape>
struct GradientShared {
  static constexpr int kDim = Shape::kDim;
  static constexpr int kOwn = Shape::kOwn;
  static constexpr int kOther = Shape::kOther;
  FloatTile<kOwn, kDim> own[2];      // q, dout; or k, v
  FloatTile<kOther, kDim> other[2];  // k, v; or q, dout
  float weights[kOwn][kOther + 1];
  float ds[kOwn][kOther + 1];
  TileRows<kOwn, 5> queries;  // q, dout, lse, delta, dq
  TileRows<kOwn, 4> keys;     // k, v, dk, dv
};

// Products of the block's own rows and of a tile's rows, which `rows` has just found: q.k and
// dout.v.
template <typename Shape, typename Rows>
__device__ void multiply_tile(float (&s)[Shape::kOwn / 16][Shape::kOther / 16],
                              float (&dp)[Shape::kOwn / 16][Shape::kOther / 16],
                              GradientShared<Shape>& shared, const Rows& rows, int head_dim, int ty,
                              int tx) {
  __syncthreads();
  shared.other[0].load(rows.at[0], head_dim);
  shared.other[1].load(rows.at[1], head_dim);
  __syncthreads();
  multiply_rows(s, shared.own[0], shared.other[0], ty, tx);
  multiply_rows(dp, shared.own[1], shared.other[1], ty, tx);
}

// P and dS of a pair, from q.k and dout.v. L and delta are of the query.
struct Gradient {
  float weight;
  float ds;
};
__device__ Gradient gradient_of(float s, float dp, float lse, float delta, float log2_of_weight,
                                float scale, bool hidden) {
  if (hidden || lse == -INFINITY) return {kHidden, kHidden};
  const float weight = exp2f(fmaf(s, scale, log2_of_weight - lse * kLog2E));
  return {weight, weight * (dp - delta) + 0.0F};  // not -0
}
__device__ float read(const std::byte* at) {
  return at != nullptr ? *reinterpret_cast<const float*>(at) : 0.0F;
}

// Adds rows of sums to memory, without columns beyond head_dim.
template <int kRows, int kColumns>
__device__ void add_rows(const float (&sums)[kRows][kColumns], std::byte* const* at, float factor,
                         int head_dim, int ty, int tx) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    auto* to = reinterpret_cast<float*>(at[ty + 16 * i]);
    if (to == nullptr) continue;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int column = tx + 16 * c;
      if (column < head_dim) to[column] = fmaf(sums[i][c], factor, to[column]);
    }
  }
}

template <typename Shape>
__global__ void __launch_bounds__(kThreads)
    query_gradient(const __grid_constant__ BackwardParams p) {
  constexpr int kDim = Shape::kDim;
  constexpr int kOther = Shape::kOther;
  constexpr int kOwnPerThread = Shape::kOwn / 16;
  constexpr int kOtherPerThread = kOther / 16;
  extern __shared__ __align__(128) unsigned char memory[];
  auto& shared = *reinterpret_cast<GradientShared<Shape>*>(memory);
  const Item item = part_of_item<Shape>(p);
  if (item.rows == 0) return;
  const Group group = p.tables.groups[item.group];
  const Member member = p.tables.members[item.member];
  const RowOwner query_place{item.batch, member.head, member.unit};
  const RowOwner key_place{item.batch, member.kv_head, member.unit};
  const int head_dim = p.shape.head_dim;
  const int tx = static_cast<int>(threadIdx.x) % 16;
  const int ty = static_cast<int>(threadIdx.x) / 16;
  auto& keys_of_tile = *reinterpret_cast<TileRows<kOther, 2>*>(&shared.keys);
  static_assert(sizeof(TileRows<kOther, 2>) <= sizeof(shared.keys));

  shared.queries.fill_rows(p.tables, group, group.queries, item.begin, item.begin + item.rows,
                           query_place, p.q, p.dout, p.lse, p.delta, p.dq);
  const Walk walk = walk_keys<kOther>(p.tables.runs, group, item);
  __syncthreads();
  shared.own[0].load(shared.queries.at[0], head_dim);
  shared.own[1].load(shared.queries.at[1], head_dim);
  float lse[kOwnPerThread];
  float delta[kOwnPerThread];
#pragma unroll
  for (int i = 0; i < kOwnPerThread; ++i) {
    lse[i] = read(shared.queries.at[2][ty + 16 * i]);
    delta[i] = read(shared.queries.at[3][ty + 16 * i]);
  }
  float dq[kOwnPerThread][kDim / 16] = {};
  const float scale = p.shape.scale * kLog2E;
  for (int first = walk.first * kOther; first < walk.extent; first += kOther) {
    __syncthreads();
    keys_of_tile.fill(p.tables, group, group.keys, first, walk.extent, key_place, p.k, p.v);
    float s[kOwnPerThread][kOtherPerThread];
    float dp[kOwnPerThread][kOtherPerThread];
    multiply_tile(s, dp, shared, keys_of_tile, head_dim, ty, tx);
#pragma unroll
    for (int i = 0; i < kOwnPerThread; ++i) {
#pragma unroll
      for (int j = 0; j < kOtherPerThread; ++j) {
        const int row = ty + 16 * i;
        const int column = tx + 16 * j;
        const bool hidden =
            hidden_pair(group, shared.queries.index[row], keys_of_tile.index[column]);
        const float weight = log2_weight(shared.queries.repeats[row], keys_of_tile.repeats[column]);
        shared.ds[row][column] =
            gradient_of(s[i][j], dp[i][j], lse[i], delta[i], weight, scale, hidden).ds;
      }
    }
    __syncthreads();
    add_weighted<kDim, Shape::kOwn, kOther>(dq, shared.ds, shared.other[0], ty, tx);
  }
  add_rows(dq, shared.queries.at[4], p.shape.scale, head_dim, ty, tx);
}

template <typename Shape>
__global__ void __launch_bounds__(kThreads) key_gradient(const __grid_constant__ BackwardParams p) {
  constexpr int kDim = Shape::kDim;
  constexpr int kOther = Shape::kOther;
  constexpr int kOwnPerThread = Shape::kOwn / 16;
  constexpr int kOtherPerThread = kOther / 16;
  extern __shared__ __align__(128) unsigned char memory[];
  auto& shared = *reinterpret_cast<GradientShared<Shape>*>(memory);
  const Item item = part_of_item<Shape>(p);
  if (item.rows == 0) return;
  const Group group = p.tables.groups[item.group];
  const int head_dim = p.shape.head_dim;
  const int tx = static_cast<int>(threadIdx.x) % 16;
  const int ty = static_cast<int>(threadIdx.x) / 16;
  auto& queries_of_tile = *reinterpret_cast<TileRows<kOther, 4>*>(&shared.queries);
  static_assert(sizeof(TileRows<kOther, 4>) <= sizeof(shared.queries));
  {
    const Member member = p.tables.members[item.member];
    const RowOwner place{item.batch, member.kv_head, member.unit};
    shared.keys.fill_rows(p.tables, group, group.keys, item.begin, item.begin + item.rows, place,
                          p.k, p.v, p.dk, p.dv);
  }
  const Walk walk = walk_queries<kOther>(p.tables.runs, group, item);
  __syncthreads();
  shared.own[0].load(shared.keys.at[0], head_dim);
  shared.own[1].load(shared.keys.at[1], head_dim);
  float dk[kOwnPerThread][kDim / 16] = {};
  float dv[kOwnPerThread][kDim / 16] = {};
  const float scale = p.shape.scale * kLog2E;
  for (int m = 0; m < item.members; ++m) {
    const Member member = p.tables.members[item.member + m];
    const RowOwner place{item.batch, member.head, member.unit};
    for (int first = walk.first * kOther; first < walk.extent; first += kOther) {
      __syncthreads();
      queries_of_tile.fill(p.tables, group, group.queries, first, walk.extent, place, p.q, p.dout,
                           p.lse, p.delta);
      // Rows are keys, columns are queries.
      float s[kOwnPerThread][kOtherPerThread];
      float dp[kOwnPerThread][kOtherPerThread];
      multiply_tile(s, dp, shared, queries_of_tile, head_dim, ty, tx);
#pragma unroll
      for (int j = 0; j < kOtherPerThread; ++j) {
        const int column = tx + 16 * j;
        const float lse = read(queries_of_tile.at[2][column]);
        const float delta = read(queries_of_tile.at[3][column]);
#pragma unroll
        for (int i = 0; i < kOwnPerThread; ++i) {
          const int row = ty + 16 * i;
          const bool hidden =
              hidden_pair(group, queries_of_tile.index[column], shared.keys.index[row]);
          const float weight =
              log2_weight(queries_of_tile.repeats[column], shared.keys.repeats[row]);
          const Gradient gradient =
              gradient_of(s[i][j], dp[i][j], lse, delta, weight, scale, hidden);
          shared.weights[row][column] = gradient.weight;
          shared.ds[row][column] = gradient.ds;
        }
      }
      __syncthreads();
      add_weighted<kDim, Shape::kOwn, kOther>(dv, shared.weights, shared.other[1], ty, tx);
      add_weighted<kDim, Shape::kOwn, kOther>(dk, shared.ds, shared.other[0], ty, tx);
    }
  }
  add_rows(dk, shared.keys.at[2], p.shape.scale, head_dim, ty, tx);
  add_rows(dv, shared.keys.at[3], 1.0F, head_dim, ty, tx);
}

// Launches kernel(Shape) with the best tile that fits. Only tiles that some GPU needs are compiled.
template <bool kBackward, template <typename> typename Shared, std::size_t kTile = 0, int kDim,
          typename Params, typename Kernel>
cudaError_t launch_tile(std::integral_constant<int, kDim> dim, const Fp32Tile& chosen,
                        const Params& params, cudaStream_t stream, const Kernel& kernel) {
  constexpr Fp32Tile tile = fp32_tiles(kBackward)[kTile];
  using OwnShape = Shape<kDim, tile.own, tile.other>;
  constexpr std::size_t bytes = sizeof(Shared<OwnShape>);
  static_assert(bytes == fp32_shared_bytes(tile, kDim, kBackward));
  if constexpr (bytes > kLeastSharedBytes) {
    if (chosen != tile)
      return launch_tile<kBackward, Shared, kTile + 1>(dim, chosen, params, stream, kernel);
  }
  return launch(kernel(OwnShape()), dim3(static_cast<unsigned>(params.items * OwnShape::kParts)),
                kThreads, bytes, params, stream);
}

template <bool kBackward, template <typename> typename Shared, typename Params, typename Kernel>
cudaError_t launch_items(const Params& params, cudaStream_t stream, const Kernel& kernel) {
  std::size_t most = 0;
  if (const cudaError_t error = block_shared_bytes(most); error != cudaSuccess) return error;
  const Fp32Tile tile = fp32_tile(params.shape.head_dim, kBackward, most);
  return with_dim(params.shape.head_dim, [&](auto dim) {
    return launch_tile<kBackward, Shared>(dim, tile, params, stream, kernel);
  });
}

}  // namespace

cudaError_t forward_fp32(const PortableForwardParams& params, cudaStream_t stream) {
  return launch_items<false, ForwardShared>(params, stream,
                                            [](auto shape) { return forward<decltype(shape)>; });
}

cudaError_t query_gradient_fp32(const BackwardParams& params, cudaStream_t stream) {
  return launch_items<true, GradientShared>(
      params, stream, [](auto shape) { return query_gradient<decltype(shape)>; });
}

cudaError_t key_gradient_fp32(const BackwardParams& params, cudaStream_t stream) {
  return launch_items<true, GradientShared>(
      params, stream, [](auto shape) { return key_gradient<decltype(shape)>; });
}

}  // namespace annulus::cuda
