#pragma once

#include <cstdint>

#include "kernels/cuda/rows/sink.cuh"
#include "kernels/cuda/sm90/forward/load.cuh"
#include "kernels/cuda/sm90/forward/output.cuh"
#include "kernels/cuda/sm90/forward/scores.cuh"
#include "kernels/cuda/sm90/instructions.cuh"

// The forward kernel for Hopper. One block per SM iterates over the items of a launch: two warp
// groups of consumers with 64 query rows each, and one warp group that loads rows into shared
// memory, half of its warps Q and K, the other half V. Tiles are 128 x 128.
//
// A tile whose rows are evenly spaced in the shard is loaded by bulk copies, through a map {dim,
// head, remainder, quotient, batch} of the token modulo and divided by the launch's stride, so that
// a tile may begin at any row. So are tiles of received parcels, whose slot is one long list of
// rows in the map. The loading threads gather all other tiles (several runs, fewer than 128 rows)
// into the same layout.
//
// Consumers keep Q, P, S and O in registers. S of a tile is issued together with P V of the one
// before, also from one item to the next. The sums of a row start with its running state: reference
// L, sum 1, and O. The state's O is loaded directly into registers, or added later, in pieces
// (state.cuh).
namespace annulus::cuda::sm90 {

inline constexpr float kLn2 = 0.6931471805599453F;
// If the sum of a tile's P exceeds this, the reference is raised: float16 has P up to 65504.
inline constexpr float kHighSum = 16384.0F;

template <typename T, int kDim, Limits kLimits, PairWeights kWeights, bool kInPieces>
__device__ __forceinline__ void compute(const ForwardArguments& a, std::uint32_t tiles,
                                        typename Layout<kDim>::Control& control, int group) {
  using L = Layout<kDim>;
  // The next item's second S is issued before the last item's rows are written: 2 % faster at head
  // dim 64. At 128 it gained nothing, and causal launches became slower.
  constexpr bool kEarlyScores = kDim == 64;
  // At the beginning of an item, P V is waited for after the softmax, not before it. Only faster in
  // these kernels.
  constexpr bool kWaitLate = kHides<kLimits> || (kDim == 128 && kWeights != PairWeights::none);
  // The groups alternate in issuing products, so that one computes exponentials while the products
  // of the other run. With full masks at head dim 128, where products take longest, it gained
  // nothing.
  constexpr bool kTurns = kHides<kLimits> || kDim == 64;
  // See attempt_weights.
  constexpr bool kAttempt = kWeights != PairWeights::general;
  const ForwardParams& p = a.params;
  const bool first_lane = (threadIdx.x & 31) == 0;
  const float scale_log2 = a.scale_log2;

  float o[kDim / 2];
  float s[kTile / 2];
  std::uint32_t weights[kTile / 16][4];  // P
  std::uint32_t q[kDim / 16][4];
  // The reference of each row, which is subtracted from exponents of 2 (-inf: the row has seen
  // nothing), and its sums.
  float less0, less1, sum0, sum1, keep0 = 0, keep1 = 0;
  // log2 of pairs' weights minus the reference: [row][2c, +1, +8, +9], or [row].
  constexpr int kAddends = kWeights == PairWeights::periodic ? 8 : 2;
  float addend[kAddends];
  // O of the next item's state, loaded while products run (4 % at head dim 64). At 128 there are no
  // registers for it: it is loaded into those of S while rows are written.
  float state[kEarlyScores ? kDim / 2 : 1];

  int slot_at = 0;
  int query_parity = 0;
  int key_stage = 0;
  int key_parity = 0;
  int value_stage = 0;
  int value_parity = 0;
  int pieces_left = 0;  // of the state, not loaded yet
  int state_parity = 0;

  const auto take_turn = [&] {
    if constexpr (kTurns) named_sync(kTurnBarrier + group, 128 * kConsumers);
  };
  const auto pass_turn = [&] {
    if constexpr (kTurns) named_arrive(kTurnBarrier + 1 - group, 128 * kConsumers);
  };
  const auto pin_operands = [&] {
    pin(o);
    pin(weights);
    pin(q);
  };
  // Reads the facts of a tile here, where the latency is hidden.
  int key_flags = 0;
  std::uint32_t sick = 0;
  const auto wait_for_keys = [&] {
    barrier_wait(shared_address(&control.keys_full[0]) + 8 * key_stage, key_parity);
    key_flags = control.keys[key_stage].flags;
  };
  const auto wait_for_values = [&] {
    barrier_wait(shared_address(&control.values_full[0]) + 8 * value_stage, value_parity);
    if constexpr (kHides<kLimits>) sick = control.values[value_stage].any;
  };
  const auto issue_scores = [&] {
    const std::uint64_t keys = k_major(tiles + L::kKeys + key_stage * L::kTileBytes);
    multiply<T, Major::k, false>(s, q[0], keys);
#pragma unroll
    for (int k = 1; k < kDim / 16; ++k)
      multiply<T, Major::k, true>(s, q[k], keys + (k / 4) * (kBlockBytes >> 4) + (k % 4) * 2);
    products_commit();
  };
  const auto issue_values = [&] {
    const std::uint64_t values =
        mn_major(tiles + L::kValues + value_stage * L::kTileBytes, kBlockBytes);
#pragma unroll
    for (int k = 0; k < kTile / 16; ++k)
      multiply<T, Major::mn, true>(o, weights[k], values + k * 128);
    products_commit();
  };
  const auto release_keys = [&] {
    __syncwarp();
    if (first_lane) barrier_arrive(shared_address(&control.keys_empty[0]) + 8 * key_stage);
    if (++key_stage == L::kKeyStages) {
      key_stage = 0;
      key_parity ^= 1;
    }
  };
  // By changing the factor of the rows in the next product. P of that tile still exists.
  const auto see_sick = [&](float& factor0, float& factor1) {
    spoil_rows(weights, control.values[value_stage], factor0, factor1);
  };
  const auto release_values = [&] {
    if constexpr (kHides<kLimits>) __syncwarp();
    if (first_lane) barrier_arrive(shared_address(&control.values_empty[0]) + 8 * value_stage);
    if (++value_stage == L::kValueStages) {
      value_stage = 0;
      value_parity ^= 1;
    }
  };
  // Q into registers: this frees its shared memory.
  const auto take_queries = [&] {
    const std::uint32_t thread = thread_anew();
    const std::uint32_t from =
        tiles + swizzled(static_cast<int>((thread >> 5) * 16 + (thread & 15)), (thread >> 4) & 1);
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
      load_matrices((from ^ (32 * (k % 4))) + (k / 4) * kBlockBytes, q[k][0], q[k][1], q[k][2],
                    q[k][3]);
    }
    pin(q);
    __syncwarp();
    if (first_lane) barrier_arrive(shared_address(&control.queries_empty));
  };
  const auto scale_output = [&](float factor0, float factor1) { scale_rows(o, factor0, factor1); };
  const auto look_up_weights = [&](const Slot& slot) {
    const auto [lane, c, row] = place_anew();
#pragma unroll
    for (int e = 0; e < kAddends; ++e) {
      const int key = 2 * c + (e & 1) + 4 * (e & 2);
      addend[e] = kWeights == PairWeights::periodic
                      ? control.log2_weight[slot.repeats[row + 2 * (e & 4)] & slot.key_repeats[key]]
                      : 0.0F;
    }
  };
  const auto lessen_addends = [&](float by0, float by1) {
#pragma unroll
    for (int e = 0; e < kAddends; ++e) addend[e] -= e < kAddends / 2 ? by0 : by1;
  };
  // Exponents of rows that have seen nothing are infinite, so attempts fail.
  const auto mark_empty_rows = [&] {
#pragma unroll
    for (int e = 0; e < kAddends; ++e) {
      if ((e < kAddends / 2 ? less0 : less1) == -INFINITY) addend[e] = INFINITY;
    }
  };
  // Initial sums of a row.
  const auto take_state = [&](const Slot& slot) {
    const auto [lane, c, row] = place_anew();
    look_up_weights(slot);
    const float lse0 = slot.old_lse[row];
    const float lse1 = slot.old_lse[row + 8];
    less0 = lse0 * kLog2E;  // -inf stays
    less1 = lse1 * kLog2E;
    sum0 = c == 0 && lse0 != -INFINITY ? 1.0F : 0.0F;
    sum1 = c == 0 && lse1 != -INFINITY ? 1.0F : 0.0F;
    if constexpr (kInPieces) pieces_left = slot.pieces;
  };
  const auto clear_output = [&] {
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) o[i] = 0.0F;
  };
  const auto has_state = [&](const Slot& slot) {
    return kInPieces ? slot.has_state != 0 : p.load_state;
  };
  const auto take_output = [&](const Slot& slot) {
    if (has_state(slot)) {
      read_state<kDim>(p, slot, o);
      scale_output(keep0, keep1);
    } else {
      clear_output();
    }
  };
  // The same in two parts.
  const auto ask_for_output = [&](const Slot& slot, auto& to) {
    if (has_state(slot)) read_state<kDim>(p, slot, to);
  };
  const auto take_asked = [&](const Slot& slot, const auto& from) {
    if (has_state(slot)) {
#pragma unroll
      for (int j = 0; j < kDim / 8; ++j) {
        o[4 * j] = from[4 * j] * keep0;
        o[4 * j + 1] = from[4 * j + 1] * keep0;
        o[4 * j + 2] = from[4 * j + 2] * keep1;
        o[4 * j + 3] = from[4 * j + 3] * keep1;
      }
    } else {
      clear_output();
    }
  };
  const auto add_piece = [&](const Slot& slot) {
    --pieces_left;
    barrier_wait(shared_address(&control.state_full), state_parity);
    state_parity ^= 1;
    add_state_piece<kDim>(o, tiles + L::kState, slot, pieces_left, less0, less1);
    __syncwarp();
    if (first_lane) barrier_arrive(shared_address(&control.state_empty));
  };
  // Returns whether this was the item's last tile.
  const auto mask = [&](const Slot& slot) {
    const int flags = key_flags;
    if ((flags & kMasked) != 0) hide_scores<kLimits>(s, control.keys[key_stage], flags, slot);
    if constexpr (kWeights != PairWeights::general) release_keys();
    return (flags & kLast) != 0;
  };
  // Computes P from S, before rounding. The maximum is that of the plain scores, so P is at most 5.
  // Follows look_up_weights.
  const auto softmax = [&](const Slot& slot) {
    float top0;
    float top1;
    highest_scores(s, top0, top1);
    top0 = fmaxf(less0, scale_log2 * top0);
    top1 = fmaxf(less1, scale_log2 * top1);
    // For a row that has seen nothing yet, -inf - -inf would be NaN.
    const float by0 = top0 == -INFINITY ? 0.0F : top0;
    const float by1 = top1 == -INFINITY ? 0.0F : top1;
    keep0 = exp2_approx(less0 - by0);
    keep1 = exp2_approx(less1 - by1);
    less0 = top0;
    less1 = top1;
    lessen_addends(by0, by1);
    float add0 = 0.0F;
    float add1 = 0.0F;
    if constexpr (kWeights == PairWeights::general) {
      weigh_scores(s, control.keys[key_stage], slot, control.log2_weight, scale_log2, by0, by1,
                   add0, add1);
      release_keys();
    } else {
      weigh_scores<kWeights>(s, addend, scale_log2, add0, add1);
    }
    mark_empty_rows();
    sum0 = fmaf(sum0, keep0, add0);
    sum1 = fmaf(sum1, keep1, add1);
    // Without this, the compiler would wait here for the running products. It cannot move that wait
    // above a store of the sums. The store never runs, because sums are not negative.
    if constexpr (kWaitLate)
      asm volatile(
          "{\n.reg .pred never;\nsetp.lt.f32 never, %0, 0f00000000;\n@never st.shared.f32 [%1], "
          "%0;\n}\n" ::"f"(fminf(sum0, sum1)),
          "r"(tiles)
          : "memory");
  };
  const auto round_weights = [&] {
#pragma unroll
    for (int i = 0; i < kTile / 4; ++i) weights[i / 4][i % 4] = pack<T>(s[2 * i], s[2 * i + 1]);
  };
  // New references of rows after a failed attempt.
  const auto lessen_more = [&](const Slot& slot, bool failed0, bool failed1) {
    const std::uint32_t quad = 0xFU << (thread_anew() & 28);  // a row's lanes
    failed0 = (__ballot_sync(~0U, failed0) & quad) != 0;
    failed1 = (__ballot_sync(~0U, failed1) & quad) != 0;
    float top0;
    float top1;
    highest_scores(s, top0, top1);
    top0 = failed0 ? fmaxf(less0, scale_log2 * top0) : less0;
    top1 = failed1 ? fmaxf(less1, scale_log2 * top1) : less1;
    const float by0 = top0 == -INFINITY ? 0.0F : top0;
    const float by1 = top1 == -INFINITY ? 0.0F : top1;
    keep0 = failed0 ? exp2_approx(less0 - by0) : 1.0F;
    keep1 = failed1 ? exp2_approx(less1 - by1) : 1.0F;
    less0 = top0;
    less1 = top1;
    look_up_weights(slot);
    lessen_addends(by0, by1);
    sum0 *= keep0;
    sum1 *= keep1;
    scale_output(keep0, keep1);
  };
  // Computes P from S, rounded, assuming that no score is much higher than those of earlier tiles:
  // without a maximum, and without rescaling O, a third fewer instructions than the softmax. If the
  // assumption is wrong, or a row has seen nothing, S still exists for another attempt. Each row is
  // decided by itself: no bit of it may depend on keys that it does not see.
  const auto attempt_weights = [&](const Slot& slot) {
    float add0;
    float add1;
    bool again = false;
#pragma unroll 1
    while (true) {
      add0 = 0.0F;
      add1 = 0.0F;
#pragma unroll
      for (int i = 0; i < kTile / 4; ++i) {
        const bool second = (i & 1) != 0;  // row
        float x[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int of_row = kWeights == PairWeights::periodic ? (i & 2) + e : 0;
          x[e] = exp2_approx(
              fmaf(s[2 * i + e], scale_log2, addend[(second ? kAddends / 2 : 0) + of_row]));
          (second ? add1 : add0) += x[e];
        }
        weights[i / 4][i % 4] = pack<T>(x[0], x[1]);
      }
      const bool failed0 = !(add0 <= kHighSum);  // or NaN
      const bool failed1 = !(add1 <= kHighSum);
      if (again || !__any_sync(~0U, failed0 || failed1)) break;
      lessen_more(slot, failed0, failed1);
      again = true;
    }
    if (again) mark_empty_rows();
    sum0 += add0;
    sum1 += add1;
  };
  // Scores of a tile and products with the values of the previous one are running.
  const auto finish_tile = [&](const Slot& slot) {
    // P is rounded into the registers of the previous one.
    if constexpr (kAttempt) {
      products_wait<0>();
      pin(o);
    } else {
      products_wait<1>();
    }
    pin(s);
    const bool last = mask(slot);
    if constexpr (kAttempt) {
      if (kHides<kLimits> && sick != 0) {
        float factor0 = 1.0F;
        float factor1 = 1.0F;
        see_sick(factor0, factor1);
        scale_output(factor0, factor1);
      }
      release_values();
      attempt_weights(slot);
    } else {
      softmax(slot);
      products_wait<0>();
      pin(o);
      if (kHides<kLimits> && sick != 0) see_sick(keep0, keep1);
      release_values();
      round_weights();
      scale_output(keep0, keep1);
    }
    if constexpr (kInPieces) {
      if (pieces_left > 0 && (key_stage == 0 || slot.every_tile != 0)) add_piece(slot);
    }
    return last;
  };
  // Scores of the next tile, and products with the values of the previous one.
  const auto queue_products = [&] {
    wait_for_keys();
    take_turn();
    pin_operands();
    products_fence();
    issue_scores();
    wait_for_values();
    products_fence();
    issue_values();
    pass_turn();
  };
  // Ends a row's sums at the end of an item: writes L, and returns the factor of O.
  const auto end_sums = [&](const Slot& slot, float& factor0, float& factor1) {
    const auto [lane, c, row] = place_anew();
    sum0 += __shfl_xor_sync(~0U, sum0, 1);
    sum1 += __shfl_xor_sync(~0U, sum1, 1);
    sum0 += __shfl_xor_sync(~0U, sum0, 2);
    sum1 += __shfl_xor_sync(~0U, sum1, 2);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = half == 0 ? sum0 : sum1;
      const bool empty = sum == 0.0F;
      const std::int64_t token = slot.token[row + 8 * half];
      const bool more = (slot.later >> ((row + 8 * half) & 31) & 1U) != 0;
      float lse = empty ? -INFINITY : fmaf(half == 0 ? less0 : less1, kLn2, __logf(sum));
      float factor = empty ? 0.0F : __fdividef(more ? 1.0F : p.out_factor, sum);
      if (slot.sink != -INFINITY) {  // for all lanes alike
        const WithSink end = with_sink(lse, more ? -INFINITY : slot.sink);
        lse = end.lse;
        factor = empty ? end.kept : factor * end.kept;
      }
      if (c == 0 && token >= 0) *reinterpret_cast<float*>(slot.lse + token * p.lse.row_step) = lse;
      (half == 0 ? factor0 : factor1) = factor;
    }
  };
  const auto write = [&](int slot_at, float factor0, float factor1) {
    write_rows<T, kDim>(p, control.slots[slot_at], o, factor0, factor1);
    __syncwarp();
    if (first_lane) barrier_arrive(shared_address(&control.slots_free[0]) + 8 * slot_at);
  };

  // The item's rows and its queries. The number of slots is odd, so the number of rounds through
  // the slots is odd if either the item's number or its slot is.
  const auto wait_for_item = [&] {
    static_assert(kSlots % 2 == 1);
    barrier_wait(shared_address(&control.rows_known[0]) + 8 * slot_at,
                 query_parity ^ (slot_at & 1));
    barrier_wait(shared_address(&control.queries_full), query_parity);
    query_parity ^= 1;
  };
  wait_for_item();
  if (control.slots[0].end != 0) return;
  take_queries();
  take_state(control.slots[0]);
  wait_for_keys();
  if (group == 1) pass_turn();
  take_turn();
  products_fence();
  issue_scores();
  pass_turn();
  products_wait<0>();
  pin(s);
  bool last = mask(control.slots[0]);
  softmax(control.slots[0]);
  round_weights();
  take_output(control.slots[0]);
  while (true) {
    while (!last) {
      queue_products();
      last = finish_tile(control.slots[slot_at]);
    }
    // The next item's first scores are issued with this one's last values.
    const int written = slot_at;
    slot_at = slot_at + 1 == kSlots ? 0 : slot_at + 1;
    wait_for_item();
    const Slot& next = control.slots[slot_at];
    if (next.end != 0) {
      slot_at = written;
      break;
    }
    take_queries();
    queue_products();
    float factor0;
    float factor1;
    end_sums(control.slots[written], factor0, factor1);
    take_state(next);
    if constexpr (kEarlyScores) ask_for_output(next, state);
    products_wait<1>();
    pin(s);
    last = mask(next);
    softmax(next);
    products_wait<0>();
    pin(o);
    if (kHides<kLimits> && sick != 0) see_sick(factor0, factor1);
    release_values();
    round_weights();
    if constexpr (kEarlyScores) {
      if (!last) {
        wait_for_keys();
        take_turn();
        pin(weights);
        pin(q);
        products_fence();
        issue_scores();
        pass_turn();
        write(written, factor0, factor1);
        take_asked(next, state);
        wait_for_values();
        pin(o);
        pin(weights);
        products_fence();
        issue_values();
        last = finish_tile(next);
      } else {
        write(written, factor0, factor1);
        take_asked(next, state);
      }
    } else {
      ask_for_output(next, s);
      write(written, factor0, factor1);
      take_asked(next, s);
    }
  }
  wait_for_values();
  pin_operands();
  products_fence();
  issue_values();
  products_wait<0>();
  pin(o);
  float factor0;
  float factor1;
  end_sums(control.slots[slot_at], factor0, factor1);
  if (kHides<kLimits> && sick != 0) see_sick(factor0, factor1);
  release_values();
  write(slot_at, factor0, factor1);
  if (group == 0) take_turn();  // completes the last phase of the barrier
}

