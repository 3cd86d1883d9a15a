// Forward: queries in the SIMD lanes. S^T[k][q] = K[k][d] (broadcast) x Q^T[d][q], then O^T[d][q]
// += V[k][d] (broadcast) x P^T[k][q]. K and V need no transpose, and maximum and sum are lane-wise.
// A lane depends only on its own row, so results do not depend on how rows are grouped. See
// simd-inl.h for how this is included.
//
// There is no running maximum. Scores are taken relative to a reference per row: the maximum over
// its first tile of keys, or the log-sum-exp of a running state. fp32 holds 2^x for x in +-126 at
// full precision, so any reference within a factor 2^48 of the maximum is as good. The row sums
// show whether it was. If not, which is rare even for logits of standard deviation 9, the block is
// computed again with the exact maximum.
//
// If weights are rounded (to bf16), a row is divided by the sum of the rounded weights, so that
// their rounding cancels if few keys have all the weight. The log-sum-exp is that of the exact sum.

namespace annulus::cpu::ANNULUS_ISA {

// kLd: elements of a packed row. kFd: head_dim where it is known at compile time, else 0.
// kModified: there may be a softcap, dropout or both.
template <class M, int kLd, int kFd, bool kModified>
class Forward {
  using Element = typename M::Element;
  static constexpr int kRowElements = kLd / M::kPack;
  static constexpr int kTiles = kKeyBlock / kRows;

  // What tells keys of a tile apart.
  struct KeyMarks {
    const std::int32_t* repeats;   // where a key's class begins in Panel::repeats
    const std::uint32_t* dropout;  // their words (kModified)

    [[nodiscard]] KeyMarks operator+(int keys) const {
      return {repeats + keys, kModified ? dropout + keys : nullptr};
    }
  };

  using Panel = QueryPanel<M>;

  static constexpr bool kRoundsWeights = M::kPack == 2;
  // Sums of weights: exact, and rounded as they are multiplied with V.
  struct Sums {
    VF exact;
    VF rounded;
  };

  struct Block {
    const Element* k;           // row form
    const Element* v;           // pair form
    const std::int32_t* index;  // [rows], kMaskedIndex in the padding
    KeyMarks marks;             // [rows]
    TileKeys tiles[kTiles];
    std::int32_t first_key;
    std::int32_t last_key;
    int rows = 0;  // a multiple of kKeyAlign
    bool finite = true;
  };

 public:
  static void run(const Problem& problem, const ForwardTask& task,
                  std::span<std::byte> scratch_bytes) {
    Scratch scratch(scratch_bytes);
    Forward self(problem, task, scratch);
    std::int64_t keys = 0;
    for (const RowRun& run : task.keys) keys += run.count;
    RowStream stream(task.keys, 0, keys, {task.canonical, task.key_gap, kKeyBlock});
    // Each strided row is on a page of its own, so rows are prefetched early.
    const int first_keys = stream.take(kKeyBlock, self.key_refs_[0]);
    self.prefetch_keys(self.key_refs_[0], 0, first_keys);
    self.queries_.load(self.query_factor_);
    self.attend_keys(stream, first_keys);
    self.queries_.store();
  }

