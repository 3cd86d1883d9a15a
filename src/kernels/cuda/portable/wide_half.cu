#include "kernels/cuda/portable/dispatch.cuh"
#include "kernels/cuda/portable/kept.cuh"
#include "kernels/cuda/portable/kernels.h"
#include "kernels/cuda/portable/mma.cuh"
#include "kernels/cuda/portable/modifiers.cuh"
#include "kernels/cuda/portable/rows.cuh"
#include "kernels/cuda/rows/sink.cuh"
#include "kernels/head_dim.h"

// 16-bit rows of head dims above kMostTiledDim. O, dQ, dK and dV are all sums over the rows of the
// other side, sums[own] += weights[own][other] rows[other], and one kernel makes each of them:
//   O: P V, dQ: dS K, dK: dS^T Q, dV: P^T dO.
// A block has 64 rows of its own and walks past tiles of 64 others. No operand fits the shared
// memory of every GPU, so all come 64 columns at a time: for S, for dP where dS is wanted, and for
// the sums. Of 64 x 64 weights each of 16 warps makes 16 x 16, and leaves them in shared memory; of
// 64 x 64 sums likewise, in registers. With 8 warps there was too little to do while others waited.
namespace annulus::cuda {
namespace {

enum class Sum : std::uint8_t { output, query_gradient, key_gradient, value_gradient };

constexpr int kThreads = 512;
constexpr int kRows = kPortableGradientTile;    // most rows of an item, in forward, too
constexpr int kColumns = 64;                    // that come at a time
constexpr int kParts = kMaxHeadDim / kColumns;  // of a row
constexpr int kStages = 4;                      // three operands are under way while one is used
constexpr int kQuarters = 4;                    // of 64 columns: a warp has 16 rows of one
constexpr float kSlack = 8.0F;                  // as in forward.cu

template <Sum kSum>
struct Traits;
template <>
struct Traits<Sum::output> {
  using Params = PortableForwardParams;
  static constexpr bool kOwnsQueries = true;
  static constexpr bool kGradients = false;  // weights are dS
  static constexpr int kOwn = 4;             // channels: q, lse, state, out
  static constexpr int kOther = 2;           // k, v
  static constexpr int kAdded = 1;           // channel of the other rows that are added up
};
template <>
struct Traits<Sum::query_gradient> {
  using Params = BackwardParams;
  static constexpr bool kOwnsQueries = true;
  static constexpr bool kGradients = true;
  static constexpr int kOwn = 5;    // q, dout, dq, lse, delta
  static constexpr int kOther = 2;  // k, v
  static constexpr int kAdded = 0;
};
template <>
struct Traits<Sum::key_gradient> {
  using Params = BackwardParams;
  static constexpr bool kOwnsQueries = false;
  static constexpr bool kGradients = true;
  static constexpr int kOwn = 3;    // k, v, dk
  static constexpr int kOther = 4;  // q, dout, lse, delta
  static constexpr int kAdded = 0;
};
template <>
struct Traits<Sum::value_gradient> {
  using Params = BackwardParams;
  static constexpr bool kOwnsQueries = false;
  static constexpr bool kGradients = false;
  static constexpr int kOwn = 3;    // k, v, dv
  static constexpr int kOther = 4;  // q, dout, lse, delta
  static constexpr int kAdded = 1;
};

template <typename T, Sum kSum>
struct Shared {
  using Tile = SharedTile<T, kRows, kColumns>;
  Tile own[kStages];
  Tile other[kStages];
  Tile weights;
  TileRows<kRows, Traits<kSum>::kOwn> own_rows;
  TileRows<kRows, Traits<kSum>::kOther> other_rows[2];
  // Gradients: of queries. A row that attends to nothing has a log-sum-exp that gives weights of 0.
  float lse[2][kRows];  // in units of log2
  float delta[2][kRows];
  float of_quarter[kQuarters][kRows];  // output: what is known of a row, by its columns
  Group group;                         // there are no registers for it
  Poison<kRows, kMaxHeadDim> poison;
};

__device__ float read(const std::byte* at, float absent) {
  return at != nullptr ? *reinterpret_cast<const float*>(at) : absent;
}

// kModified: there may be a softcap, dropout or both.
template <typename T, Sum kSum, bool kModified>
__global__ void __launch_bounds__(kThreads, 1)
    add_up(const __grid_constant__ typename Traits<kSum>::Params p) {
  using Of = Traits<kSum>;
  using Tile = typename Shared<T, kSum>::Tile;
  extern __shared__ __align__(128) unsigned char memory[];
  auto& shared = *reinterpret_cast<Shared<T, kSum>*>(memory);
  const Item item = p.tables.items[p.first_item + blockIdx.x];
  if (item.rows == 0) return;
  if (threadIdx.x == 0) shared.group = p.tables.groups[item.group];
  shared.poison.clear();
  __syncthreads();
  const Group& group = shared.group;
  const Member member = p.tables.members[item.member];
  const RowOwner query_place{item.batch, member.head, member.unit};
  const RowOwner key_place{item.batch, member.kv_head, member.unit};
  const int head_dim = p.shape.head_dim;
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  const int strip = thread / 32 % 4;  // of 16 rows
  const int quarter = thread / 128;   // of 64 columns

  // Rows of this block and of a tile, and which of those the walk has.
  const auto fill_own = [&](const RowList& list, const RowOwner& place, const auto&... channels) {
    shared.own_rows.fill_rows(p.tables, group, list, item.begin, item.begin + item.rows, place,
                              channels...);
  };
  const auto statistics_of = [&](int slot, const std::byte* lse, const std::byte* delta) {
    const float l = read(lse, -INFINITY);
    shared.lse[slot][thread] = l == -INFINITY ? INFINITY : l * kLog2E;
    shared.delta[slot][thread] = read(delta, 0.0F);
  };
  if constexpr (kSum == Sum::output) {
    fill_own(group.queries, query_place, p.q, Channel{p.lse}, Channel{p.state}, Channel{p.out});
  } else if constexpr (kSum == Sum::query_gradient) {
    fill_own(group.queries, query_place, p.q, p.dout, p.dq, p.lse, p.delta);
    if (thread < kRows)
      statistics_of(0, shared.own_rows.at[3][thread], shared.own_rows.at[4][thread]);
  } else if constexpr (kSum == Sum::key_gradient) {
    fill_own(group.keys, key_place, p.k, p.v, p.dk);
  } else {
    fill_own(group.keys, key_place, p.k, p.v, p.dv);
  }
  Walk walk;
  if constexpr (Of::kOwnsQueries) {
    walk = walk_keys<kRows>(p.tables.runs, group, item);
  } else {
    walk = walk_queries<kRows>(p.tables.runs, group, item);
  }
  const int tiles_of_member = walk.end - walk.first;
  const int tiles = tiles_of_member * (Of::kOwnsQueries ? 1 : item.members);
  const auto fill_other = [&](int tile) {
    auto& rows = shared.other_rows[tile % 2];
    const int first = (walk.first + tile % tiles_of_member) * kRows;
    if constexpr (Of::kOwnsQueries) {
      rows.fill(p.tables, group, group.keys, first, walk.extent, key_place, p.k, p.v);
    } else {
      const Member of = p.tables.members[item.member + tile / tiles_of_member];
      rows.fill(p.tables, group, group.queries, first, walk.extent, {item.batch, of.head, of.unit},
                p.q, p.dout, p.lse, p.delta);
      if (thread < kRows) statistics_of(tile % 2, rows.at[2][thread], rows.at[3][thread]);
    }
  };
  if (tiles > 0) fill_other(0);
  __syncthreads();
  if constexpr (kSum == Sum::output) {
    if (p.kept.tables.branches > 0) {
      point_to_kept(shared.own_rows, p, group, item, member.head);
      __syncthreads();
    }
  }

  // Steps of a tile: parts of S, of dP, and of the sums. A thread copies 16 bytes of an operand.
  const int parts = (head_dim + kColumns - 1) / kColumns;
  constexpr int kProducts = Of::kGradients ? 2 : 1;
  int next_tile = 0;  // whose operand is to be loaded next, and for which step
  int next_product = 0;
  int next_column = 0;
  int next_stage = 0;
  const auto load_next = [&] {
    if (next_tile < tiles) {
      const bool sum = next_product == kProducts;
      const auto& rows = shared.other_rows[next_tile % 2];
      const auto copy = [&](Tile& to, std::byte* const* at) {
        const std::byte* row = at[thread / 8];
        const int column = next_column + thread % 8 * 8;
        const bool present = row != nullptr && column < head_dim;
        to.load_chunk(
            thread / 8, thread % 8,
            present ? row + column * sizeof(T) : reinterpret_cast<const std::byte*>(p.tables.items),
            present, head_dim - next_column, p.shape.aligned);
      };
      if (!sum) copy(shared.own[next_stage], shared.own_rows.at[next_product]);
      copy(shared.other[next_stage], rows.at[sum ? Of::kAdded : next_product]);
    }
    commit_copies();
    next_stage = (next_stage + 1) % kStages;
    next_column += kColumns;
    if (next_column >= head_dim) {
      next_column = 0;
      if (++next_product > kProducts) {
        next_product = 0;
        ++next_tile;
      }
    }
  };
  int stage = 0;
  // Waits for the operands of a step. What the step before has used is loaded anew.
  const auto arrive = [&] {
    wait_copies<kStages - 2>();
    __syncthreads();
    load_next();
    const int arrived = stage;
    stage = (stage + 1) % kStages;
    return arrived;
  };
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) load_next();

