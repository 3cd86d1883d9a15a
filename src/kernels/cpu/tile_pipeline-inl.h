// The pipeline of tile_forward-inl.h: scores of a chunk (tiles), weights of the chunk before
// (AVX-512), P V of the item before or of the same (tiles). Some rows of weights are computed after
// every product (except those of add_rows), which hides their latency.

namespace annulus::cpu::ANNULUS_ISA {

struct TilePanel {
  const std::byte* q;  // tiles
  std::byte* o;        // tiles
  float* sum;          // [32][16]
  float* rounded_sum;  // [32][16]
  float* minus_reference;
  const float* rounds;
  const std::int32_t* before;  // KeyLimits of its rows
  const std::int32_t* last;
  const float* repeats;  // [32][16]
  std::int32_t min_before;
  std::int32_t max_before;
  std::int32_t min_last;
  std::int32_t max_last;
  std::uint32_t fresh;  // bit per row: no reference yet
  std::uint32_t moved;  // the reference is the exact maximum
  bool careful;         // computed again: some rows may round
  bool opened;          // q is packed
  bool done;
};

struct TileChunk {
  const std::int32_t* index;  // [32], of keys; kMaskedIndex: excluded
  const std::int32_t* classes;
  bool
      masked;  // some pairs are not allowed, or the chunk needs the careful path for another reason
};

struct TileItem {
  TilePanel* panel;
  const std::byte* k;  // of the block
  const std::byte* v;
  int first_chunk;
  int chunks;
  TileChunk chunk[kChunks];
};

// Scratch and constants of a task.
struct TileWork {
  float* scores;           // two chunks [32 queries][32 keys]
  std::uint16_t* weights;  // bf16, one item or two [chunk][32 queries][32 keys]
  int dims;                // head dim / 32, rounded up
  float score_factor;
};

// The keys of the chunk that row i of the panel sees.
HWY_INLINE __mmask32 visible_keys(const TilePanel& panel, const TileChunk& chunk, int i) {
  const __m512i before = _mm512_set1_epi32(panel.before[i]);
  const __m512i last = _mm512_set1_epi32(panel.last[i]);
  const auto seen = [&](const std::int32_t* index) HWY_ATTR {
    const __m512i keys = _mm512_loadu_si512(index);
    return _mm512_mask_cmpgt_epi32_mask(_mm512_cmple_epi32_mask(keys, last), keys, before);
  };
  return _mm512_kunpackw(seen(chunk.index + 16), seen(chunk.index));
}

// The largest score that row i sees; -inf: none. If one is NaN, it may be any of them.
inline float highest_visible(const TilePanel& panel, const TileChunk& chunk, const float* scores,
                             int i) {
  const __mmask32 keys = visible_keys(panel, chunk, i);
  const __m512 none = _mm512_set1_ps(-INFINITY);
  const __m512 low = _mm512_mask_loadu_ps(none, static_cast<__mmask16>(keys), scores + i * kChunk);
  const __m512 high =
      _mm512_mask_loadu_ps(none, static_cast<__mmask16>(keys >> 16), scores + i * kChunk + 16);
  return _mm512_reduce_max_ps(_mm512_max_ps(low, high));
}

// Rows without keys so far take their reference from the first chunk of which they see a key.
inline HWY_NOINLINE void choose_references(TilePanel& panel, const TileChunk& chunk,
                                           const float* scores, float score_factor) {
  for (int i = 0; i < kChunk; ++i) {
    const auto bit = std::uint32_t{1} << i;
    if ((panel.fresh & bit) == 0) continue;
    const float highest = highest_visible(panel, chunk, scores, i);
    if (!(highest > -INFINITY)) continue;
    panel.minus_reference[i] = -(highest * score_factor);
    panel.fresh &= ~bit;
  }
}

// Computes the weights of a row and their sum. Visible keys have the same bits on the masked path
// and on the other one.
template <bool kRepeats, bool kMasked, typename Fraction>
HWY_INLINE void weigh_row(const Fraction& fraction, __m512 x, __m512 y, __mmask32 keys,
                          const float* repeats, __m512i class_low, __m512i class_high, float* sum,
                          std::uint16_t* weights) {
  __m512 low;
  __m512 high;
  if constexpr (kMasked) {
    low = _mm512_maskz_scalef_ps(static_cast<__mmask16>(keys), fraction(x), x);
    high = _mm512_maskz_scalef_ps(static_cast<__mmask16>(keys >> 16), fraction(y), y);
  } else {
    low = _mm512_scalef_ps(fraction(x), x);
    high = _mm512_scalef_ps(fraction(y), y);
  }
  if constexpr (kRepeats) {
    const __m512 table = _mm512_load_ps(repeats);
    low = _mm512_mul_ps(low, _mm512_permutexvar_ps(class_low, table));
    high = _mm512_mul_ps(high, _mm512_permutexvar_ps(class_high, table));
  }
  _mm512_store_ps(sum, _mm512_add_ps(_mm512_load_ps(sum), _mm512_add_ps(low, high)));
  _mm512_store_si512(weights, to_bf16(low, high));
}

// The polynomial of 2^x for the fraction of x, with its constants in registers.
class Exp2Fraction {
 public:
  HWY_INLINE Exp2Fraction()
      : k4_(pinned(Exp2Factors::k4)),
        k3_(pinned(Exp2Factors::k3)),
        k2_(pinned(Exp2Factors::k2)),
        k1_(pinned(Exp2Factors::k1)),
        one_(pinned(1.0F)) {}
  HWY_INLINE __m512 operator()(__m512 x) const {
    return exp2_fraction(x, k4_, k3_, k2_, k1_, one_);
  }

