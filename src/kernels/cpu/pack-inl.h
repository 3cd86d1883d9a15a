// Rows in and out of scratch: widening, padding, transposing. Packing is also the gather of a
// dilated branch: rows may be anywhere. See simd-inl.h for how this file is included.

namespace annulus::cpu::ANNULUS_ISA {

// Any head dim is computed as a multiple of 8 (scores) or of 32 (rows in scratch): packing pads
// with zeros, and only the head's elements are stored.
constexpr int padded_dim(int head_dim) { return (head_dim + 31) / 32 * 32; }
// The head dim of score tiles: a multiple of kRows / 2 Elements.
HWY_INLINE int score_dim_of(int head_dim) { return (head_dim + 7) / 8 * 8; }
static_assert(8 % kRows == 0);

// The distance between packed rows of head dims without a specialised kernel is the smallest of
// these that holds them, packed_dim(). They are 32 larger than a power of two, because rows a power
// of two apart share few cache sets.
constexpr int kMediumHeadDim = 256;
constexpr int kRowPadding = 32;
constexpr int packed_dim(int most) { return most + kRowPadding; }

// Allocates scratch in multiples of 64 bytes. Throws if a task needs more than there is: the next
// bytes are another thread's scratch.
class Scratch {
 public:
  explicit Scratch(std::span<std::byte> bytes) : left_(bytes) {}
  template <typename T>
  T* take(std::size_t count) {
    const std::size_t bytes = (count * sizeof(T) + 63) / 64 * 64;
    if (HWY_UNLIKELY(bytes > left_.size())) throw_scratch_exhausted(bytes, left_.size());
    T* out = reinterpret_cast<T*>(left_.data());
    left_ = left_.subspan(bytes);
    return out;
  }

