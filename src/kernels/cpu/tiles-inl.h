// The tiles of AMX: eight registers of 16 rows x 64 bytes and one product, or an emulation in plain
// AVX-512 with the same bits, for CPUs without tiles. Included once per instruction set, after
// pack-inl.h; ANNULUS_AMX_TILES says whether tiles are real.
//
// What decides speed (Emerald Rapids, 2.8 GHz, one thread): - a product takes 16 cycles, dependent
// or not; loading a tile 9 from L1 and 21 from L2; storing one 16. Tiles and AVX-512 share their
// ports: weaving them hides latency and no work. - where the core's other hyperthread is busy, the
// number of tiles in use decides: 25.8 ns a product with all eight, 12.4 with four. So kernels take
// two sums, one A and one B. A tile is in use from its first write until it is cleared, even if it
// is no longer needed. - clearing a tile right before a product costs 50 cycles; long before, less
// than loading zeros.

namespace annulus::cpu::ANNULUS_ISA {

constexpr int kTileRows = 16;
constexpr int kTileRowBytes = 64;
constexpr int kTileBytes = kTileRows * kTileRowBytes;

// Tiles are usable on this thread while this object lives, and are clear at first. Tile products
// always treat subnormal numbers as zero. AVX-512 does so as well while this object lives, because
// subnormal weights would be slow (microcode).
class Tiles {
 public:
  Tiles() : flags_(_mm_getcsr()) {
    constexpr unsigned kFlushToZero = 0x8000;
    constexpr unsigned kDenormalsAreZero = 0x0040;
    _mm_setcsr(flags_ | kFlushToZero | kDenormalsAreZero);
    configure();
  }
  ~Tiles() {
    release();
    _mm_setcsr(flags_);
  }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;

  // Row i of the tile is the 64 bytes at from + i * stride.
  template <int kTile>
  HWY_INLINE void load(const void* from, std::int64_t stride = kTileRowBytes);
  template <int kTile>
  HWY_INLINE void store(void* to, std::int64_t stride = kTileRowBytes) const;
  // sum[i][j] (fp32) += sum over d of a[i][d] * b[d][j], 32 bf16 a row of `a`; row d / 2 of `b` has
  // the pairs (b[d][j], b[d + 1][j]) of its 16 columns. Even and odd d are summed by themselves
  // from zero, then added up and to `sum`.
  template <int kSum, int kA, int kB>
  HWY_INLINE void multiply_add();
  template <int kTile>
  HWY_INLINE void clear();

 private:
  HWY_INLINE void configure();
  HWY_INLINE void release();

  unsigned flags_;
#if !ANNULUS_AMX_TILES
  alignas(64) float tiles_[8][kTileRows][kLanes];
#endif
};

#if ANNULUS_AMX_TILES

// Own asm: GCC's _tile_loadd has no memory clobber, and stores of a tile's rows may move past it.
void Tiles::configure() {
  struct alignas(64) {
    std::uint8_t palette = 1;
    std::uint8_t start_row = 0;
    std::uint8_t reserved[14] = {};
    std::uint16_t row_bytes[16] = {};
    std::uint8_t rows[16] = {};
  } shape;
  for (int i = 0; i < 8; ++i) {
    shape.row_bytes[i] = kTileRowBytes;
    shape.rows[i] = kTileRows;
  }
  asm volatile("ldtilecfg %0" : : "m"(shape));
}
void Tiles::release() { asm volatile("tilerelease" : :); }
template <int kTile>
void Tiles::load(const void* from, std::int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(kTile) : "memory");
}
template <int kTile>
void Tiles::store(void* to, std::int64_t stride) const {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(kTile) : "memory");
}
template <int kSum, int kA, int kB>
void Tiles::multiply_add() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSum), "i"(kA), "i"(kB));
}

template <int kTile>
void Tiles::clear() {
  asm volatile("tilezero %%tmm%c0" : : "i"(kTile));
}

#else

