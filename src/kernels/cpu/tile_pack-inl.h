// Key rows as tiles: K as the B side of Q K^T and V as the B side of P V. Packing is also the
// gather of a dilated branch. Included after tiles-inl.h.
//
// A block of kPackBlock keys is 8 chunks of 32. With D the head dim, padded to 32:
//   K  [chunk][D / 32][2 tiles of 16 keys]: row i of a tile has dims 2i and 2i + 1 of its keys
//   V  [D / 32][chunk][2 tiles of 16 dims]: row i of a tile has keys 2i and 2i + 1 of its dims
// so that either product runs through memory in one direction.

namespace annulus::cpu::ANNULUS_ISA {

constexpr int kChunk = 32;  // keys, and queries of a panel
constexpr int kChunks = kPackBlock / kChunk;
constexpr int kPairBytes = 2 * kTileBytes;  // two adjacent tiles: the unit of all lists

// 16-bit dims [d, d + 32) of a row, with zeros past head_dim, where the tensor may end.
HWY_INLINE __m512i row_words(const std::byte* row, int d, int head_dim) {
  const auto* from = reinterpret_cast<const std::uint16_t*>(row) + d;
  if (HWY_LIKELY(head_dim - d >= 32)) return _mm512_loadu_si512(from);
  return _mm512_maskz_loadu_epi16((__mmask32{1} << (head_dim - d)) - 1, from);
}
HWY_INLINE __m512i row_words(const RowStream::Ref& ref, int channel, int d, int head_dim) {
  if (ref.run == nullptr) return _mm512_setzero_si512();
  return row_words(ref.at(channel), d, head_dim);
}
// The words that are Inf or NaN in bf16.
HWY_INLINE __mmask32 not_finite(__m512i words) {
  const __m512i exponent = _mm512_set1_epi16(0x7f80);
  return _mm512_cmpeq_epi16_mask(_mm512_and_si512(words, exponent), exponent);
}

// Words 0, 32, 1, 33, ... of two concatenated rows.
HWY_INLINE __m512i low_pairs() {
  const __m512i i = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  return _mm512_or_si512(i, _mm512_slli_epi32(_mm512_add_epi32(i, _mm512_set1_epi32(32)), 16));
}
// The same from 16 on.
HWY_INLINE __m512i high_pairs() { return _mm512_add_epi16(low_pairs(), _mm512_set1_epi16(16)); }

// Side B of products over dims, of one chunk: [D / 32][2 tiles of 16 rows]; row i of a tile has
// dims 2i and 2i + 1 of its rows.
inline void pack_columns(const RowStream::Ref* refs, int channel, int dims, int head_dim,
                         std::byte* to) {
  for (int half = 0; half < 2; ++half) {
    for (int d = 0; d < dims; ++d) {
      __m512 r[16];
      ANNULUS_UNROLL(16)
      for (int i = 0; i < 16; ++i)
        r[i] = _mm512_castsi512_ps(row_words(refs[half * 16 + i], channel, d * 32, head_dim));
      transpose_words(r);
      std::byte* const tile = to + d * kPairBytes + half * kTileBytes;
      ANNULUS_UNROLL(16)
      for (int i = 0; i < 16; ++i) _mm512_store_ps(tile + i * kTileRowBytes, r[i]);
    }
  }
}

// Facts about the keys of a chunk.
struct PackedChunk {
  std::int32_t min_index;  // kMaskedIndex: no rows
  std::int32_t max_index;  // kMaskedIndex: some places are empty
  // Whether some values are not finite. Tiles have zeros instead of these: a masked weight is 0,
  // and 0 x Inf would make rows NaN that do not see the key.
  bool poisoned;
};

// A view of packed keys.
class PackedBlocks {
 public:
  PackedBlocks(const PackedKeys& keys, int head_dim)
      : head_dim_(head_dim),
        dims_((head_dim + 31) / 32),
        memory_(keys.memory),
        index_(reinterpret_cast<std::int32_t*>(memory_ + blocks(keys.rows) * 2 * side())),
        chunks_(reinterpret_cast<PackedChunk*>(index_ + blocks(keys.rows) * kPackBlock)) {}