 private:
  __m512 k4_;
  __m512 k3_;
  __m512 k2_;
  __m512 k1_;
  __m512 one_;
};

// Weights of all rows of a chunk in which some pairs are not allowed or some rows round.
template <bool kRepeats>
HWY_NOINLINE void weigh_masked_rows(const TilePanel& panel, const TileChunk& chunk,
                                    const float* scores, float score_factor,
                                    std::uint16_t* weights) {
  const Exp2Fraction fraction;
  const __m512 factor = _mm512_set1_ps(score_factor);
  __m512i class_low = _mm512_setzero_si512();
  __m512i class_high = class_low;
  if constexpr (kRepeats) {
    class_low = _mm512_loadu_si512(chunk.classes);
    class_high = _mm512_loadu_si512(chunk.classes + 16);
  }
  for (int i = 0; i < kChunk; ++i) {
    const __m512 reference = _mm512_set1_ps(panel.minus_reference[i]);
    const __m512 low = _mm512_load_ps(scores + i * kChunk);
    const __m512 high = _mm512_load_ps(scores + i * kChunk + 16);
    __m512 x = _mm512_fmadd_ps(low, factor, reference);
    __m512 y = _mm512_fmadd_ps(high, factor, reference);
    if (panel.rounds[i] != 0.0F) {
      x = _mm512_add_ps(pin(VF{_mm512_mul_ps(low, factor)}).raw, reference);
      y = _mm512_add_ps(pin(VF{_mm512_mul_ps(high, factor)}).raw, reference);
    }
    weigh_row<kRepeats, true>(fraction, x, y, visible_keys(panel, chunk, i),
                              panel.repeats + i * kLanes, class_low, class_high,
                              panel.sum + i * kLanes, weights + i * kChunk);
  }
}

// Scores of one chunk, to the first of work.scores.
inline HWY_NOINLINE void score_chunk(Tiles& tiles, const TileWork& work, const std::byte* q,
                                     const std::byte* k) {
  multiply_tiles(tiles, FromZero{}, q, k, InOrder{}, work.dims, plain(work.scores));
}

// A chunk whose scores are computed.
struct ScoredChunk {
  TilePanel* panel;
  const TileChunk* chunk;
  const float* scores;
  std::uint16_t* weights;
};

// Computes the weights of chunks, row by row, in the order in which their scores were stored. Used
// in one function only: GCC keeps its members in registers as long as only inlined functions take
// its address.
template <bool kRepeats>
class Weigher {
 public:
  HWY_INLINE Weigher(ScoredChunk* ring, float score_factor, int rows_at_a_time)
      : ring_(ring),
        rows_at_a_time_(rows_at_a_time),
        score_factor_(score_factor),
        factor_(pinned(score_factor)) {}

  [[nodiscard]] HWY_INLINE unsigned scored() const { return scored_; }
  HWY_INLINE void push(const ScoredChunk& chunk) { ring_[scored_++ % 2] = chunk; }
  // All rows of the first `upto` chunks.
  HWY_INLINE void finish(unsigned upto) {
    while (begun_ < upto || (begun_ == upto && row_ < kChunk)) some();
  }
  // The scores of a new chunk overwrite those of the chunk before the previous one.
  HWY_INLINE void make_room() {
    if (scored_ >= 2) finish(scored_ - 1);
  }

  HWY_INLINE void some() {
    if (row_ == kChunk) {
      if (begun_ == scored_) return;
      begin_chunk();
      if (HWY_UNLIKELY(row_ == kChunk)) return;
    }
    for (int i = 0; i < rows_at_a_time_; ++i) {
      const __m512 minus = _mm512_set1_ps(reference_[i]);
      const float* const s = scores_ + i * kChunk;
      weigh_row<kRepeats, false>(fraction_, _mm512_fmadd_ps(_mm512_load_ps(s), factor_, minus),
                                 _mm512_fmadd_ps(_mm512_load_ps(s + kLanes), factor_, minus), 0,
                                 kRepeats ? repeats_ + i * kLanes : nullptr, class_low_,
                                 class_high_, sum_ + i * kLanes, weights_ + i * kChunk);
    }
    row_ += rows_at_a_time_;
    scores_ += rows_at_a_time_ * kChunk;
    weights_ += rows_at_a_time_ * kChunk;
    sum_ += rows_at_a_time_ * kLanes;
    reference_ += rows_at_a_time_;
    if constexpr (kRepeats) repeats_ += rows_at_a_time_ * kLanes;
  }

