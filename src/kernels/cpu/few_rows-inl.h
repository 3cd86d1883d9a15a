// Attention of a few queries to a stretch of cached keys: vectors along the head's elements, so
// that keys are read once, as they lie, for all query heads that share them. With queries in the
// lanes (forward-inl.h), one query would leave all lanes but one idle. See simd-inl.h for how this
// is included.

namespace annulus::cpu::ANNULUS_ISA {

// Sums of so many products are under way at a time, which is as many scores as a vector has lanes.
constexpr int kFewSums = kLanes;
// Rows of O are added to in tiles of so many vectors.
constexpr int kFewTile = kLanes < 8 ? 8 : kLanes;

// The sum over the lanes of each of kLanes vectors: lane i has that of sums[i].
HWY_INLINE VF sum_each(const VF (&sums)[kFewSums]) {
#if HWY_TARGET == HWY_SCALAR
  return sums[0];
#else
  const hn::Repartition<double, DF> wide;
  // [a, b, c, d] within each block of four lanes.
  const auto sum4 = [&](VF a, VF b, VF c, VF d) HWY_ATTR {
    const VF ab = hn::Add(hn::InterleaveLower(kF, a, b), hn::InterleaveUpper(kF, a, b));
    const VF cd = hn::Add(hn::InterleaveLower(kF, c, d), hn::InterleaveUpper(kF, c, d));
    const auto x = hn::BitCast(wide, ab);
    const auto y = hn::BitCast(wide, cd);
    return hn::Add(hn::BitCast(kF, hn::InterleaveLower(wide, x, y)),
                   hn::BitCast(kF, hn::InterleaveUpper(wide, x, y)));
  };
  const VF first = sum4(sums[0], sums[1], sums[2], sums[3]);
  if constexpr (kLanes == 4) {
    return first;
  } else {
    const auto sum_halves = [&](VF low, VF high) HWY_ATTR {
      return hn::Add(hn::ConcatLowerLower(kF, high, low), hn::ConcatUpperUpper(kF, high, low));
    };
    const VF second = sum4(sums[4], sums[5], sums[6], sums[7]);
    if constexpr (kLanes == 8) {
      return sum_halves(first, second);
    } else {
      const VF x = sum_halves(
          first, sum4(sums[8 % kLanes], sums[9 % kLanes], sums[10 % kLanes], sums[11 % kLanes]));
      const VF y = sum_halves(
          second, sum4(sums[12 % kLanes], sums[13 % kLanes], sums[14 % kLanes], sums[15 % kLanes]));
      return hn::Add(hn::OddEvenBlocks(hn::SwapAdjacentBlocks(y), x),
                     hn::OddEvenBlocks(y, hn::SwapAdjacentBlocks(x)));
    }
  }
#endif
}

// kLanes elements of a cached row.
template <DType kType>
HWY_INLINE VF load_cached(const std::byte* at) {
  if constexpr (kType == DType::f32) {
    return hn::LoadU(kF, reinterpret_cast<const float*>(at));
  } else {
    const auto* in = reinterpret_cast<const std::uint16_t*>(at);
    const hn::Rebind<std::uint16_t, DF> d16;
    if constexpr (kType == DType::bf16) {
      const hn::RebindToUnsigned<DF> d32;
      return hn::BitCast(kF, hn::ShiftLeft<16>(hn::PromoteTo(d32, hn::LoadU(d16, in))));
    } else if constexpr (kVectorHalf) {
      return hn::PromoteTo(kF, hn::BitCast(hn::Rebind<hwy::float16_t, DF>(), hn::LoadU(d16, in)));
    } else {
      HWY_ALIGN float wide[kLanes];
      for (int i = 0; i < kLanes; ++i) wide[i] = f16_to_float(in[i]);
      return hn::Load(kF, wide);
    }
  }
}

// Asks for `bytes` bytes. They go to L2: what is under way and what is in use are more than L1
// holds.
HWY_INLINE void prefetch_few(const std::byte* at, std::int64_t bytes) {
  for (std::int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(at + i, 0, 2);
}

// What a query becomes: fp32 times scale and log2(e), or bf16 as it is where there is a dot product
// of those, whose scores are multiplied afterwards.
template <DType kType>
struct FewMultiply {
#if ANNULUS_BF16_DOT
  static constexpr bool kDot = kType == DType::bf16;
#else
  static constexpr bool kDot = false;
#endif
  static constexpr int kStep = kDot ? 2 * kLanes : kLanes;  // elements
  static constexpr std::int64_t kSize = kType == DType::f32 ? 4 : 2;
  static constexpr std::int64_t kQuerySize = kDot ? 2 : 4;

  static HWY_INLINE VF load_key(const std::byte* at) {
    if constexpr (kDot) {
      return hn::LoadU(kF, reinterpret_cast<const float*>(at));
    } else {
      return load_cached<kType>(at);
    }
  }
  static HWY_INLINE VF multiply_add(const std::byte* query, VF key, VF sum) {
    const VF q = hn::Load(kF, reinterpret_cast<const float*>(query));
#if ANNULUS_BF16_DOT
    if constexpr (kDot) {
      return VF{_mm512_dpbf16_ps(sum.raw, (__m512bh)_mm512_castps_si512(q.raw),
                                 (__m512bh)_mm512_castps_si512(key.raw))};
    }
#endif
    return hn::MulAdd(q, key, sum);
  }
};

// Scores of kRowCount queries with all keys, in log2 units: scores[row * kFewKeys + key].
template <DType kType, int kRowCount>
HWY_INLINE void few_scores(const FewRowsTask& task, const std::byte* query, int padded,
                           float score_factor, bool prefetches, float* scores) {
  using M = FewMultiply<kType>;
  constexpr int kKeys = kFewSums / kRowCount;
  for (int k = 0; k < task.keys; k += kKeys) {
    if (prefetches)
      prefetch_few(task.v + k * task.row_step, std::min(kKeys, task.keys - k) * task.row_step);
    const std::byte* keys[kKeys];
    ANNULUS_UNROLL(16)
    for (int i = 0; i < kKeys; ++i)  // past the last one: that one again, and nobody looks
      keys[i] = task.k + std::min(k + i, task.keys - 1) * task.row_step;
    VF sums[kFewSums];
    ANNULUS_UNROLL(16)
    for (int i = 0; i < kFewSums; ++i) sums[i] = hn::Zero(kF);
    for (int d = 0; d < padded; d += M::kStep) {
      const std::byte* q = query + d * M::kQuerySize;
      ANNULUS_UNROLL(16)
      for (int i = 0; i < kKeys; ++i) {
        const VF key = M::load_key(keys[i] + d * M::kSize);
        ANNULUS_UNROLL(16)
        for (int r = 0; r < kRowCount; ++r) {
          sums[r * kKeys + i] = M::multiply_add(q + r * kFewQueryBytes, key, sums[r * kKeys + i]);
        }
      }
    }
    HWY_ALIGN float all[kFewSums];
    hn::Store(hn::Mul(sum_each(sums), hn::Set(kF, score_factor)), kF, all);
    ANNULUS_UNROLL(16)
    for (int r = 0; r < kRowCount; ++r) {
      std::memcpy(scores + r * kFewKeys + k, all + r * kKeys, kKeys * sizeof(float));
    }
  }
}

// Scores of one row become weights; its running maximum and sum go on. Returns what its O so far
// has to be multiplied by.
HWY_INLINE float few_weights(float* scores, int keys, float& highest, float& sum) {
  for (int k = keys; k % kLanes != 0; ++k) scores[k] = -INFINITY;
  VF most = hn::Set(kF, highest);
  for (int k = 0; k < keys; k += kLanes) most = hn::Max(most, hn::Load(kF, scores + k));
  const float now = hn::GetLane(hn::MaxOfLanes(kF, most));
  // All scores so far are -inf: any reference gives them weight 0.
  const float reference = now == -INFINITY ? 0.0F : now;
  const VF minus_reference = hn::Set(kF, -reference);
  VF total = hn::Zero(kF);
  for (int k = 0; k < keys; k += kLanes) {
    const VF weight = exp2_vector(hn::Add(hn::Load(kF, scores + k), minus_reference));
    hn::Store(weight, kF, scores + k);
    total = hn::Add(total, weight);
  }
  const float factor = highest == reference ? 1.0F : std::exp2(highest - reference);
  highest = now;
  sum = sum * factor + hn::GetLane(hn::SumOfLanes(kF, total));
  return factor;
}

// Vectors [first, first + kVectorCount) of kRowCount rows of O: o = o * factor + weights x V.
template <DType kType, int kRowCount, int kVectorCount>
HWY_INLINE void few_outputs(const FewRowsTask& task, const float* weights, const float* factors,
                            int padded, int first, bool prefetches, float* o) {
  constexpr std::int64_t kSize = FewMultiply<kType>::kSize;
  VF sums[kRowCount][kVectorCount];
  ANNULUS_UNROLL(16)
  for (int r = 0; r < kRowCount; ++r) {
    ANNULUS_UNROLL(16)
    for (int i = 0; i < kVectorCount; ++i) {
      sums[r][i] =
          hn::Mul(hn::Set(kF, factors[r]), hn::Load(kF, o + r * padded + (first + i) * kLanes));
    }
  }
  const std::byte* value = task.v + first * kLanes * kSize;
  const int next_keys = prefetches ? task.next_keys : 0;
  for (int k = 0; k < task.keys; ++k, value += task.row_step) {
    if (k < next_keys) prefetch_few(task.next_k + k * task.row_step, task.row_step);
    VF v[kVectorCount];
    ANNULUS_UNROLL(16)
    for (int i = 0; i < kVectorCount; ++i) v[i] = load_cached<kType>(value + i * kLanes * kSize);
    ANNULUS_UNROLL(16)
    for (int r = 0; r < kRowCount; ++r) {
      const VF weight = hn::Set(kF, weights[r * kFewKeys + k]);
      ANNULUS_UNROLL(16)
      for (int i = 0; i < kVectorCount; ++i) sums[r][i] = hn::MulAdd(weight, v[i], sums[r][i]);
    }
  }
  ANNULUS_UNROLL(16)
  for (int r = 0; r < kRowCount; ++r) {
    ANNULUS_UNROLL(16)
    for (int i = 0; i < kVectorCount; ++i)
      hn::Store(sums[r][i], kF, o + r * padded + (first + i) * kLanes);
  }
}

// From vector `first` on, with the widest tiles that fit.
template <DType kType, int kRowCount, int kVectorCount>
HWY_INLINE void few_output_tiles(const FewRowsTask& task, const float* weights,
                                 const float* factors, int padded, int first, bool prefetches,
                                 float* o) {
  for (; (first + kVectorCount) * kLanes <= padded; first += kVectorCount) {
    few_outputs<kType, kRowCount, kVectorCount>(task, weights, factors, padded, first, prefetches,
                                                o);
    prefetches = false;
  }
  if constexpr (kVectorCount > 1) {
    few_output_tiles<kType, kRowCount, kVectorCount / 2>(task, weights, factors, padded, first,
                                                         prefetches, o);
  }
}

template <DType kType, int kRowCount>
HWY_NOINLINE void few_row_block(const Problem& problem, const FewRowsTask& task, int row) {
  const int padded = padded_head_dim(problem.head_dim);
  const float score_factor = FewMultiply<kType>::kDot ? problem.scale * kLog2E : 1.0F;
  HWY_ALIGN float scores[kRowCount * kFewKeys];
  float factors[kRowCount];
  few_scores<kType, kRowCount>(task, task.q + row * kFewQueryBytes, padded, score_factor, row == 0,
                               scores);
  for (int r = 0; r < kRowCount; ++r) {
    factors[r] =
        few_weights(scores + r * kFewKeys, task.keys, task.highest[row + r], task.sum[row + r]);
  }
  constexpr int kMost = kFewTile / kRowCount < 8 ? kFewTile / kRowCount : 8;
  few_output_tiles<kType, kRowCount, kMost>(task, scores, factors, padded, 0, row == 0,
                                            task.o + row * padded);
}

template <DType kType>
HWY_INLINE void few_rows_of(const Problem& problem, const FewRowsTask& task) {
  int row = 0;
  if constexpr (kLanes >= 8) {
    for (; row + 8 <= task.rows; row += 8) few_row_block<kType, 8>(problem, task, row);
  }
  if constexpr (kLanes >= 4) {
    for (; row + 4 <= task.rows; row += 4) few_row_block<kType, 4>(problem, task, row);
    for (; row + 2 <= task.rows; row += 2) few_row_block<kType, 2>(problem, task, row);
  }
  for (; row < task.rows; ++row) few_row_block<kType, 1>(problem, task, row);
}

inline void few_rows(const Problem& problem, const FewRowsTask& task) {
  switch (problem.dtype) {
    case DType::f32:
      return few_rows_of<DType::f32>(problem, task);
    case DType::bf16:
      return few_rows_of<DType::bf16>(problem, task);
    case DType::f16:
      return few_rows_of<DType::f16>(problem, task);
  }
}

inline void load_few_query(const Problem& problem, const std::byte* row, std::byte* out) {
  const int padded = padded_head_dim(problem.head_dim);
  if (problem.dtype == DType::bf16 && FewMultiply<DType::bf16>::kDot) {
    const auto bytes = static_cast<std::size_t>(problem.head_dim) * 2;
    std::memcpy(out, row, bytes);
    std::memset(out + bytes, 0, static_cast<std::size_t>(padded) * 2 - bytes);
    return;
  }
  VF ignored = hn::Zero(kF);
  load_row(problem.dtype, row, problem.scale * kLog2E, reinterpret_cast<float*>(out),
           problem.head_dim, padded, ignored);
}

}  // namespace annulus::cpu::ANNULUS_ISA
