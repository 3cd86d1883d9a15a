#include "kernels/cuda/portable/kept.cuh"
#include "kernels/cuda/portable/kernels.h"
#include "kernels/cuda/portable/rows.cuh"
#include "kernels/cuda/portable/tiles.h"
#include "kernels/cuda/rows/access.cuh"
#include "kernels/cuda/rows/sink.cuh"
#include "kernels/head_dim.h"

// fp32 rows with head dims above kMostTiledDim. Tiles of such rows would not fit the shared memory
// of every GPU, so there are none: a warp has a few rows in registers, each lane every 32nd column,
// and reads the rows of the other side one by one, from the caches.
namespace annulus::cuda {
namespace {

constexpr int kItemRows = kPortableGradientTile;  // most rows of an item, in forward, too
constexpr int kOwn = 2;                           // rows of a warp at a time
constexpr int kTurns = kItemRows / kWarps / kOwn;
constexpr int kOther = 64;                  // rows of the other side that are found at a time
constexpr int kColumns = kMaxHeadDim / 32;  // of a lane

struct Columns {
  float at[kColumns];

  __device__ void clear() {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) at[c] = 0;
  }
  // Zeros past head_dim and where there is no row.
  __device__ void read(const std::byte* row, int head_dim) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int column = lane + 32 * c;
      at[c] =
          row != nullptr && column < head_dim ? reinterpret_cast<const float*>(row)[column] : 0.0F;
    }
  }
  __device__ void add(float factor, const Columns& other) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) at[c] = fmaf(factor, other.at[c], at[c]);
  }
  __device__ void scale(float factor) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) at[c] *= factor;
  }
  // Times a factor, added to an fp32 row.
  __device__ void add_to(std::byte* row, float factor, int head_dim) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int column = lane + 32 * c;
      auto* to = reinterpret_cast<float*>(row) + column;
      if (column < head_dim) *to = fmaf(at[c], factor, *to);
    }
  }
};

__device__ float dot(const Columns& a, const Columns& b) {
  float sum = 0;
#pragma unroll
  for (int c = 0; c < kColumns; ++c) sum = fmaf(a.at[c], b.at[c], sum);
#pragma unroll
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffU, sum, step);
  return sum;
}

__device__ int own_row(int turn, int i) {
  return (turn * kWarps + static_cast<int>(threadIdx.x) / 32) * kOwn + i;
}
__device__ float read(const std::byte* at) {
  return at != nullptr ? *reinterpret_cast<const float*>(at) : 0.0F;
}

// Sums of 64 keys start from zero, as in tiles, so that errors grow with the number of such blocks,
// not of keys.
struct Softmax {
  Columns o;
  Columns part;
  float highest;  // in units of log2
  float sum;
  float part_sum;

  __device__ void start(const std::byte* state, float lse, int head_dim) {
    const bool empty = lse == -INFINITY;
    highest = lse * kLog2E;
    sum = empty ? 0.0F : 1.0F;
    part_sum = 0;
    part.clear();
    o.read(empty ? nullptr : state, head_dim);
  }
  __device__ void add(float score, const Columns& value) {
    if (score > highest) {
      const float shrink = exp2f(highest - score);  // 0 at first
      highest = score;
      sum *= shrink;
      part_sum *= shrink;
      o.scale(shrink);
      part.scale(shrink);
    }
    if (score == -INFINITY) return;  // a weight of 0, also where nothing was higher
    const float weight = exp2f(score - highest);
    part_sum += weight;
    part.add(weight, value);
  }
  __device__ void settle() {
    sum += part_sum;
    o.add(1.0F, part);
    part_sum = 0;
    part.clear();
  }
};