 private:
  Forward(const Problem& problem, const ForwardTask& task, Scratch& scratch)
      : problem_(problem),
        task_(task),
        padded_dim_(padded_dim(head_dim())),
        softcap_(problem),
        dropout_(problem.dropout, task.dropout),
        // fp32 folds scale and log2(e) into Q; bf16 must not round Q again and applies them to the
        // score.
        query_factor_(M::kPack == 1 ? problem.scale * kLog2E : 1.0F),
        score_factor_(softcap_.score_factor(M::kPack == 1 ? 1.0F : problem.scale * kLog2E)),
        queries_(problem, task, dropout_, scratch) {
    if constexpr (kModified) key_words_ = scratch.take<std::uint32_t>(kKeyBlock);
    key_refs_[0] = scratch.take<RowStream::Ref>(kKeyBlock);
    key_refs_[1] = scratch.take<RowStream::Ref>(kKeyBlock);
    key_index_ = scratch.take<std::int32_t>(kKeyBlock);
    key_repeats_ = scratch.take<std::int32_t>(kKeyBlock);
    k_ = scratch.take<Element>(static_cast<std::size_t>(kKeyBlock) * kLd);
    v_ = scratch.take<Element>(static_cast<std::size_t>(kKeyBlock) * kLd);
    p_ = scratch.take<Element>(static_cast<std::size_t>(kKeyBlock) * kPanel);
    s_ = scratch.take<float>(static_cast<std::size_t>(2 * kRows) * kPanel);
    block_sum_ = scratch.take<float>(kPanel);
    block_rounded_sum_ = kRoundsWeights ? scratch.take<float>(kPanel) : block_sum_;
    fresh_ = scratch.take<float>(kPanel);
  }

  [[nodiscard]] HWY_INLINE int head_dim() const { return kFd != 0 ? kFd : problem_.head_dim; }
  [[nodiscard]] HWY_INLINE int score_dim() const { return score_dim_of(head_dim()); }
  // The reference is added at the end. A sum that started with it would round at its magnitude in
  // every step.
  [[nodiscard]] HWY_INLINE VF weight_of(VF score, VF minus_reference) const {
    return exp2_vector<M::kExpDegree>(
        M::kPack == 1 ? hn::Add(score, minus_reference)
                      : hn::MulAdd(score, hn::Set(kF, score_factor_), minus_reference));
  }

  void prefetch_keys(const RowStream::Ref* refs, int begin, int end) const {
    const std::size_t row_bytes = static_cast<std::size_t>(head_dim()) * size_of(problem_.dtype);
    for (int i = begin; i < end; ++i) {
      if (refs[i].run == nullptr) continue;
      prefetch_row(refs[i].at(kKey), row_bytes);
      prefetch_row(refs[i].at(kValue), row_bytes);
    }
  }

  void attend_keys(RowStream& stream, int count) {
    for (int slot = 0; count > 0; slot ^= 1) {
      const Block block = pack_block(key_refs_[slot], count);
      const int next_count = stream.take(kKeyBlock, key_refs_[slot ^ 1]);
      for (int p = 0; p < queries_.count(); ++p) {
        // Prefetches the next block's rows to L2 while this one computes, a share per panel.
        prefetch_keys(key_refs_[slot ^ 1], next_count * p / queries_.count(),
                      next_count * (p + 1) / queries_.count());
        attend(queries_.panel(p), block);
      }
      count = next_count;
    }
  }

  Block pack_block(const RowStream::Ref* refs, int count) {
    Block block;
    block.rows = (count + kKeyAlign - 1) / kKeyAlign * kKeyAlign;
    block.finite = Packer<M, kLd>::pack(problem_.dtype, refs, kKey, count, block.rows, 1.0F,
                                        head_dim(), padded_dim_, k_, nullptr);
    block.finite &= Packer<M, kLd>::pack(problem_.dtype, refs, kValue, count, block.rows, 1.0F,
                                         head_dim(), padded_dim_, M::kPack == 1 ? v_ : nullptr, v_);
    block.k = k_;
    block.v = v_;
    block.index = key_index_;
    block.marks = {key_repeats_, key_words_};
    block.first_key = kMaskedIndex;
    block.last_key = -1;
    for (int i = 0; i < block.rows; ++i) {
      key_index_[i] = kMaskedIndex;
      key_repeats_[i] = 0;
      if (i >= count || refs[i].run == nullptr) continue;
      key_index_[i] = refs[i].index();
      key_repeats_[i] = repeat_class(task_.repeats, refs[i].index()) * kPanel;
      if constexpr (kModified) key_words_[i] = dropout_.rows().key(refs[i].index());
      block.first_key = std::min(block.first_key, key_index_[i]);
      block.last_key = std::max(block.last_key, key_index_[i]);
    }
    for (int t = 0; t * kRows < block.rows; ++t) block.tiles[t] = tile_keys(key_index_ + t * kRows);
    return block;
  }

