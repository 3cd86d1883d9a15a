#pragma once

#include <type_traits>

#include "kernels/cuda/sm90/backward/key_sums.cuh"
#include "kernels/cuda/sm90/backward/query_sums.cuh"
#include "kernels/cuda/sm90/backward/steps.cuh"
#include "kernels/cuda/sm90/backward/tiles.cuh"

// A block processes tiles of 128 keys, and iterates over the queries that see them in steps of 64
// (128 if the head dim is 64; numbers in this comment are for head dim 128). Two consumer warp
// groups have 64 keys each. Everything is transposed, so that P and dS are in the registers that dV
// += P^T dO and dK += dS^T Q read: S^T = K Q^T, dP^T = V dO^T; P = exp2(S - L), dS = P (dP -
// delta); dQ of the step before: dS through shared memory, 64 queries x half of the columns per
// group. dQ lags by a step, so that the groups need not wait for each other. A token (two named
// barriers) lets one group at a time queue its products dQ, dV, dK, S, dP back to back while the
// other one computes exponentials. Slower alternatives: passing the token before S and dP (15 %),
// staging dQ between dV and dK (1 %), releasing Q's buffer before dO's (4 %). Registers of a
// consumer: dK, dV 2 x 64, S or dQ 32, dP 32; P and dS are packed in place. Shared memory bandwidth
// limits the kernel to 83 % of the tensor cores' peak. In long runs power is the limit: 700 W at
// 1.67 GHz of 1.98.
namespace annulus::cuda::sm90 {

// Keeps a value in a register. Otherwise the compiler reads the thread index and the address of
// shared memory again (70 cycles and more) in every step that needs them, while the group has the
// token. It cannot look through a shuffle. Not used where registers are scarce.
template <int kDim, typename T>
__device__ __forceinline__ T kept(T value, int lane) {
  if constexpr (kDim == 128) return __shfl_sync(~0U, value, lane);
  return value;
}

// No product may be in flight at the loop's back edge, nor in a branch that uses its registers:
// otherwise the compiler serialises all products (warnings C7510 to C7520).
template <typename T, int kDim, bool kWindow>
__device__ __forceinline__ void consume(const BackwardArguments& a, std::uint32_t shared,
                                        int group) {
  using Memory = Shared<kDim>;
  constexpr bool kBf16 = std::is_same_v<T, __nv_bfloat16>;
  constexpr int kQueries = Memory::kQueries;
  constexpr int kColumns = Memory::kColumns;  // of dQ
  constexpr int kToken = 1;                   // named barrier of group 0; that of group 1 is next
  constexpr int kPassing = 256;               // threads: those that pass it and those that take it

  float dk[kDim / 2];
  float dv[kDim / 2];
  float s[kQueries / 2];
  float dp[kQueries / 2];
  std::uint32_t p[kQueries / 16][4];
  std::uint32_t ds[kQueries / 16][4];

  const int thread = kept<kDim>(static_cast<int>(threadIdx.x), static_cast<int>(threadIdx.x) & 31);
  const int lane = thread & 31;
  const int warp = thread >> 5;  // of 8: keys 16 * warp ...
  const int g = lane >> 2;
  const int c = lane & 3;
  const bool leader = lane == 0;
  const std::uint32_t ds_target =
      shared + Memory::kDs + (warp * 16 + (lane & 15)) * 128 + (((lane >> 4) ^ (lane & 7)) << 4);
  const std::uint32_t of_queries = shared + c * 8;  // this thread's columns of S^T: 8 i + 2 c, + 1
  // Staging: rows g and g + 8 of the warp's 16, columns 8 m + 2 c and the next. Dealt, two m are
  // the 16-byte chunk 2 c + m / 2 % 2, swizzled by g: 8 lanes store at once and use every chunk. In
  // the usual order they are 8 bytes in the chunk 2 m + (c >> 1). Half a warp stores at once, g =
  // 0..3 or 4..7: g and g ^ 1 would use the same two chunks of m ^ (g >> 1). Odd g use m ^ 2
  // instead: the pairs of chunks are then m ^ {0, 2, 1, 3}, or {2, 0, 3, 1}, and all 32 banks are
  // used once.
  const std::uint32_t staging =
      shared + Memory::kStaging + group * Memory::kStagingOfGroup + ((warp & 3) * 16 + g) * 128 +
      (a.params.dealt_dq ? ((2 * c) ^ g) << 4
                         : (((c >> 1) ^ g ^ ((g & 1) << 2)) << 4) + (c & 1) * 8);

  const auto queue_s = [&](int stage, int buffer) {
    const std::uint64_t keys =
        k_major(shared + Memory::kK + group * (64 * 128)) + buffer * (Memory::kKeyTile >> 4);
    const std::uint64_t queries = k_major(shared + Memory::kQ) + stage * (Memory::kQueryTile >> 4);
    products_fence();
    multiply<T, Major::k, Major::k, false>(s, keys, queries);
#pragma unroll
    for (int i = 1; i < kDim / 16; ++i)
      multiply<T, Major::k, Major::k, true>(
          s, keys + (i / 4) * (Memory::kKeyBlock >> 4) + (i % 4) * 2,
          queries + (i / 4) * (Memory::kQueryBlock >> 4) + (i % 4) * 2);
    products_commit();
  };
  const auto queue_dp = [&](int stage) {
    const std::uint64_t values = k_major(shared + Memory::kV + group * (64 * 128));
    const std::uint64_t queries =
        k_major(shared + Memory::kDout) + stage * (Memory::kQueryTile >> 4);
    products_fence();
    multiply<T, Major::k, Major::k, false>(dp, values, queries);
#pragma unroll
    for (int i = 1; i < kDim / 16; ++i)
      multiply<T, Major::k, Major::k, true>(
          dp, values + (i / 4) * (Memory::kKeyBlock >> 4) + (i % 4) * 2,
          queries + (i / 4) * (Memory::kQueryBlock >> 4) + (i % 4) * 2);
    products_commit();
  };
  // dQ takes the registers of S.
  float(&dq)[kColumns / 2] = *reinterpret_cast<float(*)[kColumns / 2]>(s);
  const auto queue_dq = [&](int buffer, int key_buffer) {
    const std::uint64_t gradients =
        mn_major(shared + Memory::kDs + (Memory::kByRows ? group * (kKeys * 128) : 0),
                 kKeys * 128) +
        buffer * (Memory::kGradientTile >> 4);
    const std::uint64_t keys =
        mn_major(shared + Memory::kK +
                     (Memory::kByRows ? 0 : group * (kDim == 128 ? Memory::kKeyBlock : 64)),
                 Memory::kKeyBlock) +
        key_buffer * (Memory::kKeyTile >> 4);
    products_fence();
    multiply<T, Major::mn, Major::mn, false>(dq, gradients, keys);
#pragma unroll
    for (int i = 1; i < kKeys / 16; ++i)
      multiply<T, Major::mn, Major::mn, true>(dq, gradients + i * 128, keys + i * 128);
    products_commit();
  };
  const auto wait_for_staging = [&](int step) {
    barrier_wait(shared + Memory::staging_empty(group), (step & 1) ^ 1);
  };
  const auto announce_dq = [&](int step) {
    fence_shared_for_async();
    barrier_arrive(shared + Memory::staged(group, step & 1));
  };
  const auto stage_dq = [&] {
    if constexpr (!kBf16) {
#pragma unroll
      for (int i = 0; i < kColumns / 2; ++i) dq[i] *= a.params.shape.scale;
    }
    if (a.params.dealt_dq) {
#pragma unroll
      for (int m = 0; m < kColumns / 8; m += 2) {
        const std::uint32_t target = (staging ^ ((m & 2) << 3)) + (m >> 2) * Memory::kStagingBox;
        store_floats4(target, dq[4 * m], dq[4 * m + 1], dq[4 * m + 4], dq[4 * m + 5]);
        store_floats4(target + 1024, dq[4 * m + 2], dq[4 * m + 3], dq[4 * m + 6], dq[4 * m + 7]);
      }
      return;
    }
    const bool odd = (staging & 128) != 0;  // g: rows are 128 bytes
#pragma unroll
    for (int m = 0; m < kColumns / 8; ++m) {
      const std::uint32_t target = (staging ^ ((m & 3) << 5)) + (m >> 2) * Memory::kStagingBox;
      const int other = m ^ 2;
      store_floats2(target, odd ? dq[4 * other] : dq[4 * m],
                    odd ? dq[4 * other + 1] : dq[4 * m + 1]);
      store_floats2(target + 1024, odd ? dq[4 * other + 2] : dq[4 * m + 2],
                    odd ? dq[4 * other + 3] : dq[4 * m + 3]);
    }
  };
  int step = 0;
  int tile = 0;
  int flags = 0;
  bool first = true;  // of its tile
  bool ended = false;
  // Passes the token once S and dP are queued, then computes P and dS from them.
  const auto begin_step = [&](int stage) __attribute__((always_inline)) {
    named_arrive(kToken + 1 - group, kPassing);
    // The writer is slow: if dQ were announced with dS, the next dQ would have to wait for it (18 %
    // slower). Announcing it as soon as it is staged, while the group has the token, was slower,
    // too.
    if (step > 1) announce_dq(step - 2);
    flags = ended ? 0 : load_word(shared + Memory::kStepNotes + (step & 3) * kStepNote);
    products_wait<1>();
    pin(s);
    const std::uint32_t lse = of_queries + Memory::kLse + stage * (kQueries * 4);
#pragma unroll
    for (int i = 0; i < kQueries / 8; ++i) {
      const float2 l = load_floats2(lse + i * 32);
      s[4 * i] = exp2_approx(fmaf(s[4 * i], a.score_scale, l.x));
      s[4 * i + 1] = exp2_approx(fmaf(s[4 * i + 1], a.score_scale, l.y));
      s[4 * i + 2] = exp2_approx(fmaf(s[4 * i + 2], a.score_scale, l.x));
      s[4 * i + 3] = exp2_approx(fmaf(s[4 * i + 3], a.score_scale, l.y));
    }
    // Both groups have finished the dQ of two steps ago.
    barrier_wait(shared + Memory::ds_empty(stage), ((step >> 1) & 1) ^ 1);
    products_wait<0>();
    pin(dp);
    // Releases V, and the words and weights of its keys with it.
    const bool special = (flags & kSpecial) != 0;
    const bool leave = (flags & kLastOfTile) != 0;
    if (leave && !special) barrier_arrive(shared + Memory::v_empty());
    // Masks and weights.
    const auto weigh = [&] {
      if ((flags & kPeriodic) != 0) {
        const std::uint32_t period = of_queries + Memory::kPeriod + g * 32;
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          const int2 packed = load_words2(period + row * 256);
          const float2 even = __half22float2(*reinterpret_cast<const __half2*>(&packed.x));
          const float2 uneven = __half22float2(*reinterpret_cast<const __half2*>(&packed.y));
#pragma unroll
          for (int i = 0; i < kQueries / 8; ++i) {
            s[4 * i + 2 * row] *= (i & 1) != 0 ? uneven.x : even.x;
            s[4 * i + 2 * row + 1] *= (i & 1) != 0 ? uneven.y : even.y;
          }
        }
      }
      if ((flags & kWords) != 0) {
        const std::uint32_t words = of_queries + Memory::kQueryWords + stage * (kQueries * 4);
        const int key0 = load_word(shared + Memory::kKeyWords + (warp * 16 + g) * 4);
        const int key1 = load_word(shared + Memory::kKeyWords + (warp * 16 + g + 8) * 4);
        if ((flags & kWeighted) != 0) {
          const std::uint32_t weights = shared + Memory::kWeights;
#pragma unroll
          for (int i = 0; i < kQueries / 8; ++i) {
            const int2 query = load_words2(words + i * 32);
            s[4 * i] *= load_float(weights + (key0 & query.x & 15) * 4);
            s[4 * i + 1] *= load_float(weights + (key0 & query.y & 15) * 4);
            s[4 * i + 2] *= load_float(weights + (key1 & query.x & 15) * 4);
            s[4 * i + 3] *= load_float(weights + (key1 & query.y & 15) * 4);
          }
        }
        // Selected, not multiplied: hidden scores may be infinite or NaN.
        const int after0 = key0 & ~15;
        const int after1 = key1 & ~15;
#pragma unroll
        for (int i = 0; i < kQueries / 8; ++i) {
          const int2 query = load_words2(words + i * 32);
          if (after0 > query.x) s[4 * i] = 0;
          if (after0 > query.y) s[4 * i + 1] = 0;
          if (after1 > query.x) s[4 * i + 2] = 0;
          if (after1 > query.y) s[4 * i + 3] = 0;
        }
        if (kWindow && (flags & kLower) != 0) {
          // Keys before the first index: all of their words are below it.
          const std::uint32_t width =
              15U + load_word(shared + Memory::kTileNotes +
                              (tile & 1) * static_cast<int>(sizeof(TileNote)) + kTileNoteWidth);
          const auto before = [&](int row) {
            const int key = load_word(shared + Memory::kKeyWords + (warp * 16 + g + row) * 4);
            return static_cast<int>(min((key & ~15) + width, 0x7FFFFFFFU));
          };
          const int before0 = before(0);
          const int before1 = before(8);
#pragma unroll
          for (int i = 0; i < kQueries / 8; ++i) {
            const int2 query = load_words2(words + i * 32);
            if (before0 < query.x) s[4 * i] = 0;
            if (before0 < query.y) s[4 * i + 1] = 0;
            if (before1 < query.x) s[4 * i + 2] = 0;
            if (before1 < query.y) s[4 * i + 3] = 0;
          }
        }
      }
    };
    // scale * dS for bf16, which has the exponent range; fp16 would lose small values. P and dS are
    // packed chunk by chunk, to free the registers of their floats.
    const std::uint32_t delta = of_queries + Memory::kDelta + stage * (kQueries * 4);
    const auto finish = [&](auto masked) {
#pragma unroll
      for (int i = 0; i < kQueries / 8; ++i) {
        const float2 d = load_floats2(delta + i * 32);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float of_row = j % 2 == 0 ? d.x : d.y;
          float& x = dp[4 * i + j];
          x = s[4 * i + j] * (kBf16 ? fmaf(x, a.params.shape.scale, of_row) : x + of_row);
          if (masked && s[4 * i + j] == 0) x = 0;
        }
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          ds[i / 2][i % 2 * 2 + j] = pack<T>(dp[4 * i + 2 * j], dp[4 * i + 2 * j + 1]);
          p[i / 2][i % 2 * 2 + j] = pack<T>(s[4 * i + 2 * j], s[4 * i + 2 * j + 1]);
        }
      }
    };
    if (__builtin_expect(special, 0)) {
      weigh();
      if (leave) barrier_arrive(shared + Memory::v_empty());
      finish(std::true_type{});
    } else {
      finish(std::false_type{});
    }
  };