  static std::int64_t blocks(std::int64_t rows) { return (rows + kPackBlock - 1) / kPackBlock; }
  static std::int64_t bytes(std::int64_t rows, int head_dim) {
    const std::int64_t dims = (head_dim + 31) / 32;
    constexpr std::int64_t kFacts =
        kPackBlock * sizeof(std::int32_t) + kChunks * sizeof(PackedChunk);
    return (blocks(rows) * (2 * kChunks * dims * kPairBytes + kFacts) + 63) / 64 * 64;
  }

  [[nodiscard]] std::byte* keys(std::int64_t block) const { return memory_ + block * 2 * side(); }
  [[nodiscard]] std::byte* values(std::int64_t block) const { return keys(block) + side(); }
  // kMaskedIndex if a place is empty.
  [[nodiscard]] std::int32_t* index(std::int64_t block) const {
    return index_ + block * kPackBlock;
  }
  [[nodiscard]] PackedChunk& chunk(std::int64_t block, int c) const {
    return chunks_[block * kChunks + c];
  }

  void pack(std::int64_t block, const RowStream::Ref* refs) const {
    for (int c = 0; c < kChunks; ++c) {
      const RowStream::Ref* const rows = refs + c * kChunk;
      std::int32_t* const to = index(block) + c * kChunk;
      PackedChunk& facts = chunk(block, c);
      facts = {kMaskedIndex, 0, false};
      for (int i = 0; i < kChunk; ++i) {
        to[i] = rows[i].run == nullptr ? kMaskedIndex : rows[i].index();
        facts.min_index = std::min(facts.min_index, to[i]);
        facts.max_index = std::max(facts.max_index, to[i]);
      }
      if (facts.min_index == kMaskedIndex) continue;  // never read
      pack_columns(rows, kKey, dims_, head_dim_, keys(block) + c * dims_ * kPairBytes);
      facts.poisoned = !pack_values(rows, values(block) + c * kPairBytes);
    }
  }

 private:
  [[nodiscard]] std::int64_t side() const {
    return static_cast<std::int64_t>(kChunks) * dims_ * kPairBytes;
  }

  // Returns whether all are finite.
  bool pack_values(const RowStream::Ref* refs, std::byte* to) const {
    const __m512i low = low_pairs();
    const __m512i high = high_pairs();
    __mmask32 poison = 0;
    for (int i = 0; i < kChunk; i += 2) {
      for (int d = 0; d < dims_; ++d) {
        __m512i x = row_words(refs[i], kValue, d * 32, head_dim_);
        __m512i y = row_words(refs[i + 1], kValue, d * 32, head_dim_);
        const __mmask32 bad_x = not_finite(x);
        const __mmask32 bad_y = not_finite(y);
        poison |= bad_x | bad_y;
        x = _mm512_maskz_mov_epi16(~bad_x, x);
        y = _mm512_maskz_mov_epi16(~bad_y, y);
        std::byte* const at = to + d * kChunks * kPairBytes + i / 2 * kTileRowBytes;
        _mm512_store_si512(at, _mm512_permutex2var_epi16(x, low, y));
        _mm512_store_si512(at + kTileBytes, _mm512_permutex2var_epi16(x, high, y));
      }
    }
    return poison == 0;
  }

  int head_dim_;
  int dims_;  // head dim / 32, rounded up
  std::byte* memory_;
  std::int32_t* index_;
  PackedChunk* chunks_;
};

inline void pack_tiles(const Problem& problem, const PackTask& task) {
  const KeyPlaces places(task.keys, task.canonical);
  const PackedBlocks blocks(task.to, problem.head_dim);
  const std::size_t row_bytes = static_cast<std::size_t>(problem.head_dim) * sizeof(std::uint16_t);
  RowStream::Ref refs[2][kPackBlock];
  const auto fetch = [&](std::int64_t first) {
    if (first >= task.end) return;
    RowStream::Ref* const next = refs[first / kPackBlock % 2];
    places.fill(first, next);
    for (int i = 0; i < kPackBlock; ++i) {  // each strided row is on a page of its own
      if (next[i].run == nullptr) continue;
      prefetch_row(next[i].at(kKey), row_bytes);
      prefetch_row(next[i].at(kValue), row_bytes);
    }
  };
  fetch(task.begin);
  for (std::int64_t first = task.begin; first < task.end; first += kPackBlock) {
    fetch(first + kPackBlock);
    blocks.pack(first / kPackBlock, refs[first / kPackBlock % 2]);
  }
}

}  // namespace annulus::cpu::ANNULUS_ISA