  void attend(const Panel& panel, const Block& block) {
    if (block.first_key > panel.limits.max_last || block.last_key <= panel.limits.min_before)
      return;
    const Reach tiles = reach(panel.limits, block.tiles, block.rows / kRows);
    if (tiles.empty()) return;

    const auto weigh_block = [&](bool choose_reference) {
      return queries_.classes() > 0 ? weigh<true>(panel, block, tiles, choose_reference)
                                    : weigh<false>(panel, block, tiles, choose_reference);
    };
    const bool masked = weigh_block(true);
    if (!sums_fit(panel, block)) {
      HWY_ALIGN float rounds[kPanel];
      const bool round = move_reference(panel, block, tiles, rounds);
      if (M::kPack == 1 || !round) {
        weigh_block(false);
      } else if (queries_.classes() > 0) {
        weigh_rounded<true>(panel, block, tiles, rounds);
      } else {
        weigh_rounded<false>(panel, block, tiles, rounds);
      }
    }
    for (int j = 0; j < kPanel; j += kLanes) {
      const auto add = [&](float* to, const float* block_sum) {
        hn::Store(hn::Add(hn::Load(kF, to + j), hn::Load(kF, block_sum + j)), kF, to + j);
      };
      add(panel.sum, block_sum_);
      if constexpr (kRoundsWeights) add(panel.rounded_sum, block_rounded_sum_);
    }
    if (masked && !block.finite) {
      add_visible_rows<M, kLd>(block.v, p_, block.index, tiles.begin * kRows, tiles.end * kRows,
                               panel.keys, head_dim(), panel.o);
      return;
    }
    constexpr int kSteps = kRows / M::kPack;  // of a tile
    for (int d = 0; d < head_dim(); d += kRows) {
      add_weighted_rows<M, kLd>(block.v + d, p_, tiles.begin * kSteps, tiles.first_end * kSteps,
                                tiles.end * kSteps, panel.o + d * kPanel);
    }
  }

  void clear_block_sums() const {
    for (int j = 0; j < kPanel; j += kLanes) store_block_sums({hn::Zero(kF), hn::Zero(kF)}, j);
  }
  [[nodiscard]] HWY_INLINE Sums block_sums(int j) const {
    return {hn::Load(kF, block_sum_ + j), hn::Load(kF, block_rounded_sum_ + j)};
  }
  HWY_INLINE void store_block_sums(const Sums& sums, int j) const {
    hn::Store(sums.exact, kF, block_sum_ + j);
    if constexpr (kRoundsWeights) hn::Store(sums.rounded, kF, block_rounded_sum_ + j);
  }

  // P = 2^(S - reference) and its sums over the block. Returns whether any tile was masked. With
  // `choose_reference`, rows without keys so far take their reference from the first tile of which
  // they see a key. kRepeats: pairs may count more than once.
  template <bool kRepeats>
  bool weigh(const Panel& panel, const Block& block, const Reach& tiles, bool choose_reference) {
    clear_block_sums();
    if (choose_reference) find_fresh(panel);
    bool choosing = choose_reference;  // some rows may have seen no key before this tile
    bool masked = tiles.end > tiles.first_end;
    bool pending = false;  // the exponentials of the previous tile are not computed yet
    float* s = s_;
    float* previous = s_ + kRows * kPanel;
    const auto take_pending = [&](int t) {
      if (pending)
        take_weights<0, kRepeats>(panel, previous, block.marks + (t - 1) * kRows, weights(t - 1));
      pending = false;
    };
    for (int t = tiles.begin; t < tiles.first_end; ++t) {
      const Element* k = block.k + t * kRows * kRowElements;
      const bool all = panel.limits.see_all(block.tiles[t]);
      if (all && pending && !choosing) {
        score_tile_and_weights<kRepeats>(panel, k, s, previous, block.marks + (t - 1) * kRows,
                                         weights(t - 1));
        std::swap(s, previous);
      } else if (all) {
        take_pending(t);
        score_tile<0, false>(panel, k, nullptr, s);
        if (choosing) choosing = choose_references<0>(panel, block, t, s);
        pending = true;
        std::swap(s, previous);
      } else {
        take_pending(t);
        masked = true;
        score_tile<0, true>(panel, k, block.index + t * kRows, s);
        if (choosing) choosing = choose_references<0>(panel, block, t, s);
        take_weights<0, kRepeats>(panel, s, block.marks + t * kRows, weights(t));
      }
    }
    take_pending(tiles.first_end);
    for (int t = tiles.first_end; t < tiles.end; ++t) {
      score_tile<1, true>(panel, block.k + t * kRows * kRowElements, block.index + t * kRows, s);
      if (choosing) choosing = choose_references<1>(panel, block, t, s);
      take_weights<1, kRepeats>(panel, s, block.marks + t * kRows, weights(t));
    }
    return masked;
  }