  const auto row_of = [&](int upper) { return strip * 16 + upper * 8 + lane / 4; };
  float sums[kParts][2][4] = {};
  float highest[2] = {-INFINITY, -INFINITY};  // output: as in forward.cu
  float total[2] = {};
  if constexpr (kSum == Sum::output) {
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      const int row = row_of(upper);
      if (!p.load_state || shared.own_rows.index[row] == kAbsent) continue;
      const float l = read(shared.own_rows.at[1][row], -INFINITY);
      if (l == -INFINITY) continue;
      highest[upper] = l * kLog2E;
      if (quarter == 0 && lane % 4 == 0) total[upper] = 1;
      if constexpr (kModified) {  // see Forward::load_state of the CPU
        highest[upper] -= log2f(p.modifiers.rate.scale);
        total[upper] *= p.modifiers.rate.scale;
      }
      const auto* from = reinterpret_cast<const float*>(shared.own_rows.at[2][row]);
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int column = part * kColumns + quarter * 16 + i / 2 * 8 + lane % 4 * 2 + i % 2;
          if (column < head_dim) sums[part][i / 2][2 * upper + i % 2] = from[column];
        }
      }
    }
  }

  const float scale = p.shape.scale * kLog2E;
  for (int tile = 0; tile < tiles; ++tile) {
    const auto& rows = shared.other_rows[tile % 2];
    float s[2][4] = {};
    float dp[2][4] = {};
    const auto multiply_part = [&](float(&products)[2][4], int arrived) {
#pragma unroll
      for (int k = 0; k < kColumns / 16; ++k) {
        std::uint32_t a[4];
        std::uint32_t b[4];
        shared.own[arrived].load_a(a, strip * 16, k);
        shared.other[arrived].load_b(b, quarter * 16, k);
        multiply<T>(products[0], a, b[0], b[1]);
        multiply<T>(products[1], a, b[2], b[3]);
      }
    };
#pragma unroll 1
    for (int part = 0; part < parts; ++part) {
      const int arrived = arrive();
      if (part == 0 && tile + 1 < tiles) fill_other(tile + 1);
      multiply_part(s, arrived);
    }
    if constexpr (Of::kGradients) {
#pragma unroll 1
      for (int part = 0; part < parts; ++part) multiply_part(dp, arrive());
    }

    const auto column_of = [&](int n, int e) {
      return quarter * 16 + n * 8 + lane % 4 * 2 + e % 2;
    };
    const auto hidden = [&](int own, int other) {
      return Of::kOwnsQueries ? hidden_pair(group, shared.own_rows.index[own], rows.index[other])
                              : hidden_pair(group, rows.index[other], shared.own_rows.index[own]);
    };
    const int query_head = Of::kOwnsQueries || !kModified
                               ? member.head
                               : p.tables.members[item.member + tile / tiles_of_member].head;
    const PairWords words(p.modifiers, group, item.batch, query_head);
    // What dropout multiplies the probability of a pair with.
    const auto kept = [&](int own, int other) {
      const int query = Of::kOwnsQueries ? shared.own_rows.index[own] : rows.index[other];
      const int key = Of::kOwnsQueries ? rows.index[other] : shared.own_rows.index[own];
      if (!kModified || !p.modifiers.rate.drops()) return 1.0F;
      return kept_factor(p.modifiers.rate, words.query(query), words.key(key));
    };
    float slope[2][4];
    float top[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int own = row_of(e / 2);
        const int other = column_of(n, e);
        if constexpr (kModified) {
          const Score modified = modified_score(p.shape, p.modifiers, s[n][e]);
          s[n][e] = modified.value;
          slope[n][e] = modified.slope;
        } else {
          s[n][e] *= scale;
        }
        if (group.repeats > 0)
          s[n][e] += log2_weight(shared.own_rows.repeats[own], rows.repeats[other]);
        if (hidden(own, other)) s[n][e] = -INFINITY;
        top[e / 2] = fmaxf(top[e / 2], s[n][e]);
      }
    }
    if constexpr (kSum == Sum::output) {
#pragma unroll
      for (int upper = 0; upper < 2; ++upper) {
        top[upper] = quad_max(top[upper]);
        if (lane % 4 == 0) shared.of_quarter[quarter][row_of(upper)] = top[upper];
      }
      __syncthreads();
#pragma unroll
      for (int upper = 0; upper < 2; ++upper) {
        float most = top[upper];
#pragma unroll
        for (int of = 0; of < kQuarters; ++of)
          most = fmaxf(most, shared.of_quarter[of][row_of(upper)]);
        if (most > highest[upper] + kSlack) {
          const float shrink = exp2_fast(highest[upper] - most);  // 0 at first
          highest[upper] = most;
          total[upper] *= shrink;
#pragma unroll
          for (int part = 0; part < kParts; ++part) {
#pragma unroll
            for (int n = 0; n < 2; ++n) {
              sums[part][n][2 * upper] *= shrink;
              sums[part][n][2 * upper + 1] *= shrink;
            }
          }
        }
        // A row that has seen nothing yet: -inf - -inf would be NaN.
        const float reference = highest[upper] == -INFINITY ? 0.0F : highest[upper];
#pragma unroll
        for (int n = 0; n < 2; ++n) {
#pragma unroll
          for (int e = 2 * upper; e < 2 * upper + 2; ++e) {
            s[n][e] = exp2_fast(s[n][e] - reference);
            total[upper] += s[n][e];
            if constexpr (kModified) {
              if (kept(row_of(upper), column_of(n, e)) == 0) s[n][e] = 0;
            }
          }
        }
      }
    } else {
      const int slot = Of::kOwnsQueries ? 0 : tile % 2;
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int query = Of::kOwnsQueries ? row_of(e / 2) : column_of(n, e);
          const bool none = s[n][e] == -INFINITY;
          s[n][e] = none ? 0.0F : exp2_fast(s[n][e] - shared.lse[slot][query]);
          if constexpr (kModified) {
            const float factor = kept(row_of(e / 2), column_of(n, e));
            if (!Of::kGradients) s[n][e] *= factor;
            dp[n][e] *= factor;
          }
          if (Of::kGradients && !none) {  // of none, all that follows may be NaN
            s[n][e] *= dp[n][e] - shared.delta[slot][query];
            if constexpr (kModified) s[n][e] *= slope[n][e];
          }
        }
      }
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int upper = 0; upper < 2; ++upper) {
        *reinterpret_cast<std::uint32_t*>(shared.weights.chunk(row_of(upper), quarter * 2 + n) +
                                          lane % 4 * 2) =
            pack<T>(s[n][2 * upper], s[n][2 * upper + 1]);
      }
    }

    bool hides = limited(group);
    if (hides && ordered(group) && rows.index[kRows - 1] != kAbsent) {
      const int last = item.rows - 1;
      hides = Of::kOwnsQueries
                  ? may_hide(group, shared.own_rows.index[0], shared.own_rows.index[last],
                             rows.index[0], rows.index[kRows - 1])
                  : may_hide(group, rows.index[0], rows.index[kRows - 1], shared.own_rows.index[0],
                             shared.own_rows.index[last]);
    }
    std::uint32_t a[kRows / 16][4];
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      if (part >= parts) break;
      Tile& added = shared.other[arrive()];
      if (part == 0) {
#pragma unroll
        for (int k = 0; k < kRows / 16; ++k) shared.weights.load_a(a[k], strip * 16, k);
      }
      if (hides) {
        shared.poison.take_from(
            added, [&](int own, int other) { return !hidden(own, other); }, part * kColumns);
      }