__global__ void __launch_bounds__(kThreads)
    forward(const __grid_constant__ PortableForwardParams p) {
  __shared__ TileRows<kItemRows, 4> queries;  // q, lse, state, out
  __shared__ TileRows<kOther, 2> keys;
  const Item item = p.tables.items[p.first_item + blockIdx.x];
  if (item.rows == 0) return;
  const Group group = p.tables.groups[item.group];
  const Member member = p.tables.members[item.member];
  const RowOwner query_place{item.batch, member.head, member.unit};
  const RowOwner key_place{item.batch, member.kv_head, member.unit};
  const int head_dim = p.shape.head_dim;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const float scale = p.shape.scale * kLog2E;

  queries.fill_rows(p.tables, group, group.queries, item.begin, item.begin + item.rows, query_place,
                    p.q, Channel{p.lse}, Channel{p.state}, Channel{p.out});
  const Walk walk = walk_keys<kOther>(p.tables.runs, group, item);
  __syncthreads();
  if (p.kept.tables.branches > 0) {
    point_to_kept(queries, p, group, item, member.head);
    __syncthreads();
  }
  for (int turn = 0; turn < kTurns; ++turn) {
    Columns q[kOwn];
    Softmax softmax[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int row = own_row(turn, i);
      const bool present = queries.index[row] != kAbsent;
      q[i].read(present ? queries.at[0][row] : nullptr, head_dim);
      softmax[i].start(queries.at[2][row],
                       p.load_state && present ? read(queries.at[1][row]) : -INFINITY, head_dim);
    }
    for (int first = walk.first * kOther; first < walk.extent; first += kOther) {
      __syncthreads();
      keys.fill(p.tables, group, group.keys, first, walk.extent, key_place, p.k, p.v);
      __syncthreads();
      for (int key = 0; key < kOther; ++key) {
        bool seen[kOwn];
        bool any = false;
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
          seen[i] = !hidden_pair(group, queries.index[own_row(turn, i)], keys.index[key]);
          any = any || seen[i];
        }
        if (!any) continue;
        Columns k;
        Columns v;
        k.read(keys.at[0][key], head_dim);
        v.read(keys.at[1][key], head_dim);
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
          const float s = dot(q[i], k);
          if (!seen[i]) continue;
          const float weight = log2_weight(queries.repeats[own_row(turn, i)], keys.repeats[key]);
          softmax[i].add(fmaf(s, scale, weight), v);
        }
      }
#pragma unroll
      for (int i = 0; i < kOwn; ++i) softmax[i].settle();
    }
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int row = own_row(turn, i);
      if (queries.index[row] == kAbsent) continue;
      const Softmax& of = softmax[i];
      const bool empty = of.highest == -INFINITY && of.sum == 0;  // not: a NaN
      __syncwarp();                                               // all lanes have read the state's
      const WithSink end = with_sink(empty ? -INFINITY : (of.highest + log2f(of.sum)) * kLn2,
                                     sink_of(p.sinks, member.head));
      if (lane == 0) *reinterpret_cast<float*>(queries.at[1][row]) = end.lse;
      if (empty && !p.for_good) continue;
      const float inverse = 1.0F / (empty ? 1.0F : of.sum);
      const float factor = end.kept * p.out_factor;  // by itself, as finish_rows multiplies states
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const int column = lane + 32 * c;
        if (column < head_dim)
          reinterpret_cast<float*>(queries.at[3][row])[column] =
              empty ? factor : of.o.at[c] * inverse * factor;
      }
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    query_gradient(const __grid_constant__ BackwardParams p) {
  __shared__ TileRows<kItemRows, 5> queries;  // q, dout, lse, delta, dq
  __shared__ TileRows<kOther, 2> keys;
  const Item item = p.tables.items[p.first_item + blockIdx.x];
  if (item.rows == 0) return;
  const Group group = p.tables.groups[item.group];
  const Member member = p.tables.members[item.member];
  const RowOwner query_place{item.batch, member.head, member.unit};
  const RowOwner key_place{item.batch, member.kv_head, member.unit};
  const int head_dim = p.shape.head_dim;
  const float scale = p.shape.scale * kLog2E;

  queries.fill_rows(p.tables, group, group.queries, item.begin, item.begin + item.rows, query_place,
                    p.q, p.dout, p.lse, p.delta, p.dq);
  const Walk walk = walk_keys<kOther>(p.tables.runs, group, item);
  __syncthreads();
  for (int turn = 0; turn < kTurns; ++turn) {
    Columns q[kOwn];
    Columns dout[kOwn];
    Columns dq[kOwn];
    float lse[kOwn];
    float delta[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int row = own_row(turn, i);
      q[i].read(queries.at[0][row], head_dim);
      dout[i].read(queries.at[1][row], head_dim);
      dq[i].clear();
      lse[i] = read(queries.at[2][row]);
      delta[i] = read(queries.at[3][row]);
    }
    for (int first = walk.first * kOther; first < walk.extent; first += kOther) {
      __syncthreads();
      keys.fill(p.tables, group, group.keys, first, walk.extent, key_place, p.k, p.v);
      __syncthreads();
      Columns part[kOwn];
#pragma unroll
      for (int i = 0; i < kOwn; ++i) part[i].clear();
      for (int key = 0; key < kOther; ++key) {
        bool seen[kOwn];
        bool any = false;
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
          seen[i] = lse[i] != -INFINITY &&
                    !hidden_pair(group, queries.index[own_row(turn, i)], keys.index[key]);
          any = any || seen[i];
        }
        if (!any) continue;
        Columns k;
        Columns v;
        k.read(keys.at[0][key], head_dim);
        v.read(keys.at[1][key], head_dim);
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
          const float s = dot(q[i], k);
          const float dp = dot(dout[i], v);
          if (!seen[i]) continue;
          const float times = log2_weight(queries.repeats[own_row(turn, i)], keys.repeats[key]);
          const float weight = exp2f(fmaf(s, scale, times - lse[i] * kLog2E));
          part[i].add(weight * (dp - delta[i]), k);
        }
      }
#pragma unroll
      for (int i = 0; i < kOwn; ++i) dq[i].add(1.0F, part[i]);
    }
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int row = own_row(turn, i);
      if (queries.index[row] != kAbsent) dq[i].add_to(queries.at[4][row], p.shape.scale, head_dim);
    }
  }
}