void Tiles::configure() { std::memset(tiles_, 0, sizeof(tiles_)); }
void Tiles::release() {}
template <int kTile>
void Tiles::load(const void* from, std::int64_t stride) {
  for (int i = 0; i < kTileRows; ++i)
    std::memcpy(tiles_[kTile][i], static_cast<const std::byte*>(from) + i * stride, kTileRowBytes);
}
template <int kTile>
void Tiles::store(void* to, std::int64_t stride) const {
  for (int i = 0; i < kTileRows; ++i)
    std::memcpy(static_cast<std::byte*>(to) + i * stride, tiles_[kTile][i], kTileRowBytes);
}
template <int kSum, int kA, int kB>
void Tiles::multiply_add() {
  const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000U));
  for (int i = 0; i < kTileRows; ++i) {
    __m512 even = _mm512_setzero_ps();
    __m512 odd = _mm512_setzero_ps();
    for (int d = 0; d < kLanes; ++d) {
      const __m512i a = _mm512_castps_si512(_mm512_set1_ps(tiles_[kA][i][d]));
      const __m512i b = _mm512_castps_si512(_mm512_load_ps(tiles_[kB][d]));
      even = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(a, 16)),
                             _mm512_castsi512_ps(_mm512_slli_epi32(b, 16)), even);
      odd = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(a, high)),
                            _mm512_castsi512_ps(_mm512_and_si512(b, high)), odd);
    }
    float* const sum = tiles_[kSum][i];
    _mm512_store_ps(sum, _mm512_add_ps(_mm512_load_ps(sum), _mm512_add_ps(even, odd)));
  }
}
template <int kTile>
void Tiles::clear() {
  std::memset(tiles_[kTile], 0, sizeof(tiles_[kTile]));
}

#endif

#if !ANNULUS_AMX_TILES
HWY_INLINE __m256i round_to_bf16(__m512 x) {
  // The instruction always treats subnormal numbers as zero.
  constexpr int kZeroOrSubnormal = 0x26;
  const __mmask16 tiny = _mm512_fpclass_ps_mask(x, kZeroOrSubnormal);
  const __m512i sign = _mm512_set1_epi32(static_cast<int>(0x80000000U));
  __m512i bits = _mm512_castps_si512(x);
  bits = _mm512_mask_and_epi32(bits, tiny, bits, sign);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));  // NaN stays NaN
  const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(
      _mm512_srli_epi32(_mm512_mask_mov_epi32(rounded, is_nan, quiet), 16));
}
#endif

// 32 floats as bf16, `low` first; to the nearest, ties to even.
HWY_INLINE __m512i to_bf16(__m512 low, __m512 high) {
#if ANNULUS_AMX_TILES
  return (__m512i)_mm512_cvtne2ps_pbh(high, low);
#else
  return _mm512_inserti64x4(_mm512_castsi256_si512(round_to_bf16(low)), round_to_bf16(high), 1);
#endif
}

// 2^x by a polynomial of degree 4 (2.9e-6 relative, 2^0 is 1): enough for weights that are rounded
// to bf16. It needs only the fraction of x, because scalef rounds down; that is two instructions
// fewer than exp2_vector. 2^-inf is 0, 2^NaN is NaN.
struct Exp2Factors {
  static constexpr float k4 = 0.013425154611468315F;
  static constexpr float k3 = 0.05224537476897240F;
  static constexpr float k2 = 0.24127855896949768F;
  static constexpr float k1 = 0.69304513931274414F;
};
HWY_INLINE __m512 exp2_fraction(__m512 x, __m512 k4, __m512 k3, __m512 k2, __m512 k1, __m512 one) {
  constexpr int kFromFloor = 9;
  const __m512 f = _mm512_reduce_ps(x, kFromFloor);
  __m512 p = _mm512_fmadd_ps(f, k4, k3);
  p = _mm512_fmadd_ps(p, f, k2);
  p = _mm512_fmadd_ps(p, f, k1);
  return _mm512_fmadd_ps(p, f, one);
}
// Keeps a constant in a register; GCC would load it again in every basic block.
HWY_INLINE __m512 pinned(float x) { return pin(VF{_mm512_set1_ps(x)}).raw; }

// Runs `rounds` rounds of tile products and returns their FLOPs; see peak-inl.h.
inline double tile_rate(std::int64_t rounds, float* sink) {
  alignas(64) float row[kLanes];
  std::fill_n(row, kLanes, 0.0F);
  Tiles tiles;
  tiles.load<0>(row, 0);
  tiles.load<1>(row, 0);
  tiles.load<2>(row, 0);
  tiles.load<3>(row, 0);
  for (std::int64_t i = 0; i < rounds; ++i) {
    tiles.multiply_add<0, 2, 3>();
    tiles.multiply_add<1, 2, 3>();
  }
  tiles.store<0>(row, 0);
  *sink += row[0];
  return static_cast<double>(rounds) * 2 * kTileRows * kLanes * 2 * kTileRowBytes / 2;
}

}  // namespace annulus::cpu::ANNULUS_ISA