#pragma unroll
  for (int i = 0; i < kDim / 2; ++i) dk[i] = dv[i] = 0;
  if (group == 1) named_arrive(kToken, kPassing);
  named_sync(kToken + group, kPassing);
  barrier_wait(shared + Memory::k_full(0), 0);
  barrier_wait(shared + Memory::q_full(0), 0);
  queue_s(0, 0);
  barrier_wait(shared + Memory::v_full(), 0);
  barrier_wait(shared + Memory::dout_full(0), 0);
  queue_dp(0);
  begin_step(0);
  // A turn ends with S and P of the next step, so that S can be queued after dV and dK: it needs
  // only the registers of dQ, while dP needs those of P and dS.
  do {
    const int stage = step & 1;
    const int key_buffer = tile & 1;
#pragma unroll
    for (int i = 0; i < kQueries / 16; ++i)
      store_matrices(
          (ds_target + stage * Memory::kGradientTile + i / 4 * (kKeys * 128)) ^ (i % 4 << 5),
          ds[i][0], ds[i][1], ds[i][2], ds[i][3]);
    fence_shared_for_async();
    __syncwarp();
    if (leader) barrier_arrive(shared + Memory::ds_full(stage));
    pin(p);
    pin(ds);

    // Without the token, which the other group may have now.
    if (step > 0) {
      barrier_wait(shared + Memory::ds_full(stage ^ 1), ((step - 1) >> 1) & 1);
      wait_for_staging(step - 1);
    }
    named_sync(kToken + group, kPassing);
    queue_dq(stage ^ 1, first ? key_buffer ^ 1 : key_buffer);  // step 0: the result is dropped
    {
      const std::uint64_t dout =
          mn_major(shared + Memory::kDout, Memory::kQueryBlock) + stage * (Memory::kQueryTile >> 4);
      const std::uint64_t queries =
          mn_major(shared + Memory::kQ, Memory::kQueryBlock) + stage * (Memory::kQueryTile >> 4);
      pin(dv);
      pin(dk);
      products_fence();
#pragma unroll
      for (int i = 0; i < kQueries / 16; ++i)
        multiply<T, Major::mn, true>(dv, p[i], dout + i * 128);
#pragma unroll
      for (int i = 0; i < kQueries / 16; ++i)
        multiply<T, Major::mn, true>(dk, ds[i], queries + i * 128);
      products_commit();
    }
    products_wait<1>();
    pin(s);
    if (step > 0) {
      if (leader) {
        barrier_arrive(shared + Memory::ds_empty(stage ^ 1));
        if (first) barrier_arrive(shared + Memory::k_empty(key_buffer ^ 1));
      }
      stage_dq();
    }
    const bool last = (flags & kLastOfTile) != 0;
    ended = (flags & kLastOfAll) != 0;
    if (last) {
      products_wait<0>();
      pin(p);
      pin(ds);
      pin(dv);
      pin(dk);
      barrier_arrive(shared + Memory::q_empty(stage));
      // Memory is slow, so the other group gets the tensor cores meanwhile.
      named_arrive(kToken + 1 - group, kPassing);
      if ((flags & kNothing) != 0) {
        // 0 times stale values may be NaN, but rows that were never written become 0.
#pragma unroll
        for (int i = 0; i < kDim / 2; ++i) dk[i] = dv[i] = 0;
      }
      add_key_gradients<T, kDim>(
          a, shared + Memory::kTileNotes + key_buffer * static_cast<int>(sizeof(TileNote)), dv, dk,
          kBf16 ? 1.0F : a.params.shape.scale);
#pragma unroll
      for (int i = 0; i < kDim / 2; ++i) dk[i] = dv[i] = 0;
      ++tile;
      named_sync(kToken + group, kPassing);
      // Not earlier: the next tile may need what the other group does with the token.
      if (!ended) barrier_wait(shared + Memory::k_full(tile & 1), (tile >> 1) & 1);
    }
    // After the last step, products of stale data are queued, whose results are not used. Leaving
    // the loop here, where threads might diverge, would make addresses non-uniform (20 instructions
    // between two products instead of 3).
    if (!ended) barrier_wait(shared + Memory::q_full(stage ^ 1), ((step + 1) >> 1) & 1);
    queue_s(stage ^ 1, tile & 1);
    products_wait<1>();
    pin(p);
    pin(ds);
    pin(dv);
    pin(dk);
    if (!last) barrier_arrive(shared + Memory::q_empty(stage));
    if (last && !ended) barrier_wait(shared + Memory::v_full(), tile & 1);
    if (!ended) barrier_wait(shared + Memory::dout_full(stage ^ 1), ((step + 1) >> 1) & 1);
    queue_dp(stage ^ 1);
    first = last;
    ++step;
    begin_step(stage ^ 1);
  } while (!ended);
  barrier_wait(shared + Memory::ds_full((step - 1) & 1), ((step - 1) >> 1) & 1);
  queue_dq((step - 1) & 1, (tile & 1) ^ 1);
  products_wait<0>();
  pin(s);
  wait_for_staging(step - 1);
  stage_dq();
  announce_dq(step - 1);
  if (group == 0) named_sync(kToken, kPassing);  // takes the last arrival
}