// One row of a warp at a time: it has six in registers.
__global__ void __launch_bounds__(kThreads) key_gradient(const __grid_constant__ BackwardParams p) {
  __shared__ TileRows<kItemRows, 4> keys;  // k, v, dk, dv
  __shared__ TileRows<kOther, 4> queries;  // q, dout, lse, delta
  const Item item = p.tables.items[p.first_item + blockIdx.x];
  if (item.rows == 0) return;
  const Group group = p.tables.groups[item.group];
  const int head_dim = p.shape.head_dim;
  const float scale = p.shape.scale * kLog2E;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  {
    const Member member = p.tables.members[item.member];
    const RowOwner place{item.batch, member.kv_head, member.unit};
    keys.fill_rows(p.tables, group, group.keys, item.begin, item.begin + item.rows, place, p.k, p.v,
                   p.dk, p.dv);
  }
  const Walk walk = walk_queries<kOther>(p.tables.runs, group, item);
  __syncthreads();
  for (int row = warp; row < kItemRows; row += kWarps) {
    const int index = keys.index[row];
    Columns k;
    Columns v;
    Columns dk;
    Columns dv;
    k.read(keys.at[0][row], head_dim);
    v.read(keys.at[1][row], head_dim);
    dk.clear();
    dv.clear();
    for (int m = 0; m < item.members; ++m) {
      const Member member = p.tables.members[item.member + m];
      const RowOwner place{item.batch, member.head, member.unit};
      for (int first = walk.first * kOther; first < walk.extent; first += kOther) {
        __syncthreads();
        queries.fill(p.tables, group, group.queries, first, walk.extent, place, p.q, p.dout, p.lse,
                     p.delta);
        __syncthreads();
        Columns dk_part;
        Columns dv_part;
        dk_part.clear();
        dv_part.clear();
        for (int query = 0; query < kOther; ++query) {
          if (hidden_pair(group, queries.index[query], index)) continue;
          const float lse = read(queries.at[2][query]);
          if (lse == -INFINITY) continue;
          const float delta = read(queries.at[3][query]);
          Columns q;
          Columns dout;
          q.read(queries.at[0][query], head_dim);
          dout.read(queries.at[1][query], head_dim);
          const float times = log2_weight(queries.repeats[query], keys.repeats[row]);
          const float weight = exp2f(fmaf(dot(q, k), scale, times - lse * kLog2E));
          dv_part.add(weight, dout);
          dk_part.add(weight * (dot(dout, v) - delta), q);
        }
        dk.add(1.0F, dk_part);
        dv.add(1.0F, dv_part);
      }
    }
    if (index == kAbsent) continue;
    dk.add_to(keys.at[2][row], p.shape.scale, head_dim);
    dv.add_to(keys.at[3][row], 1.0F, head_dim);
  }
}

}  // namespace

cudaError_t forward_wide_fp32(const PortableForwardParams& params, cudaStream_t stream) {
  forward<<<static_cast<unsigned>(params.items), kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

cudaError_t query_gradient_wide_fp32(const BackwardParams& params, cudaStream_t stream) {
  query_gradient<<<static_cast<unsigned>(params.items), kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

cudaError_t key_gradient_wide_fp32(const BackwardParams& params, cudaStream_t stream) {
  key_gradient<<<static_cast<unsigned>(params.items), kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace annulus::cuda