#pragma unroll
      for (int k = 0; k < kRows / 16; ++k) {
        std::uint32_t b[4];
        added.load_b_transposed(b, k * 16, quarter);
        multiply<T>(sums[part][0], a[k], b[0], b[1]);
        multiply<T>(sums[part][1], a[k], b[2], b[3]);
      }
    }
  }
  wait_copies<0>();
  __syncthreads();  // all have noted poison

  // Two neighbouring columns at a time: use(column, first, second).
  const auto for_each_pair = [&](int upper, const auto& use) {
    const int row = row_of(upper);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const int column = part * kColumns + quarter * 16 + n * 8 + lane % 4 * 2;
        if (column >= head_dim) continue;
        float x = sums[part][n][2 * upper];
        float y = sums[part][n][2 * upper + 1];
        if (shared.poison.any != 0) {
          x = shared.poison.apply(row, column, x);
          y = shared.poison.apply(row, column + 1, y);
        }
        use(column, x, y);
      }
    }
  };
  if constexpr (kSum == Sum::output) {
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      total[upper] = quad_sum(total[upper]);
      if (lane % 4 == 0) shared.of_quarter[quarter][row_of(upper)] = total[upper];
    }
    __syncthreads();
  }
#pragma unroll
  for (int upper = 0; upper < 2; ++upper) {
    const int row = row_of(upper);
    if (shared.own_rows.index[row] == kAbsent) continue;
    if constexpr (kSum == Sum::output) {
      float sum = 0;
#pragma unroll
      for (int of = 0; of < kQuarters; ++of) sum += shared.of_quarter[of][row];
      const bool empty = highest[upper] == -INFINITY && sum == 0;  // not: a NaN
      const WithSink end = with_sink(empty ? -INFINITY : (highest[upper] + log2f(sum)) * kLn2,
                                     sink_of(p.sinks, member.head));
      if (quarter == 0 && lane % 4 == 0)  // an empty one's, too: nobody else may have
        *reinterpret_cast<float*>(shared.own_rows.at[1][row]) = end.lse;
      if (empty && !p.for_good) continue;
      const float kept_weights = kModified ? p.modifiers.rate.scale : 1.0F;
      const float inverse = kept_weights / (empty ? 1.0F : sum);
      const float factor = end.kept * p.out_factor;  // by itself, as finish_rows multiplies states
      for_each_pair(upper, [&](int column, float x, float y) {
        x = empty ? factor : x * inverse * factor;
        y = empty ? factor : y * inverse * factor;
        const bool second = column + 1 < head_dim;
        if (p.out_dtype == DType::f32) {
          float* to = reinterpret_cast<float*>(shared.own_rows.at[3][row]) + column;
          to[0] = x;
          if (second) to[1] = y;
        } else {
          T* to = reinterpret_cast<T*>(shared.own_rows.at[3][row]) + column;
          to[0] = T(x);
          if (second) to[1] = T(y);
        }
      });
    } else {
      const float factor = Of::kGradients ? p.shape.scale : 1.0F;
      for_each_pair(upper, [&](int column, float x, float y) {
        float* to = reinterpret_cast<float*>(shared.own_rows.at[2][row]) + column;
        to[0] += x * factor;
        if (column + 1 < head_dim) to[1] += y * factor;
      });
    }
  }
}

template <Sum kSum>
cudaError_t start(const typename Traits<kSum>::Params& params, cudaStream_t stream) {
  return with_half(params.shape.dtype, [&](auto half) {
    using T = decltype(half);
    static_assert(sizeof(Shared<T, kSum>) <= kLeastSharedBytes);
    return with_modified(params.modifiers, [&](auto modified) {
      return launch(add_up<T, kSum, modified()>, dim3(static_cast<unsigned>(params.items)),
                    kThreads, sizeof(Shared<T, kSum>), params, stream);
    });
  });
}

}  // namespace

cudaError_t forward_wide_half(const PortableForwardParams& params, cudaStream_t stream) {
  return start<Sum::output>(params, stream);
}

cudaError_t query_gradient_wide_half(const BackwardParams& params, cudaStream_t stream) {
  return start<Sum::query_gradient>(params, stream);
}

cudaError_t key_gradient_wide_half(const BackwardParams& params, cudaStream_t stream) {
  const cudaError_t error = start<Sum::value_gradient>(params, stream);
  return error == cudaSuccess ? start<Sum::key_gradient>(params, stream) : error;
}

}  // namespace annulus::cuda
