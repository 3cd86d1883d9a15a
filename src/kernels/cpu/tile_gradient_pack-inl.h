// Packs rows of one chunk into tiles for backward, as lists of pairs of tiles: 32 columns are two
// tiles of 16. Included after tile_pack-inl.h. Empty places are zeros. Inf and NaN are kept: see
// multiply_visible.

namespace annulus::cpu::ANNULUS_ISA {

// Side A of products over dims: [D / 32][2 tiles of 16 rows]. Returns whether all are finite.
inline bool pack_rows(const RowStream::Ref* refs, int channel, int dims, int head_dim,
                      std::byte* to) {
  __mmask32 poison = 0;
  for (int i = 0; i < kChunk; ++i) {
    for (int d = 0; d < dims; ++d) {
      const __m512i words = row_words(refs[i], channel, d * 32, head_dim);
      poison |= not_finite(words);
      _mm512_store_si512(to + d * kPairBytes + i * kTileRowBytes, words);
    }
  }
  return poison == 0;
}

// Side B of products over rows: [D / 32][2 tiles of 16 dims], `step` bytes from 32 dims to the
// next; row i of a tile has rows 2i and 2i + 1 of the chunk. Returns whether all are finite.
inline bool pack_pairs(const RowStream::Ref* refs, int channel, int dims, int head_dim,
                       std::int64_t step, std::byte* to) {
  const __m512i low = low_pairs();
  const __m512i high = high_pairs();
  __mmask32 poison = 0;
  for (int i = 0; i < kChunk; i += 2) {
    for (int d = 0; d < dims; ++d) {
      const __m512i x = row_words(refs[i], channel, d * 32, head_dim);
      const __m512i y = row_words(refs[i + 1], channel, d * 32, head_dim);
      poison |= not_finite(x) | not_finite(y);
      std::byte* const at = to + d * step + i / 2 * kTileRowBytes;
      _mm512_store_si512(at, _mm512_permutex2var_epi16(x, low, y));
      _mm512_store_si512(at + kTileBytes, _mm512_permutex2var_epi16(x, high, y));
    }
  }
  return poison == 0;
}

// Side A of products over rows: row i of a tile has dim i of all rows of the chunk. [D / 32][2
// tiles of 16 dims], `step` bytes from 32 dims to the next.
inline void pack_transposed(const RowStream::Ref* refs, int channel, int dims, int head_dim,
                            std::int64_t step, std::byte* to) {
  pack_pairs(refs, channel, dims, head_dim, step, to);
  for (int d = 0; d < dims; ++d) {
    for (int half = 0; half < 2; ++half) {
      auto* const tile = reinterpret_cast<float*>(to + d * step + half * kTileBytes);
      transpose_block(tile, kLanes, tile, kLanes);
    }
  }
}

}  // namespace annulus::cpu::ANNULUS_ISA