// kInPieces: the state may be loaded in pieces.
template <typename T, int kDim, Limits kLimits, PairWeights kWeights, bool kInPieces>
__global__ void __launch_bounds__(kThreads, 1)
    attend_forward(const __grid_constant__ ForwardArguments a) {
  using L = Layout<kDim>;
  extern __shared__ std::uint8_t raw[];
  const std::uint32_t unaligned = shared_address(raw);
  const std::uint32_t tiles = (unaligned + 1023) & ~1023U;
  auto& control = *reinterpret_cast<typename L::Control*>(raw + (tiles - unaligned) + L::kControl);
  if (threadIdx.x == 0) {
    for (int i = 0; i < L::kKeyStages; ++i) {
      barrier_init(shared_address(&control.keys_full[i]), 1);
      barrier_init(shared_address(&control.keys_empty[i]), kConsumerWarps);
    }
    for (int i = 0; i < L::kValueStages; ++i) {
      barrier_init(shared_address(&control.values_full[i]), 1);
      barrier_init(shared_address(&control.values_empty[i]), kConsumerWarps);
    }
    barrier_init(shared_address(&control.queries_full), 1);
    barrier_init(shared_address(&control.queries_empty), kConsumerWarps);
    barrier_init(shared_address(&control.values_landed), 1);
    for (int i = 0; i < kSlots; ++i) {
      // Every lane that writes rows; every warp that reads them, and both teams.
      barrier_init(shared_address(&control.rows_known[i]), 32);
      barrier_init(shared_address(&control.slots_free[i]), kConsumerWarps + 2);
    }
    barrier_init(shared_address(&control.state_full), 1);
    barrier_init(shared_address(&control.state_empty), kConsumerWarps);
    barrier_init_fence();
  }
  if (threadIdx.x < 16)
    control.log2_weight[threadIdx.x] = log2f(1.0F + static_cast<float>(__popc(threadIdx.x)));
  __syncthreads();
  let_next_kernel_start();
  wait_for_previous_kernels();
  if constexpr (kInPieces)
    fence_global_for_async();  // bulk copies read the state that these threads have written
  const int group = __shfl_sync(~0U, threadIdx.x / 128, 0);
  if (group == kConsumers) {
    fewer_registers<40>();
    const int thread = threadIdx.x % 128;
    if (thread < kTeam) {
      load_queries_and_keys<T, kDim, kLimits, kWeights, kInPieces>(a, tiles, control, thread);
    } else {
      load_values<T, kDim, kLimits, kWeights, kInPieces>(a, tiles, control, thread - kTeam);
    }
  } else {
    more_registers<232>();
    compute<T, kDim, kLimits, kWeights, kInPieces>(a, tiles, control, group);
  }
}