 private:
  std::span<std::byte> left_;
};

// Highway's packaged scalar conversions of fp16 truncate and ignore Inf and NaN, so scalar code
// uses ours.
#if HWY_TARGET == HWY_SCALAR || HWY_TARGET == HWY_EMU128
constexpr bool kVectorHalf = false;
#else
constexpr bool kVectorHalf = true;
#endif

// out[0, padded) = row * factor, zeros past head_dim. Adds row * 0 to `poison`, which stays 0 iff
// every element is finite.
HWY_INLINE void load_row(DType dtype, const std::byte* row, float factor, float* out, int head_dim,
                         int padded, VF& poison) {
  const VF f = hn::Set(kF, factor);
  int d = 0;
  if (dtype == DType::f32) {
    const auto* in = reinterpret_cast<const float*>(row);
    for (; d + kLanes <= head_dim; d += kLanes) {
      const VF x = hn::LoadU(kF, in + d);
      poison = hn::MulAdd(x, hn::Zero(kF), poison);
      hn::Store(hn::Mul(x, f), kF, out + d);
    }
    for (; d < head_dim; ++d) {
      poison = hn::MulAdd(hn::Set(kF, in[d]), hn::Zero(kF), poison);
      out[d] = in[d] * factor;
    }
  } else {
    const auto* in = reinterpret_cast<const std::uint16_t*>(row);
    const hn::Rebind<std::uint16_t, DF> d16;
    const hn::RebindToUnsigned<DF> d32;
    for (; (kVectorHalf || dtype == DType::bf16) && d + kLanes <= head_dim; d += kLanes) {
      const auto bits = hn::LoadU(d16, in + d);
      const VF x = dtype == DType::bf16
                       ? hn::BitCast(kF, hn::ShiftLeft<16>(hn::PromoteTo(d32, bits)))
                       : hn::PromoteTo(kF, hn::BitCast(hn::Rebind<hwy::float16_t, DF>(), bits));
      poison = hn::MulAdd(x, hn::Zero(kF), poison);
      hn::Store(hn::Mul(x, f), kF, out + d);
    }
    for (; d < head_dim; ++d) {
      const float x = dtype == DType::bf16 ? bf16_to_float(in[d]) : f16_to_float(in[d]);
      poison = hn::MulAdd(hn::Set(kF, x), hn::Zero(kF), poison);
      out[d] = x * factor;
    }
  }
  for (; d < padded; ++d) out[d] = 0.0F;
}

HWY_INLINE bool is_clean(VF poison) { return hn::AllTrue(kF, hn::Eq(poison, hn::Zero(kF))); }

inline void store_row(DType dtype, const float* row, float factor, std::byte* out, int head_dim) {
  const VF f = hn::Set(kF, factor);
  int d = 0;
  if (dtype == DType::f32) {
    auto* to = reinterpret_cast<float*>(out);
    for (; d + kLanes <= head_dim; d += kLanes)
      hn::StoreU(hn::Mul(f, hn::LoadU(kF, row + d)), kF, to + d);
    for (; d < head_dim; ++d) to[d] = row[d] * factor;
    return;
  }
  auto* to = reinterpret_cast<std::uint16_t*>(out);
  if (dtype == DType::f16) {
    const hn::Rebind<hwy::float16_t, DF> d16;
    const hn::Rebind<std::uint16_t, DF> d16u;
    for (; kVectorHalf && d + kLanes <= head_dim; d += kLanes) {
      hn::StoreU(hn::BitCast(d16u, hn::DemoteTo(d16, hn::Mul(f, hn::LoadU(kF, row + d)))), d16u,
                 to + d);
    }
    for (; d < head_dim; ++d) to[d] = float_to_f16(row[d] * factor);
    return;
  }
  for (; d < head_dim; ++d) to[d] = float_to_bf16(row[d] * factor);  // vectorised by the compiler
}

// sum of a[d] * b[d]; two rows of one dtype. The order of the sum depends only on head_dim.
inline float dot_rows(DType dtype, const std::byte* a, const std::byte* b, int head_dim) {
  HWY_ALIGN float wide_a[kMaxHeadDim];
  HWY_ALIGN float wide_b[kMaxHeadDim];
  const int padded = (head_dim + kLanes - 1) / kLanes * kLanes;
  VF ignored = hn::Zero(kF);
  load_row(dtype, a, 1.0F, wide_a, head_dim, padded, ignored);
  load_row(dtype, b, 1.0F, wide_b, head_dim, padded, ignored);
  VF sum = hn::Zero(kF);
  for (int d = 0; d < padded; d += kLanes)
    sum = hn::MulAdd(hn::Load(kF, wide_a + d), hn::Load(kF, wide_b + d), sum);
  return hn::GetLane(hn::SumOfLanes(kF, sum));
}

#if HWY_TARGET <= HWY_AVX3
// Word c of r[i] becomes word i of r[c].
HWY_INLINE void transpose_words(__m512 (&r)[16]) {
  __m512 t[16];
  ANNULUS_UNROLL(8)
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]);
  }
  ANNULUS_UNROLL(4)
  for (int i = 0; i < 4; ++i) {
    const __m512d a = _mm512_castps_pd(t[4 * i]);
    const __m512d b = _mm512_castps_pd(t[4 * i + 1]);
    const __m512d c = _mm512_castps_pd(t[4 * i + 2]);
    const __m512d d = _mm512_castps_pd(t[4 * i + 3]);
    r[4 * i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c));
    r[4 * i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
    r[4 * i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d));
    r[4 * i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
  }
  // r[4i + j], 128-bit lane L: column 4L + j of rows 4i..4i+3. Transpose the 4 x 4 matrix of lanes
  // for each j.
  ANNULUS_UNROLL(4)
  for (int j = 0; j < 4; ++j) {
    const __m512 a = _mm512_shuffle_f32x4(r[j], r[4 + j], 0x88);
    const __m512 b = _mm512_shuffle_f32x4(r[8 + j], r[12 + j], 0x88);
    const __m512 c = _mm512_shuffle_f32x4(r[j], r[4 + j], 0xdd);
    const __m512 d = _mm512_shuffle_f32x4(r[8 + j], r[12 + j], 0xdd);
    t[j] = _mm512_shuffle_f32x4(a, b, 0x88);
    t[8 + j] = _mm512_shuffle_f32x4(a, b, 0xdd);
    t[4 + j] = _mm512_shuffle_f32x4(c, d, 0x88);
    t[12 + j] = _mm512_shuffle_f32x4(c, d, 0xdd);
  }
  ANNULUS_UNROLL(16)
  for (int i = 0; i < 16; ++i) r[i] = t[i];
}
#endif

// out[c][r] = in[r][c] for kLanes x kLanes words.
template <typename Word>
HWY_INLINE void transpose_block(const Word* in, int in_stride, Word* out, int out_stride) {
#if HWY_TARGET <= HWY_AVX3
  __m512 r[16];
  ANNULUS_UNROLL(16)
  for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_ps(in + i * in_stride);
  transpose_words(r);
  ANNULUS_UNROLL(16)
  for (int i = 0; i < 16; ++i) _mm512_storeu_ps(out + i * out_stride, r[i]);
#else
  for (int r = 0; r < kLanes; ++r) {
    for (int c = 0; c < kLanes; ++c) out[c * out_stride + r] = in[r * in_stride + c];
  }
#endif
}