  // Marks rows that have seen no key before this block.
  HWY_INLINE void find_fresh(const Panel& panel) const {
    for (int j = 0; j < kPanel; j += kLanes) {
      const auto fresh = hn::Eq(hn::Load(kF, panel.sum + j), hn::Zero(kF));
      hn::Store(hn::IfThenElseZero(fresh, hn::Set(kF, 1.0F)), kF, fresh_ + j);
    }
  }

  // Fresh rows that see keys of the tile take their highest score as reference. Returns whether
  // some fresh rows see keys of later tiles only.
  template <int kV0>
  HWY_INLINE bool choose_references(const Panel& panel, const Block& block, int tile,
                                    const float* s) const {
    for (int j = kV0 * kLanes; j < kPanel; j += kLanes) {
      VF highest = hn::Load(kF, s + j);
      for (int i = 1; i < kRows; ++i) highest = hn::Max(highest, hn::Load(kF, s + i * kPanel + j));
      const VF fresh = hn::Load(kF, fresh_ + j);
      const auto chosen =
          hn::And(hn::Ne(fresh, hn::Zero(kF)), hn::Gt(highest, hn::Set(kF, -INFINITY)));
      const VF old = hn::Load(kF, panel.minus_reference + j);
      hn::Store(hn::IfThenElse(chosen, hn::Neg(hn::Mul(highest, hn::Set(kF, score_factor_))), old),
                kF, panel.minus_reference + j);
      hn::Store(hn::IfThenElse(chosen, hn::Zero(kF), fresh), kF, fresh_ + j);
    }
    return block.tiles[tile].last <= panel.limits.max_before;
  }

  [[nodiscard]] HWY_INLINE Element* weights(int tile) const {
    return p_ + tile * kRows / M::kPack * kPanel;
  }

  template <int kV0, bool kMasked>
  HWY_NOINLINE void score_tile(const Panel& panel, const Element* k, const std::int32_t* key_index,
                               float* s) const {
    VF acc[kRows][kVectors];
    fill_tile<kV0>(acc, nullptr);
    multiply<M, kV0, kRowElements, 1, kPanel>(acc, k, panel.q, score_dim() / M::kPack);
    if constexpr (kModified) softcap_.template apply<kV0>(acc);
    if constexpr (kMasked) {
      ANNULUS_UNROLL(8)
      for (int i = 0; i < kRows; ++i) {
        ANNULUS_UNROLL(2)
        for (int j = kV0; j < kVectors; ++j) {
          acc[i][j] = hn::IfThenElse(visible(panel.keys + j * kLanes, key_index[i]), acc[i][j],
                                     hn::Set(kF, -INFINITY));
        }
      }
    }
    store_tile<kV0, kPanel>(acc, s);
  }

