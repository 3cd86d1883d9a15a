// Vectors, exp2 and the register tile that all products go through. Included once per instruction
// set, inside HWY_BEFORE_NAMESPACE; ANNULUS_ISA names the namespace and ANNULUS_BF16_DOT says
// whether the bf16 dot product exists. No include guard on purpose.

namespace annulus::cpu::ANNULUS_ISA {

namespace hn = hwy::HWY_NAMESPACE;

using DF = hn::ScalableTag<float>;
using DI = hn::RebindToSigned<DF>;
using VF = hn::Vec<DF>;
constexpr DF kF;
constexpr DI kI;
constexpr int kLanes = static_cast<int>(HWY_LANES(float));

// A panel is two vectors of queries. With 32 registers a tile of 8 rows x 2 vectors leaves room for
// its operands; with 16 (AVX2), 4 x 2 accumulators are just enough to hide the latency of two FMAs
// per cycle.
constexpr int kVectors = 2;
constexpr int kPanel = kVectors * kLanes;
#if HWY_TARGET == HWY_AVX2
constexpr int kRows = 4;
#else
constexpr int kRows = 8;
#endif
constexpr int kKeyAlign = 8;  // key blocks are padded to this; a multiple of kRows

// One kernel for everything, where nobody looks for speed.
#if HWY_TARGET == HWY_SCALAR || HWY_TARGET == HWY_EMU128
constexpr bool kOnlyGeneral = true;
#else
constexpr bool kOnlyGeneral = false;
#endif

#define ANNULUS_PRAGMA(tokens) _Pragma(#tokens)
#if defined(__clang__)
#define ANNULUS_UNROLL(n) ANNULUS_PRAGMA(clang loop unroll_count(n))
#else
#define ANNULUS_UNROLL(n) ANNULUS_PRAGMA(GCC unroll n)
#endif

constexpr float kLog2E = 1.4426950408889634F;
constexpr float kLn2 = 0.6931471805599453F;
// Sums of weights outside these bounds show that a row's reference is unsuitable; see
// forward-inl.h.
constexpr float kSumTooLarge = 0x1p48F;  // leaves a factor of 2^79 for O = sum of p * v
constexpr float kSumTooSmall =
    0x1p-64F;  // of a row's first block: smaller weights would be lost to underflow

// GCC folds loads back into every FMA of small tiles (80 % of peak instead of 99 %) unless the
// value is pinned in a register. Takes a copy: naming an array element in the asm would force the
// whole array into memory.
HWY_INLINE VF pin(VF v) {
#if HWY_ARCH_X86 && HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128
  auto raw = v.raw;
  asm("" : "+v"(raw));
  return VF{raw};
#else
  return v;
#endif
}

// 2^x by a polynomial of degree 5 (2.2e-7 relative), or 4 (7e-7: enough for weights that are
// rounded to bf16). exp2(-inf) is exactly 0 (masked scores); NaN stays NaN; above 2^127 it
// saturates.
template <int kDegree = 5>
HWY_INLINE VF exp2_vector(VF x) {
#if HWY_TARGET <= HWY_AVX3
  // scalef underflows and overflows by itself, and scalef(NaN, -inf) = 0 covers -inf, whose
  // fraction is NaN.
  const __m512 n = _mm512_roundscale_ps(x.raw, 8);
  const VF f{_mm512_sub_ps(x.raw, n)};
#else
  // Min/Max return their second operand when one is NaN on x86; scalar code needs the comparison
  // spelled out.
#if HWY_TARGET == HWY_SCALAR || HWY_TARGET == HWY_EMU128
  VF y = hn::IfThenElse(hn::Lt(x, hn::Set(kF, -127.0F)), hn::Set(kF, -127.0F), x);
  y = hn::IfThenElse(hn::Gt(y, hn::Set(kF, 127.0F)), hn::Set(kF, 127.0F), y);
#else
  const VF y = hn::Min(hn::Set(kF, 127.0F), hn::Max(hn::Set(kF, -127.0F), x));
#endif
  const VF n = hn::Round(y);
  const VF f = hn::Sub(y, n);
#endif
  VF p;
  if constexpr (kDegree == 5) {
    p = hn::MulAdd(f, hn::Set(kF, 0.00132647F), hn::Set(kF, 0.00967151F));
    p = hn::MulAdd(p, f, hn::Set(kF, 0.05550734F));
    p = hn::MulAdd(p, f, hn::Set(kF, 0.24022242F));
    p = hn::MulAdd(p, f, hn::Set(kF, 0.69314698F));
    p = hn::MulAdd(p, f, hn::Set(kF, 1.0F));
  } else {
    p = hn::MulAdd(f, hn::Set(kF, 0.0095701F), hn::Set(kF, 0.05591786F));
    p = hn::MulAdd(p, f, hn::Set(kF, 0.24024745F));
    p = hn::MulAdd(p, f, hn::Set(kF, 0.69312181F));
    p = hn::MulAdd(p, f, hn::Set(kF, 0.99999926F));
  }
#if HWY_TARGET <= HWY_AVX3
  return VF{_mm512_scalef_ps(p.raw, n)};
#else
  // p is within a factor sqrt(2) of 1, so n goes straight to its exponent; n = -127 with f = 0
  // gives exactly 0.
  const VF scaled =
      hn::BitCast(kF, hn::Add(hn::BitCast(kI, p), hn::ShiftLeft<23>(hn::ConvertTo(kI, n))));
  return hn::IfThenElse(hn::Eq(x, x), scaled, x);
#endif
}

// A pair of 1 in bf16.
constexpr std::uint32_t kTwoOnes = 0x3f803f80;

// How numbers are multiplied. A broadcast copies one Element to all lanes: one float, or two bf16
// that are multiplied with two bf16 of the other side and summed in fp32.
struct MultiplyF32 {
  using Element = float;
  static constexpr int kPack = 1;
  static constexpr int kExpDegree = 5;
  static HWY_INLINE VF broadcast_multiply_add(const float* a, VF b, VF acc) {
    return hn::MulAdd(hn::Set(kF, *a), b, acc);
  }
  static HWY_INLINE VF load(const float* b) { return hn::Load(kF, b); }
  // Two key rows of one vector of queries, at the same place of a [keys][kPanel] (bf16: [keys /
  // 2][kPanel]) array.
  static HWY_INLINE void store_key_pair(float* out, VF row0, VF row1) {
    hn::Store(row0, kF, out);
    hn::Store(row1, kF, out + kPanel);
  }
  // One key row of a panel, for products that sum over queries.
  static HWY_INLINE void store_panel_row(float* out, VF v0, VF v1) {
    hn::Store(v0, kF, out);
    hn::Store(v1, kF, out + kLanes);
  }
};

#if ANNULUS_BF16_DOT
struct MultiplyBf16 {
  using Element = std::uint32_t;
  static constexpr int kPack = 2;
  static constexpr int kExpDegree = 4;
  static constexpr Element kOne = kTwoOnes;
  static HWY_INLINE VF load(const std::uint32_t* b) {
    return VF{_mm512_castsi512_ps(_mm512_load_si512(b))};
  }
  static HWY_INLINE VF broadcast_multiply_add(const std::uint32_t* a, VF b, VF acc) {
    const __m512i broadcast = _mm512_set1_epi32(static_cast<int>(*a));
    return VF{_mm512_dpbf16_ps(acc.raw, (__m512bh)broadcast, (__m512bh)_mm512_castps_si512(b.raw))};
  }
  // The halves of a pair come from two key rows: interleave them lane by lane.
  static HWY_INLINE void store_key_pair(std::uint32_t* out, VF row0, VF row1) {
    const auto joined = (__m512i)_mm512_cvtne2ps_pbh(row1.raw, row0.raw);
    _mm512_store_si512(out, _mm512_permutexvar_epi16(interleave_index(), joined));
  }
  // The halves of a pair are neighbouring queries: already in place.
  static HWY_INLINE void store_panel_row(std::uint32_t* out, VF v0, VF v1) {
    _mm512_store_si512(out, (__m512i)_mm512_cvtne2ps_pbh(v1.raw, v0.raw));
  }
  // 0, 16, 1, 17, ...: merges the two halves of a vector of 32 words.
  static HWY_INLINE __m512i interleave_index() {
    const __m512i low = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    return _mm512_or_si512(low,
                           _mm512_slli_epi32(_mm512_add_epi32(low, _mm512_set1_epi32(16)), 16));
  }
};
#endif

// acc[i][j] += A[i * kRowStep] (broadcast) x B[j], vectors from kV0 on.
template <class M, int kV0, int kRowStep>
HWY_INLINE void multiply_step(VF (&acc)[kRows][kVectors], const typename M::Element* a,
                              const typename M::Element* b) {
  VF bv[kVectors];
  ANNULUS_UNROLL(2)
  for (int j = kV0; j < kVectors; ++j) {
    bv[j] = M::load(b + j * kLanes);
    if (kRows <= 4 || M::kPack == 2) bv[j] = pin(bv[j]);
  }
  ANNULUS_UNROLL(8)
  for (int i = 0; i < kRows; ++i) {
    ANNULUS_UNROLL(2)
    for (int j = kV0; j < kVectors; ++j)
      acc[i][j] = M::broadcast_multiply_add(a + i * kRowStep, bv[j], acc[i][j]);
  }
}

// `steps` steps; A advances by kStepA elements, B by kStepB.
template <class M, int kV0, int kRowStep, int kStepA, int kStepB>
HWY_INLINE void multiply(VF (&acc)[kRows][kVectors], const typename M::Element* a,
                         const typename M::Element* b, int steps) {
  int s = 0;
  ANNULUS_UNROLL(1)
  for (; s + 4 <= steps; s += 4) {
    ANNULUS_UNROLL(4)
    for (int u = 0; u < 4; ++u)
      multiply_step<M, kV0, kRowStep>(acc, a + u * kStepA, b + u * kStepB);
    a += 4 * kStepA;
    b += 4 * kStepB;
  }
  ANNULUS_UNROLL(1)
  for (; s < steps; ++s) {
    multiply_step<M, kV0, kRowStep>(acc, a, b);
    a += kStepA;
    b += kStepB;
  }
}

template <int kV0>
HWY_INLINE void fill_tile(VF (&acc)[kRows][kVectors], const float* row) {
  ANNULUS_UNROLL(8)
  for (int i = 0; i < kRows; ++i) {
    ANNULUS_UNROLL(2)
    for (int j = kV0; j < kVectors; ++j)
      acc[i][j] = row == nullptr ? hn::Zero(kF) : hn::Load(kF, row + j * kLanes);
  }
}

template <int kV0, int kStride>
HWY_INLINE void store_tile(const VF (&acc)[kRows][kVectors], float* out) {
  ANNULUS_UNROLL(8)
  for (int i = 0; i < kRows; ++i) {
    ANNULUS_UNROLL(2)
    for (int j = kV0; j < kVectors; ++j) hn::Store(acc[i][j], kF, out + i * kStride + j * kLanes);
  }
}

// out += tile. Every block starts its sums from zero and adds them here once. Rounding errors then
// grow with the square roots of the block length and of the number of blocks, not of the row
// length.
template <int kStride>
HWY_INLINE void add_tile(const VF (&acc)[kRows][kVectors], float* out) {
  ANNULUS_UNROLL(8)
  for (int i = 0; i < kRows; ++i) {
    ANNULUS_UNROLL(2)
    for (int j = 0; j < kVectors; ++j) {
      float* at = out + i * kStride + j * kLanes;
      hn::Store(hn::Add(acc[i][j], hn::Load(kF, at)), kF, at);
    }
  }
}

// KeyLimits of queries, lane by lane.
struct LaneLimits {
  const std::int32_t* before;
  const std::int32_t* last;

