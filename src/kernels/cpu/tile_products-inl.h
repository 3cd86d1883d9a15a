// Products of lists of pairs of tiles. Included after tile_pack-inl.h.

namespace annulus::cpu::ANNULUS_ISA {

// The 2 x 2 tiles of a sum: the second pair of rows is `down` from the first, the second pair of
// columns `right`, and rows are `stride` apart.
struct TileSum {
  std::byte* at;
  std::int64_t down;
  std::int64_t right;
  std::int64_t stride;
};
// The layout of lists of pairs of tiles.
HWY_INLINE TileSum listed(std::byte* at) { return {at, kPairBytes, kTileBytes, kTileRowBytes}; }
// The layout of rows of 32 floats.
HWY_INLINE TileSum plain(float* at) {
  constexpr std::int64_t kRowBytes = kChunk * sizeof(float);
  return {reinterpret_cast<std::byte*>(at), kTileRows * kRowBytes, kTileRowBytes, kRowBytes};
}

// Initial values of sums: zero, because tiles of sums are clear between products ...
struct FromZero {
  static constexpr bool kReadsSum = false;
  template <int kFirst>
  HWY_INLINE void load(Tiles&, const TileSum&, int) const {}
};
// ... every row from the 32 floats at `row` ...
struct FromRow {
  static constexpr bool kReadsSum = false;
  const float* row;
  template <int kFirst>
  HWY_INLINE void load(Tiles& tiles, const TileSum&, int half) const {
    tiles.load<kFirst>(row + half * kLanes, 0);
    tiles.load<kFirst + 1>(row + half * kLanes, 0);
  }
};
// ... or the present value of the sum.
struct FromSum {
  static constexpr bool kReadsSum = true;
  template <int kFirst>
  HWY_INLINE void load(Tiles& tiles, const TileSum& sum, int half) const {
    tiles.load<kFirst>(sum.at + half * sum.right, sum.stride);
    tiles.load<kFirst + 1>(sum.at + half * sum.right + sum.down, sum.stride);
  }
};
alignas(64) inline constexpr auto kOnesRow = [] {
  std::array<std::uint32_t, kLanes> row{};
  row.fill(kTwoOnes);
  return row;
}();

// Which pairs of tiles are multiplied: all, or those in a list.
struct InOrder {
  HWY_INLINE std::int64_t operator()(int step) const { return step; }
};
struct Listed {
  const int* list;
  HWY_INLINE std::int64_t operator()(int step) const { return list[step]; }
};

// Interleaved work: a part after every product, and a part that must run before the sums are
// overwritten.
struct NothingBeside {
  HWY_INLINE void some() const {}
  HWY_INLINE void make_room() const {}
};

// One half of the columns of multiply_tiles, summed in tiles kFirst and kFirst + 1.
template <int kFirst, class Start, class Order, class Beside>
HWY_INLINE void multiply_half(Tiles& tiles, Start start, const std::byte* a, const std::byte* b,
                              Order order, int steps, TileSum sum, int half, Beside& beside) {
  start.template load<kFirst>(tiles, sum, half);
  for (int s = 0; s < steps; ++s) {
    const std::byte* const from_a = a + order(s) * kPairBytes;
    tiles.load<3>(b + order(s) * kPairBytes + half * kTileBytes);
    tiles.load<2>(from_a);
    tiles.multiply_add<kFirst, 2, 3>();
    beside.some();
    tiles.load<2>(from_a + kTileBytes);
    tiles.multiply_add<kFirst + 1, 2, 3>();
    beside.some();
  }
  if constexpr (!Start::kReadsSum) beside.make_room();
  tiles.store<kFirst>(sum.at + half * sum.right, sum.stride);
  tiles.store<kFirst + 1>(sum.at + half * sum.right + sum.down, sum.stride);
  tiles.clear<kFirst>();
  tiles.clear<kFirst + 1>();
}

// sum = start + A x B over `steps` pairs of tiles on either side. Two sums at a time. The two
// halves alternate between tiles that were cleared long before: see tiles-inl.h.
template <class Start, class Order, class Beside>
HWY_INLINE void multiply_tiles(Tiles& tiles, Start start, const std::byte* a, const std::byte* b,
                               Order order, int steps, TileSum sum, Beside& beside) {
  multiply_half<0>(tiles, start, a, b, order, steps, sum, 0, beside);
  multiply_half<4>(tiles, start, a, b, order, steps, sum, 1, beside);
}
template <class Start, class Order>
HWY_INLINE void multiply_tiles(Tiles& tiles, Start start, const std::byte* a, const std::byte* b,
                               Order order, int steps, TileSum sum) {
  NothingBeside nothing;
  multiply_tiles(tiles, start, a, b, order, steps, sum, nothing);
}

// The first column of `sum`, [32][16], += the sums of the rows of A. Interleaving it with other
// work makes forward 1 to 3 % slower.
HWY_INLINE void add_rows(Tiles& tiles, const std::byte* a, int steps, float* sum) {
  tiles.load<0>(sum);
  tiles.load<1>(sum + kTileRows * kLanes);
  tiles.load<3>(kOnesRow.data(), 0);
  for (int s = 0; s < steps; ++s) {
    tiles.load<2>(a + s * kPairBytes);
    tiles.multiply_add<0, 2, 3>();
    tiles.load<2>(a + s * kPairBytes + kTileBytes);
    tiles.multiply_add<1, 2, 3>();
  }
  tiles.store<0>(sum);
  tiles.store<1>(sum + kTileRows * kLanes);
  tiles.clear<0>();
  tiles.clear<1>();
}

// sum += A x B over the listed steps, for rows with Inf or NaN and pairs that are not allowed:
// their weights are 0, and 0 times Inf is not 0. Slow; finite results have the same bits as on
// tiles. visible(step, row, d, half): the columns of that half for which term d of a row counts.
template <class Visible>
HWY_NOINLINE void multiply_visible(const std::byte* a, const std::byte* b, const int* list,
                                   int steps, TileSum sum, const Visible& visible) {
  const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000U));
  for (int row = 0; row < kChunk; ++row) {
    for (int half = 0; half < 2; ++half) {
      auto* const out = reinterpret_cast<float*>(sum.at + half * sum.right + row / 16 * sum.down +
                                                 row % 16 * sum.stride);
      for (int s = 0; s < steps; ++s) {
        const auto* const from_a =
            reinterpret_cast<const std::int32_t*>(a + list[s] * kPairBytes + row * kTileRowBytes);
        const std::byte* const from_b = b + list[s] * kPairBytes + half * kTileBytes;
        __m512 even = _mm512_setzero_ps();
        __m512 odd = _mm512_setzero_ps();
        for (int d = 0; d < kLanes; ++d) {
          const __m512i x = _mm512_set1_epi32(from_a[d]);
          const __m512i y = _mm512_load_si512(from_b + d * kTileRowBytes);
          even = _mm512_mask3_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(x, 16)),
                                       _mm512_castsi512_ps(_mm512_slli_epi32(y, 16)), even,
                                       visible(list[s], row, 2 * d, half));
          odd = _mm512_mask3_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(x, high)),
                                      _mm512_castsi512_ps(_mm512_and_si512(y, high)), odd,
                                      visible(list[s], row, 2 * d + 1, half));
        }
        _mm512_store_ps(out, _mm512_add_ps(_mm512_load_ps(out), _mm512_add_ps(even, odd)));
      }
    }
  }
}

}  // namespace annulus::cpu::ANNULUS_ISA