// One panel of rows (kPanel x words) to columns (words x kPanel) and back; `words` is rounded up to
// whole blocks.
template <typename Word>
HWY_INLINE void rows_to_panel(const Word* rows, int row_stride, int words, Word* panel) {
  for (int j = 0; j < kPanel; j += kLanes) {
    for (int c = 0; c < words; c += kLanes) {
      transpose_block(rows + j * row_stride + c, row_stride, panel + c * kPanel + j, kPanel);
    }
  }
}
template <typename Word>
HWY_INLINE void panel_to_rows(const Word* panel, int words, Word* rows, int row_stride) {
  for (int j = 0; j < kPanel; j += kLanes) {
    for (int c = 0; c < words; c += kLanes) {
      transpose_block(panel + c * kPanel + j, kPanel, rows + j * row_stride + c, row_stride);
    }
  }
}

// Packs rows for products over head_dim (row form: [rows][kLd / kPack]) and over rows (pair form:
// [rows / kPack][kLd]). For fp32 both are the same array. Null rows and those from `count` to
// `padded` are zero.
// Returns whether every element is finite.
template <class M, int kLd>
struct Packer;

template <int kLd>
struct Packer<MultiplyF32, kLd> {
  static bool pack(DType dtype, const RowStream::Ref* refs, int channel, int count, int padded,
                   float factor, int head_dim, int padded_dim, float* rows,
                   float* /*pairs: the same*/) {
    VF poison = hn::Zero(kF);
    for (int i = 0; i < count; ++i) {
      if (HWY_UNLIKELY(refs[i].run == nullptr)) {
        std::memset(rows + i * kLd, 0, sizeof(float) * static_cast<std::size_t>(padded_dim));
        continue;
      }
      load_row(dtype, refs[i].at(channel), factor, rows + i * kLd, head_dim, padded_dim, poison);
    }
    std::memset(rows + count * kLd, 0,
                sizeof(float) * static_cast<std::size_t>((padded - count) * kLd));
    return is_clean(poison);
  }
};

#if ANNULUS_BF16_DOT
template <int kLd>
struct Packer<MultiplyBf16, kLd> {
  // bf16 stays bf16, `factor` is 1. Either destination may be null.
  static bool pack(DType /*bf16*/, const RowStream::Ref* refs, int channel, int count, int padded,
                   float /*factor*/, int head_dim, int padded_dim, std::uint32_t* rows,
                   std::uint32_t* pairs) {
    const __m512i exponent = _mm512_set1_epi16(0x7f80);
    const __m512i index = MultiplyBf16::interleave_index();
    __mmask32 poison = 0;
    for (int i = 0; i < padded; i += 2) {
      for (int d = 0; d < padded_dim; d += 32) {
        // Whole vectors only within the row: its end may be the end of the tensor.
        const __mmask32 keep =
            head_dim - d >= 32 ? ~__mmask32{0} : (__mmask32{1} << (head_dim - d)) - 1;
        const auto load = [&](int row) HWY_ATTR {
          return row < count && refs[row].run != nullptr
                     ? _mm512_maskz_loadu_epi16(keep, word(refs[row], channel, d))
                     : _mm512_setzero_si512();
        };
        const __m512i x = load(i);
        const __m512i y = load(i + 1);
        poison |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(x, exponent), exponent) |
                  _mm512_cmpeq_epi16_mask(_mm512_and_si512(y, exponent), exponent);
        if (rows != nullptr) {
          _mm512_store_si512(rows + (i * kLd + d) / 2, x);
          _mm512_store_si512(rows + ((i + 1) * kLd + d) / 2, y);
        }
        if (pairs != nullptr) {
          std::uint32_t* to = pairs + i / 2 * kLd + d;
          const __m512i low = _mm512_inserti64x4(x, _mm512_castsi512_si256(y), 1);
          const __m512i high = _mm512_shuffle_i64x2(x, y, 0xee);
          _mm512_store_si512(to, _mm512_permutexvar_epi16(index, low));
          _mm512_store_si512(to + 16, _mm512_permutexvar_epi16(index, high));
        }
      }
    }
    return poison == 0;
  }

 private:
  static HWY_INLINE const std::uint16_t* word(const RowStream::Ref& ref, int channel, int d) {
    return reinterpret_cast<const std::uint16_t*>(ref.at(channel)) + d;
  }
};
#endif

HWY_INLINE void prefetch_row(const std::byte* row, std::size_t bytes) {
  for (std::size_t b = 0; b < bytes; b += 64) __builtin_prefetch(row + b, 0, 2);
}

HWY_INLINE void prefetch_row_to_write(std::byte* row, std::size_t bytes) {
  for (std::size_t b = 0; b < bytes; b += 64) __builtin_prefetch(row + b, 1, 3);
}

}  // namespace annulus::cpu::ANNULUS_ISA
