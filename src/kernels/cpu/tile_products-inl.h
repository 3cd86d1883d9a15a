// Products of lists of pairs of tiles. Behind tile_pack-inl.h.

namespace annulus::cpu::ANNULUS_ISA {

// The 2 x 2 tiles of a sum: the second pair of rows is `down` from the first, the second pair of
// columns `right`, and rows are `stride` apart.
struct TileSum {
  std::byte* at;
  std::int64_t down;
  std::int64_t right;
  std::int64_t stride;
};
// As lists of pairs of tiles have it.
HWY_INLINE TileSum listed(std::byte* at) { return {at, kPairBytes, kTileBytes, kTileRowBytes}; }
// Rows of 32 floats.
HWY_INLINE TileSum plain(float* at) {
  constexpr std::int64_t kRowBytes = kChunk * sizeof(float);
  return {reinterpret_cast<std::byte*>(at), kTileRows * kRowBytes, kTileRowBytes, kRowBytes};
}

// What sums start from: every row from the 32 floats at `row` ...
struct FromRow {
  static constexpr bool kReadsSum = false;
  const float* row;
  HWY_INLINE void load(Tiles& tiles, const TileSum&, int half) const {
    tiles.load<0>(row + half * kLanes, 0);
    tiles.load<1>(row + half * kLanes, 0);
  }
};
// ... or from what is there.
struct FromSum {
  static constexpr bool kReadsSum = true;
  HWY_INLINE void load(Tiles& tiles, const TileSum& sum, int half) const {
    tiles.load<0>(sum.at + half * sum.right, sum.stride);
    tiles.load<1>(sum.at + half * sum.right + sum.down, sum.stride);
  }
};
alignas(64) inline constexpr float kZeroRow[kChunk] = {};
// Pairs of 1 in bf16.
alignas(64) inline constexpr auto kOnesRow = [] {
  std::array<std::uint32_t, kLanes> row{};
  row.fill(0x3f803f80);
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

// Other work: some after every product, and what has to be done before sums that were not read are
// overwritten.
struct NothingBeside {
  HWY_INLINE void some() const {}
  HWY_INLINE void make_room() const {}
};

// sum = start + A x B over `steps` pairs of tiles on either side. Two sums at a time: see
// tiles-inl.h.
template <class Start, class Order, class Beside>
HWY_INLINE void multiply_tiles(Tiles& tiles, Start start, const std::byte* a, const std::byte* b,
                               Order order, int steps, TileSum sum, Beside& beside) {
  for (int half = 0; half < 2; ++half) {
    start.load(tiles, sum, half);
    for (int s = 0; s < steps; ++s) {
      const std::byte* const from_a = a + order(s) * kPairBytes;
      tiles.load<3>(b + order(s) * kPairBytes + half * kTileBytes);
      tiles.load<2>(from_a);
      tiles.multiply_add<0, 2, 3>();
      beside.some();
      tiles.load<2>(from_a + kTileBytes);
      tiles.multiply_add<1, 2, 3>();
      beside.some();
    }
    if constexpr (!Start::kReadsSum) beside.make_room();
    tiles.store<0>(sum.at + half * sum.right, sum.stride);
    tiles.store<1>(sum.at + half * sum.right + sum.down, sum.stride);
  }
}
template <class Start, class Order>
HWY_INLINE void multiply_tiles(Tiles& tiles, Start start, const std::byte* a, const std::byte* b,
                               Order order, int steps, TileSum sum) {
  NothingBeside nothing;
  multiply_tiles(tiles, start, a, b, order, steps, sum, nothing);
}

// Every column of `sum`, two tiles, += the sums of the rows of A. With other work beside it is 1 to
// 3 % of a forward slower.
HWY_INLINE void add_rows(Tiles& tiles, const std::byte* a, int steps, std::byte* sum) {
  tiles.load<0>(sum);
  tiles.load<1>(sum + kTileBytes);
  tiles.load<3>(kOnesRow.data(), 0);
  for (int s = 0; s < steps; ++s) {
    tiles.load<2>(a + s * kPairBytes);
    tiles.multiply_add<0, 2, 3>();
    tiles.load<2>(a + s * kPairBytes + kTileBytes);
    tiles.multiply_add<1, 2, 3>();
  }
  tiles.store<0>(sum);
  tiles.store<1>(sum + kTileBytes);
}

// sum += A x B over the listed steps where Inf or NaN meets pairs that are not allowed: their
// weights are 0, and 0 times that is none. Slow; what nothing poisons gets the bits of tiles.
// visible(step, row, d, half): columns of that half for which term d of a row counts.
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