 private:
  HWY_INLINE void begin_chunk() {
    const ScoredChunk& next = ring_[begun_++ % 2];
    if (HWY_UNLIKELY(next.panel->fresh != 0))
      choose_references(*next.panel, *next.chunk, next.scores, score_factor_);
    if (HWY_UNLIKELY(
            next.chunk->masked)) {  // rare: all rows at once, instead of a check for every row
      weigh_masked_rows<kRepeats>(*next.panel, *next.chunk, next.scores, score_factor_,
                                  next.weights);
      return;
    }
    row_ = 0;
    scores_ = next.scores;
    weights_ = next.weights;
    sum_ = next.panel->sum;
    reference_ = next.panel->minus_reference;
    if constexpr (kRepeats) {
      repeats_ = next.panel->repeats;
      class_low_ = _mm512_loadu_si512(next.chunk->classes);
      class_high_ = _mm512_loadu_si512(next.chunk->classes + kLanes);
    }
  }

  ScoredChunk* ring_;    // of two
  unsigned scored_ = 0;  // chunks whose scores are stored
  unsigned begun_ = 0;   // chunks whose weights are begun or done
  int row_ = kChunk;     // next row of the chunk begun last; the members below are its own
  int rows_at_a_time_;
  float score_factor_;
  const float* scores_ = nullptr;
  const float* reference_ = nullptr;
  const float* repeats_ = nullptr;
  float* sum_ = nullptr;
  std::uint16_t* weights_ = nullptr;
  __m512i class_low_ = _mm512_setzero_si512();
  __m512i class_high_ = _mm512_setzero_si512();
  __m512 factor_;
  Exp2Fraction fraction_;
};

// From this head dim on (in steps of 32), L1 limits the speed. Then an item's P V follows its own
// scores, so that L1 holds the weights of one item instead of two, and items are twice as long, so
// that O is loaded and stored half as often. On Emerald Rapids (16 threads) this is 7 to 14 %
// faster at D 128, but each of the two costs 3 to 5 % at D 64.
constexpr int kWideDims = 4;
constexpr int item_chunks(int dims) { return dims < kWideDims ? kChunks / 2 : kChunks; }

// kSteps: work.dims where it is known at compile time, else 0. Calls open(panel) before the first
// item of a panel.
template <int kSteps, bool kRepeats, typename Open>
HWY_NOINLINE void run_tile_pipeline(Tiles& tiles, const TileWork& work, const TileItem* items,
                                    int count, const Open& open) {
  const int dims = kSteps != 0 ? kSteps : work.dims;
  const int lag = dims < kWideDims ? 1 : 0;  // P V follows the scores by this many items
  ScoredChunk ring[2];
  // A chunk has 32 rows, interleaved with 8 x dims products or, without lag, with the 4 x dims of
  // its scores.
  Weigher<kRepeats> weigher(ring, work.score_factor, dims == 1 ? 4 : 2);
  for (int t = 0; t < count + lag; ++t) {
    const TileItem* const now = t < count ? items + t : nullptr;
    const TileItem* const due = t >= lag ? items + t - lag : nullptr;
    if (now != nullptr && (t == 0 || items[t - 1].panel != now->panel)) open(*now->panel);
    const auto weights = [&](int item) {
      return work.weights + item * lag % 2 * item_chunks(dims) * kChunk * kChunk;
    };
    const unsigned scored_before = weigher.scored();
    const int chunks = now != nullptr ? now->chunks : 1;
    int dim = 0;
    for (int c = 0; c < chunks; ++c) {
      if (now != nullptr) {
        float* const scores = work.scores + weigher.scored() % 2 * kChunk * kChunk;
        multiply_tiles(tiles, FromZero{}, now->panel->q,
                       now->k + (now->first_chunk + c) * dims * kPairBytes, InOrder{}, dims,
                       plain(scores), weigher);
        weigher.push({now->panel, &now->chunk[c], scores, weights(t) + c * kChunk * kChunk});
      }
      if (due == nullptr) continue;
      // With lag, a share of the previous item's P V after each chunk; without, all of this item's
      // after its last chunk.
      const int end = lag != 0 ? dims * (c + 1) / chunks : c + 1 == chunks ? dims : 0;
      for (; dim < end; ++dim) {
        const auto* const p = reinterpret_cast<const std::byte*>(weights(t - lag));
        if (dim == 0) {
          weigher.finish(lag != 0 ? scored_before : weigher.scored());
          add_rows(tiles, p, due->chunks, due->panel->rounded_sum);
        }
        multiply_tiles(tiles, FromSum{}, p,
                       due->v + (dim * kChunks + due->first_chunk) * kPairBytes, InOrder{},
                       due->chunks, listed(due->panel->o + dim * 2 * kPairBytes), weigher);
      }
    }
  }
}

}  // namespace annulus::cpu::ANNULUS_ISA