  // A score tile, interleaved with the exponentials of the previous tile to hide their latency
  // behind the products.
  template <bool kRepeats>
  HWY_NOINLINE void score_tile_and_weights(const Panel& panel, const Element* k, float* s,
                                           const float* previous, KeyMarks previous_keys,
                                           Element* p) const {
    VF acc[kRows][kVectors];
    fill_tile<0>(acc, nullptr);
    const Element* q = panel.q;
    Sums sums[kVectors];
    VF minus_reference[kVectors];
    for (int j = 0; j < kVectors; ++j) {
      sums[j] = block_sums(j * kLanes);
      minus_reference[j] = hn::Load(kF, panel.minus_reference + j * kLanes);
    }
    // kRows / 2 pairs of score rows, spread evenly over score_dim / kPack steps.
    const int steps = score_dim() / M::kPack / (kRows / 2);
    ANNULUS_UNROLL(1)
    for (int r = 0; r < kRows / 2; ++r) {
      ANNULUS_UNROLL(2)
      for (int j = 0; j < kVectors; ++j) {
        take_weight_pair<kRepeats>(panel, j * kLanes, previous, p, minus_reference[j],
                                   previous_keys, sums[j]);
        const int half_end = j == 0 ? steps / 2 : steps;
        if constexpr (kFd != 0) {
          ANNULUS_UNROLL(16)
          for (int u = j == 0 ? 0 : steps / 2; u < half_end; ++u) {
            multiply_step<M, 0, kRowElements>(acc, k + u, q + u * kPanel);
          }
        } else {
          for (int u = j == 0 ? 0 : steps / 2; u < half_end; ++u) {
            multiply_step<M, 0, kRowElements>(acc, k + u, q + u * kPanel);
          }
        }
      }
      k += steps;
      q += steps * kPanel;
      previous += 2 * kPanel;
      previous_keys = previous_keys + 2;
      p += 2 / M::kPack * kPanel;
    }
    for (int j = 0; j < kVectors; ++j) store_block_sums(sums[j], j * kLanes);
    if constexpr (kModified) softcap_.template apply<0>(acc);
    store_tile<0, kPanel>(acc, s);
  }

  // Of the lanes from `at` on; s and p are those of the whole panel.
  template <bool kRepeats>
  HWY_INLINE void take_weight_pair(const Panel& panel, int at, const float* s, Element* p,
                                   VF minus_reference, const KeyMarks& keys, Sums& sums) const {
    VF p0 = weight_of(hn::Load(kF, s + at), minus_reference);
    VF p1 = weight_of(hn::Load(kF, s + at + kPanel), minus_reference);
    if constexpr (kRepeats) {
      p0 = hn::Mul(p0, hn::Load(kF, panel.repeats + at + keys.repeats[0]));
      p1 = hn::Mul(p1, hn::Load(kF, panel.repeats + at + keys.repeats[1]));
    }
    store_weight_pair(panel, at, p, p0, p1, keys, sums);
  }

  // Dropped weights count in the sums.
  HWY_INLINE void store_weight_pair(const Panel& panel, int at, Element* p, VF p0, VF p1,
                                    const KeyMarks& keys, Sums& sums) const {
    sums.exact = hn::Add(hn::Add(sums.exact, p0), p1);
    M::store_key_pair(p + at, p0, p1);
    if constexpr (kRoundsWeights)
      sums.rounded = M::broadcast_multiply_add(&M::kOne, M::load(p + at), sums.rounded);
    if constexpr (kModified) {
      if (!dropout_.on()) return;
      M::store_key_pair(p + at, dropout_.keep(p0, panel.words + at, keys.dropout[0]),
                        dropout_.keep(p1, panel.words + at, keys.dropout[1]));
    }
  }

  template <int kV0, bool kRepeats>
  HWY_NOINLINE void take_weights(const Panel& panel, const float* s, KeyMarks keys,
                                 Element* p) const {
    for (int j = kV0; j < kVectors; ++j) {
      const VF minus_reference = hn::Load(kF, panel.minus_reference + j * kLanes);
      Sums sums = block_sums(j * kLanes);
      ANNULUS_UNROLL(4)
      for (int i = 0; i < kRows; i += 2) {
        take_weight_pair<kRepeats>(panel, j * kLanes, s + i * kPanel, p + i / M::kPack * kPanel,
                                   minus_reference, keys + i, sums);
      }
      store_block_sums(sums, j * kLanes);
    }
  }