  [[nodiscard]] LaneLimits operator+(int lanes) const { return {before + lanes, last + lanes}; }
};

// Lanes whose query sees the key of this index.
HWY_INLINE auto visible(const LaneLimits& queries, std::int32_t key_index) {
  return hn::RebindMask(kF, hn::And(hn::Gt(hn::Load(kI, queries.last), hn::Set(kI, key_index - 1)),
                                    hn::Gt(hn::Set(kI, key_index), hn::Load(kI, queries.before))));
}

// acc + a (broadcast) x b in the lanes that see the keys of a: one key, or the two of a pair (a
// lane may see both, either or none, because keys need not ascend). Keys that a lane does not see
// are left out, not multiplied by 0.
template <class M, class Mask>
HWY_INLINE VF multiply_add_visible(const typename M::Element* a, VF b, Mask first, Mask last,
                                   VF acc) {
  const VF both = hn::IfThenElse(hn::And(first, last), M::broadcast_multiply_add(a, b, acc), acc);
  if constexpr (M::kPack == 1) {
    return both;
  } else {
    const typename M::Element low = *a & 0xffffU;
    const typename M::Element high = *a & 0xffff0000U;
    const VF one =
        hn::IfThenElse(hn::AndNot(last, first), M::broadcast_multiply_add(&low, b, acc), both);
    return hn::IfThenElse(hn::AndNot(first, last), M::broadcast_multiply_add(&high, b, acc), one);
  }
}

// out[d][query] += sum over keys of rows[key][d] x weights[key][query], kRows values of d at a
// time: O in forward, dQ in backward. Steps [begin, first_end) are for both vectors of the panel,
// [first_end, end) only for the second.
template <class M, int kLd>
HWY_NOINLINE void add_weighted_rows(const typename M::Element* rows,
                                    const typename M::Element* weights, int begin, int first_end,
                                    int end, float* out) {
  VF acc[kRows][kVectors];
  fill_tile<0>(acc, nullptr);
  multiply<M, 0, 1, kLd, kPanel>(acc, rows + begin * kLd, weights + begin * kPanel,
                                 first_end - begin);
  if (end > first_end) {
    multiply<M, 1, 1, kLd, kPanel>(acc, rows + first_end * kLd, weights + first_end * kPanel,
                                   end - first_end);
  }
  add_tile<kPanel>(acc, out);
}

// The same sum for rows with Inf or NaN: a masked weight is 0, and 0 x Inf would make queries NaN
// that do not see the key. Slow; keeps the order and grouping of the fast path, so that finite
// results have the same bits.
template <class M, int kLd>
HWY_NOINLINE void add_visible_rows(const typename M::Element* rows,
                                   const typename M::Element* weights, const std::int32_t* keys,
                                   int key_begin, int key_end, const LaneLimits& queries,
                                   int head_dim, float* out) {
  for (int d = 0; d < head_dim; ++d) {
    for (int j = 0; j < kPanel; j += kLanes) {
      VF acc = hn::Zero(kF);
      for (int i = key_begin; i < key_end; i += M::kPack) {
        const VF w = M::load(weights + i / M::kPack * kPanel + j);
        const auto first = visible(queries + j, keys[i]);
        const auto last = visible(queries + j, keys[i + M::kPack - 1]);
        acc = multiply_add_visible<M>(rows + i / M::kPack * kLd + d, w, first, last, acc);
      }
      float* at = out + d * kPanel + j;
      hn::Store(hn::Add(acc, hn::Load(kF, at)), kF, at);
    }
  }
}

}  // namespace annulus::cpu::ANNULUS_ISA