// kWindow: queries may have a lower limit of keys.
template <typename T, int kDim, bool kWindow>
__global__ void __launch_bounds__(kBackwardThreads, 1)
    attend_backward(const __grid_constant__ BackwardArguments a) {
  using Memory = Shared<kDim>;
  extern __shared__ __align__(1024) std::uint8_t memory[];
  const std::uint32_t shared = shared_address(memory);
  if (threadIdx.x == 0) {
    if ((shared & 1023) != 0)
      __trap();  // swizzles depend on the alignment, and there is no room to round up
    for (int i = 0; i < 2; ++i) {
      barrier_init(shared + Memory::q_full(i), 33);  // rows, and a warp's statistics and words
      barrier_init(shared + Memory::dout_full(i), 1);
      // Every lane that has read statistics and words; also for v_empty.
      barrier_init(shared + Memory::q_empty(i), 256);
      barrier_init(shared + Memory::ds_full(i), 8);
      barrier_init(shared + Memory::ds_empty(i), 8);
      barrier_init(shared + Memory::k_full(i), 1);
      barrier_init(shared + Memory::k_empty(i), 8);
      // Every lane that stages; every lane that has read it.
      barrier_init(shared + Memory::staged(i, 0), 128);
      barrier_init(shared + Memory::staged(i, 1), 128);
      barrier_init(shared + Memory::staging_empty(i), 32);
      barrier_init(shared + Memory::drawn(i), 1);
    }
    barrier_init(shared + Memory::v_full(), 33);  // rows, and a warp's words
    barrier_init(shared + Memory::v_empty(), 256);
    barrier_init(shared + Memory::draw(), 1);
    barrier_init_fence();
  }
  __syncthreads();
  const int group = __shfl_sync(~0U, static_cast<int>(threadIdx.x) / 128, 0);
  if (group == 2) {
    fewer_registers<40>();
    const int warp = __shfl_sync(~0U, static_cast<int>(threadIdx.x) / 32 & 3, 0);
    if (warp == 0) {
      bring_steps<kDim, kWindow>(a, shared);
    } else if (warp == 1) {
      bring_tiles<kDim, kWindow>(a, shared);
    } else {
      add_query_gradients<kDim>(a, shared, warp - 2);
    }
  } else {
    more_registers<232>();
    consume<T, kDim, kWindow>(a, kept<kDim>(shared, 0), group);
  }
}

template <typename T, int kDim>
cudaError_t start_backward(const BackwardArguments& arguments, int blocks, cudaStream_t stream) {
  const bool window = arguments.schedule.traits.limits == Limits::both;
  auto* const kernel = window ? attend_backward<T, kDim, true> : attend_backward<T, kDim, false>;
  // Of the current device, which may change: looked up every time.
  const cudaError_t error = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Shared<kDim>::kBytes);
  if (error != cudaSuccess) return error;
  kernel<<<blocks, kBackwardThreads, Shared<kDim>::kBytes, stream>>>(arguments);
  return cudaGetLastError();
}

}  // namespace annulus::cuda::sm90