  // The same tile by tile. Lanes that `rounds` marks round score x factor in the same way as their
  // reference: see move_reference. The other lanes get the same bits as otherwise.
  template <bool kRepeats>
  HWY_NOINLINE void weigh_rounded(const Panel& panel, const Block& block, const Reach& tiles,
                                  const float* rounds) {
    const VF factor = hn::Set(kF, score_factor_);
    clear_block_sums();
    for (int t = tiles.begin; t < tiles.end; ++t) {
      score_tile<0, true>(panel, block.k + t * kRows * kRowElements, block.index + t * kRows, s_);
      for (int j = 0; j < kPanel; j += kLanes) {
        const auto rounded = hn::Ne(hn::Load(kF, rounds + j), hn::Zero(kF));
        const VF minus_reference = hn::Load(kF, panel.minus_reference + j);
        Sums sums = block_sums(j);
        const auto weight = [&](int i) {
          const VF score = hn::Load(kF, s_ + i * kPanel + j);
          // Pinned, so that the compiler does not fuse the two operations.
          const VF by_product =
              exp2_vector<M::kExpDegree>(hn::Add(pin(hn::Mul(score, factor)), minus_reference));
          const VF w = hn::IfThenElse(rounded, by_product, weight_of(score, minus_reference));
          if constexpr (!kRepeats) return w;
          return hn::Mul(w, hn::Load(kF, panel.repeats + block.marks.repeats[t * kRows + i] + j));
        };
        for (int i = 0; i < kRows; i += 2) {
          const VF p0 = weight(i);
          const VF p1 = weight(i + 1);
          store_weight_pair(panel, j, weights(t) + i / M::kPack * kPanel, p0, p1,
                            block.marks + (t * kRows + i), sums);
        }
        store_block_sums(sums, j);
      }
    }
  }

  // Lanes with an unsuitable reference: too large a sum (or NaN), or too small a first one.
  [[nodiscard]] HWY_INLINE auto misfits(const Panel& panel, int j) const {
    const VF fresh = hn::Load(kF, block_sum_ + j);
    const VF old = hn::Load(kF, panel.sum + j);
    const auto small = hn::And(hn::Eq(old, hn::Zero(kF)), hn::Lt(fresh, hn::Set(kF, kSumTooSmall)));
    return hn::Or(hn::Not(hn::Lt(fresh, hn::Set(kF, kSumTooLarge))), small);
  }

  [[nodiscard]] bool sums_fit(const Panel& panel, const Block& block) const {
    for (int j = 0; j < kPanel; j += kLanes) {
      // Rows that see no key of the block have no sum.
      const auto seen = hn::RebindMask(
          kF, hn::And(hn::Gt(hn::Load(kI, panel.keys.last + j), hn::Set(kI, block.first_key - 1)),
                      hn::Gt(hn::Set(kI, block.last_key), hn::Load(kI, panel.keys.before + j))));
      if (!hn::AllFalse(kF, hn::And(misfits(panel, j), seen))) return false;
    }
    return true;
  }