// One per dtype and head dim, each in a file of its own (bf16_d64.cu, ...), because they take long
// to compile.
using ForwardKernel = void (*)(ForwardArguments);
ForwardKernel forward_bf16_d64(Limits limits, PairWeights weights, bool in_pieces);
ForwardKernel forward_bf16_d128(Limits limits, PairWeights weights, bool in_pieces);
ForwardKernel forward_f16_d64(Limits limits, PairWeights weights, bool in_pieces);
ForwardKernel forward_f16_d128(Limits limits, PairWeights weights, bool in_pieces);

template <typename T, int kDim, PairWeights kWeights>
ForwardKernel choose_forward(Limits limits, bool in_pieces) {
  if (limits == Limits::most) return attend_forward<T, kDim, Limits::most, kWeights, false>;
  if (limits == Limits::both) return attend_forward<T, kDim, Limits::both, kWeights, false>;
  if constexpr (kPieces < kDim >> 0 && kWeights != PairWeights::general) {
    if (in_pieces) return attend_forward<T, kDim, Limits::none, kWeights, true>;
  }
  return attend_forward<T, kDim, Limits::none, kWeights, false>;
}

template <typename T, int kDim>
ForwardKernel choose_forward(Limits limits, PairWeights weights, bool in_pieces) {
  switch (weights) {
    case PairWeights::none:
      return choose_forward<T, kDim, PairWeights::none>(limits, in_pieces);
    case PairWeights::periodic:
      return choose_forward<T, kDim, PairWeights::periodic>(limits, in_pieces);
    case PairWeights::general:
      return choose_forward<T, kDim, PairWeights::general>(limits, in_pieces);
  }
  return nullptr;
}

}  // namespace annulus::cuda::sm90