  // Misfit lanes get their maximum over the block as reference, and their sums so far are rescaled.
  // Other lanes are unchanged, because their results must not depend on their neighbours.
  //
  // With bf16, a reference is score x factor, rounded, and a weight is 2^(score x factor -
  // reference) with an unrounded product. Beyond 2^24, the weight of the maximum therefore differs
  // from 1. From 2^31 on it may be 2^-149, which is flushed to 0: a row without keys. Marks such
  // lanes in `rounds` and returns whether there are any.
  HWY_NOINLINE bool move_reference(const Panel& panel, const Block& block, const Reach& tiles,
                                   float* rounds) {
    VF highest[kVectors];
    for (int j = 0; j < kVectors; ++j) highest[j] = hn::Set(kF, -INFINITY);
    for (int t = tiles.begin; t < tiles.end; ++t) {
      score_tile<0, true>(panel, block.k + t * kRows * kRowElements, block.index + t * kRows, s_);
      for (int i = 0; i < kRows; ++i) {
        for (int j = 0; j < kVectors; ++j) {
          const VF score = hn::Load(kF, s_ + i * kPanel + j * kLanes);
          highest[j] =
              hn::IfThenElse(hn::Gt(score, highest[j]), score, highest[j]);  // NaN is not greater
        }
      }
    }
    bool any_rounds = false;
    for (int j = 0; j < kVectors; ++j) {
      const int at = j * kLanes;
      const auto move = hn::And(misfits(panel, at), hn::Gt(highest[j], hn::Set(kF, -INFINITY)));
      const VF old = hn::Load(kF, panel.minus_reference + at);
      const VF moved =
          hn::IfThenElse(move, hn::Neg(hn::Mul(highest[j], hn::Set(kF, score_factor_))), old);
      const auto round = hn::And(move, hn::Ge(hn::Abs(moved), hn::Set(kF, 0x1p24F)));
      any_rounds = any_rounds || (M::kPack == 2 && !hn::AllFalse(kF, round));
      hn::Store(hn::IfThenElseZero(round, hn::Set(kF, 1.0F)), kF, rounds + at);
      const VF sum = hn::Load(kF, panel.sum + at);
      // A lane that keeps its reference, or has no keys yet, has nothing to rescale; 2^(moved -
      // old) might overflow.
      const auto rescale = hn::And(move, hn::Ne(sum, hn::Zero(kF)));
      const VF weight =
          hn::IfThenElse(rescale, exp2_vector(hn::Sub(moved, old)), hn::Set(kF, 1.0F));
      hn::Store(hn::Mul(sum, weight), kF, panel.sum + at);
      if constexpr (kRoundsWeights) {
        hn::Store(hn::Mul(hn::Load(kF, panel.rounded_sum + at), weight), kF,
                  panel.rounded_sum + at);
      }
      hn::Store(moved, kF, panel.minus_reference + at);
      for (int d = 0; d < head_dim(); ++d) {
        float* o = panel.o + d * kPanel + at;
        hn::Store(hn::Mul(hn::Load(kF, o), weight), kF, o);
      }
    }
    return any_rounds;
  }

  const Problem& problem_;
  const ForwardTask& task_;
  int padded_dim_;
  Softcap<M> softcap_;
  Dropout dropout_;
  float query_factor_;
  float score_factor_;
  QueryPanels<M, kLd, kFd, kModified> queries_;
  RowStream::Ref* key_refs_[2];
  std::int32_t* key_index_;
  std::int32_t* key_repeats_;
  std::uint32_t* key_words_ = nullptr;
  Element* k_;
  Element* v_;
  Element* p_;
  float* s_;
  float* block_sum_;
  float* block_rounded_sum_;
  float* fresh_;  // not 0: the row has seen no key yet
};

template <class M, bool kModified>
void forward_as(const Problem& problem, const ForwardTask& task, std::span<std::byte> scratch) {
  if constexpr (!kModified) {
    if (problem.head_dim == 64) return Forward<M, 64, 64, false>::run(problem, task, scratch);
    if (problem.head_dim == 128) return Forward<M, 128, 128, false>::run(problem, task, scratch);
  }
  if (problem.head_dim <= kMediumHeadDim)
    return Forward<M, packed_dim(kMediumHeadDim), 0, kModified>::run(problem, task, scratch);
  return Forward<M, packed_dim(kMaxHeadDim), 0, kModified>::run(problem, task, scratch);
}

template <class M>
void forward(const Problem& problem, const ForwardTask& task, std::span<std::byte> scratch) {
  if constexpr (!kOnlyGeneral) {
    if (!problem.caps_or_drops()) return forward_as<M, false>(problem, task, scratch);
  }
  return forward_as<M, true>(problem, task, scratch);
}

}  // namespace annulus::cpu::ANNULUS_ISA
