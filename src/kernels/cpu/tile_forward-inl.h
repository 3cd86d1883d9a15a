// Forward on tiles: S = Q K^T and O += P V with queries in the rows of tiles, so that P, rounded to
// bf16, is directly the A side of the second product. Included after tile_pack-inl.h.
//
// A panel is 32 queries, a chunk 32 keys, an item some chunks of one block for one panel. All
// items of a task go through one pipeline (tile_pipeline-inl.h): scores of a chunk on tiles,
// weights of the chunk before by AVX-512, P V on tiles.
//
// As in forward-inl.h there is no running maximum: a row's reference is the maximum over the first
// chunk of which it sees a key, or the log-sum-exp of its running state. Sums only grow, so it is
// enough to check them at the end: panels with unsuitable references are computed again with the
// exact maxima of those rows. A row depends only on its own keys, chunk by chunk, not on how rows
// are grouped.
//
// A row is divided by the sum of its rounded weights, as in P V, so that their rounding cancels if
// few keys have all the weight. The log-sum-exp is that of the exact sum.

namespace annulus::cpu::ANNULUS_ISA {

// kSteps: head dim / 32 where it is known at compile time, else 0.
template <int kSteps>
class TileForward {
  // Keys of one round: K and V of 1,024 rows (512 KiB at head dim 128) stay in L2 for all panels.
  static constexpr int kRoundBlocks = 4;
  static constexpr int kRoundKeys = kRoundBlocks * kPackBlock;

 public:
  static void run(const Problem& problem, const ForwardTask& task,
                  std::span<std::byte> scratch_bytes) {
    TileForward self(problem, task, scratch_bytes);
    self.start_panels();
    {
      Tiles tiles;
      self.attend(tiles);
      if (self.move_references(tiles)) self.attend(tiles);
    }
    if (self.poisoned_) self.add_poison();
    self.store_output();
  }

 private:
  TileForward(const Problem& problem, const ForwardTask& task, std::span<std::byte> scratch_bytes)
      : problem_(problem),
        task_(task),
        dims_(kSteps != 0 ? kSteps : (problem.head_dim + 31) / 32),
        queries_(static_cast<int>(task.query_end - task.query_begin)),
        panel_count_((queries_ + kChunk - 1) / kChunk),
        score_factor_(problem.scale * kLog2E) {
    Scratch scratch(scratch_bytes);
    const auto rows = static_cast<std::size_t>(panel_count_ * kChunk);
    const auto panels = static_cast<std::size_t>(panel_count_);
    query_refs_ = scratch.take<RowStream::Ref>(rows);
    panels_ = scratch.take<TilePanel>(panels);
    q_ = scratch.take<std::byte>(panels * static_cast<std::size_t>(query_bytes()));
    o_ = scratch.take<std::byte>(panels * static_cast<std::size_t>(output_bytes()));
    sum_ = scratch.take<float>(rows * kLanes);
    rounded_sum_ = scratch.take<float>(rows * kLanes);
    minus_reference_ = scratch.take<float>(rows);
    rounds_ = scratch.take<float>(rows);
    query_before_ = scratch.take<std::int32_t>(rows);
    query_last_ = scratch.take<std::int32_t>(rows);
    repeats_ = scratch.take<float>(task.repeats.empty() ? 0 : rows * kLanes);
    key_refs_ = scratch.take<RowStream::Ref>(kPackBlock);
    key_index_ = scratch.take<std::int32_t>(kRoundKeys);
    key_class_ = scratch.take<std::int32_t>(task.repeats.empty() ? 0 : kRoundKeys);
    items_ = scratch.take<TileItem>(panels * kRoundBlocks * kChunks);
    work_.scores = scratch.take<float>(2 * kChunk * kChunk);
    work_.weights = scratch.take<std::uint16_t>(kChunk * kPackBlock);
    work_.dims = dims_;
    work_.score_factor = score_factor_;
    row_ = scratch.take<float>(kMaxHeadDim);
    packed_ = scratch.take<std::byte>(
        static_cast<std::size_t>(PackedBlocks::bytes(kRoundKeys, dims_ * 32)));
  }

  // Q: [D / 32][2 tiles of 16 queries]. O: [D / 32][2 tiles of 16 queries][2 tiles of 16 dims].
  [[nodiscard]] std::int64_t query_bytes() const { return std::int64_t{dims_} * kPairBytes; }
  [[nodiscard]] std::int64_t output_bytes() const { return std::int64_t{dims_} * 2 * kPairBytes; }
  // Dims [d, d + 16) of a row.
  [[nodiscard]] HWY_INLINE float* output(int row, int d) const {
    const int in_panel = row % kChunk;
    return reinterpret_cast<float*>(o_ + row / kChunk * output_bytes() +
                                    (d / 32 * 2 + in_panel / 16) * kPairBytes +
                                    d % 32 / 16 * kTileBytes + in_panel % 16 * kTileRowBytes);
  }
  [[nodiscard]] float total(int row) const {
    return _mm512_reduce_add_ps(_mm512_load_ps(sum_ + row * kLanes));
  }

  void start_panels() {
    RowStream stream(task_.queries, task_.query_begin, task_.query_end);
    stream.take(queries_, query_refs_);
    prefetch_queries(0);
    const std::size_t state_bytes = static_cast<std::size_t>(problem_.head_dim) * sizeof(float);
    for (int p = 0; p < panel_count_; ++p) {
      const int first = p * kChunk;
      const int count = std::min(kChunk, queries_ - first);
      if (task_.load_state) {
        for (int i = first + kChunk; i < std::min(queries_, first + 2 * kChunk); ++i)
          prefetch_row(query_refs_[i].at(kState), state_bytes);
      }
      TilePanel& panel = panels_[p];
      panel = {};
      panel.q = q_ + p * query_bytes();
      panel.o = o_ + p * output_bytes();
      panel.sum = sum_ + first * kLanes;
      panel.rounded_sum = rounded_sum_ + first * kLanes;
      panel.minus_reference = minus_reference_ + first;
      panel.rounds = rounds_ + first;
      panel.before = query_before_ + first;
      panel.last = query_last_ + first;
      panel.repeats = repeats_ + first * kLanes;
      panel.fresh = static_cast<std::uint32_t>((std::uint64_t{1} << count) - 1);
      for (int i = 0; i < kChunk; ++i) {
        // Rows past the end repeat the last index, so they do not affect what a panel skips.
        const std::int32_t index = query_refs_[first + std::min(i, count - 1)].index();
        const KeyLimits keys = key_limits(task_.band, index);
        query_before_[first + i] = keys.before;
        query_last_[first + i] = keys.last;
        rounds_[first + i] = 0.0F;
        minus_reference_[first + i] = 0.0F;
        if (!task_.repeats.empty()) {
          float* const weights = repeats_ + (first + i) * kLanes;
          repeat_weights(task_.repeats, index, weights, 1);
        }
        start_row(first + i, i < count);
      }
      panel.min_before = *std::min_element(panel.before, panel.before + kChunk);
      panel.max_before = *std::max_element(panel.before, panel.before + kChunk);
      panel.min_last = *std::min_element(panel.last, panel.last + kChunk);
      panel.max_last = *std::max_element(panel.last, panel.last + kChunk);
      min_before_ = p == 0 ? panel.min_before : std::min(min_before_, panel.min_before);
      max_last_ = p == 0 ? panel.max_last : std::max(max_last_, panel.max_last);
    }
  }

  // Q of a panel is packed right before its first product. The rows of the next panel are
  // prefetched during this panel's products and, in the last round, the rows of its output.
  // Prefetching the output rows of panels that see nothing in that round gains nothing.
  HWY_NOINLINE void open(TilePanel& panel) {
    const int first = static_cast<int>(&panel - panels_) * kChunk;
    const int end = std::min(queries_, first + kChunk);
    if (last_round_) {
      const std::size_t bytes =
          static_cast<std::size_t>(problem_.head_dim) * size_of(task_.out_dtype);
      for (int row = first; row < end; ++row)
        prefetch_row_to_write(query_refs_[row].at(kOut), bytes);
    }
    if (panel.opened) return;
    panel.opened = true;
    prefetch_queries(first + kChunk);
    std::byte* const to = q_ + first / kChunk * query_bytes();
    for (int row = first; row < first + kChunk; ++row) {
      for (int d = 0; d < dims_; ++d) {
        _mm512_store_si512(to + d * kPairBytes + (row - first) * kTileRowBytes,
                           row < end
                               ? row_words(query_refs_[row].at(kQuery), d * 32, problem_.head_dim)
                               : _mm512_setzero_si512());
      }
    }
  }
  void prefetch_queries(int first) const {
    const std::size_t bytes = static_cast<std::size_t>(problem_.head_dim) * sizeof(std::uint16_t);
    for (int row = first; row < std::min(queries_, first + kChunk); ++row)
      prefetch_row(query_refs_[row].at(kQuery), bytes);
  }

  // Initial sums of a row: those of its running state (O as it would be stored now, and its
  // log-sum-exp L: reference L and sum 1), or zero.
  void start_row(int row, bool exists) {
    TilePanel& panel = panels_[row / kChunk];
    const auto bit = std::uint32_t{1} << (row % kChunk);
    _mm512_store_ps(sum_ + row * kLanes, _mm512_setzero_ps());
    _mm512_store_ps(rounded_sum_ + row * kLanes, _mm512_setzero_ps());
    const float lse = exists && task_.load_state
                          ? *reinterpret_cast<const float*>(query_refs_[row].at(kLse))
                          : -INFINITY;
    if (lse == -INFINITY) return clear_output(row);  // the state is not initialised
    panel.fresh &= ~bit;
    const float own = -lse * kLog2E;
    float weight = 1.0F;
    if ((panel.moved & bit) == 0) {
      minus_reference_[row] = own;
    } else {
      weight = std::exp2(minus_reference_[row] - own);
    }
    sum_[row * kLanes] = weight;
    rounded_sum_[row * kLanes] = weight;
    const auto* state = reinterpret_cast<const float*>(query_refs_[row].at(kState));
    for (int d = 0; d < dims_ * 32; d += kLanes) {
      const int left = std::clamp(problem_.head_dim - d, 0, kLanes);
      const auto keep = static_cast<__mmask16>((1U << left) - 1);
      _mm512_store_ps(output(row, d), _mm512_mul_ps(_mm512_set1_ps(weight),
                                                    _mm512_maskz_loadu_ps(keep, state + d)));
    }
  }

  void clear_output(int row) const {
    for (int d = 0; d < dims_ * 32; d += kLanes)
      _mm512_store_ps(output(row, d), _mm512_setzero_ps());
  }

  // Calls use(blocks, first block, number of blocks) for all keys, kRoundBlocks blocks at a time.
  // Packs keys that are not packed yet.
  template <typename Use>
  void for_each_round(const Use& use) {
    const bool packed = task_.packed.memory != nullptr;
    const KeyPlaces places(task_.keys, task_.canonical);
    const PackedKeys own{packed_, kRoundKeys};
    const std::int64_t rows = packed ? task_.packed.rows : places.count();
    const PackedBlocks blocks(packed ? task_.packed : own, problem_.head_dim);
    for (std::int64_t first = 0; first < rows; first += kRoundKeys) {
      const int count = static_cast<int>(
          std::min<std::int64_t>(kRoundBlocks, PackedBlocks::blocks(rows - first)));
      if (!packed) {
        for (int b = 0; b < count; ++b) {
          places.fill(first + b * kPackBlock, key_refs_);
          blocks.pack(b, key_refs_);
        }
      }
      const std::int64_t from = packed ? first / kPackBlock : 0;
      last_round_ = first + kRoundKeys >= rows;
      if (find_keys(blocks, from, count)) use(blocks, from, count);
    }
  }

  // Determines the visible keys of a round and the facts of its chunks. False if no query sees any.
  bool find_keys(const PackedBlocks& blocks, std::int64_t first, int count) {
    const IndexFilter& filter = task_.key_filter;
    const IndexGap& gap = filter.gap;
    bool any = false;
    for (int c = 0; c < count * kChunks; ++c) {
      const PackedChunk& facts = blocks.chunk(first + c / kChunks, c % kChunks);
      chunk_min_[c] = chunk_max_[c] = kMaskedIndex;
      if (facts.min_index == kMaskedIndex || facts.min_index > max_last_ ||
          facts.max_index <= min_before_ || facts.min_index >= filter.end ||
          facts.max_index < filter.begin ||
          (facts.min_index >= gap.begin && facts.max_index < gap.end)) {
        continue;
      }
      const std::int32_t* const index = blocks.index(first + c / kChunks) + c % kChunks * kChunk;
      __m512i kept[2];
      for (int half = 0; half < 2; ++half) {
        const __m512i i = _mm512_loadu_si512(index + half * kLanes);
        const auto in = [&](std::int32_t begin, std::int32_t end) HWY_ATTR {
          return _mm512_mask_cmplt_epi32_mask(_mm512_cmpge_epi32_mask(i, _mm512_set1_epi32(begin)),
                                              i, _mm512_set1_epi32(end));
        };
        const __mmask16 keep = in(filter.begin, filter.end) & ~in(gap.begin, gap.end);
        kept[half] = _mm512_mask_mov_epi32(_mm512_set1_epi32(kMaskedIndex), keep, i);
        _mm512_storeu_si512(key_index_ + c * kChunk + half * kLanes, kept[half]);
      }
      chunk_min_[c] = _mm512_reduce_min_epi32(_mm512_min_epi32(kept[0], kept[1]));
      chunk_max_[c] = _mm512_reduce_max_epi32(_mm512_max_epi32(kept[0], kept[1]));
      if (chunk_min_[c] > max_last_) continue;
      any = true;
      poisoned_ = poisoned_ || facts.poisoned;
      if (task_.repeats.empty()) continue;
      for (int i = 0; i < kChunk; ++i)
        key_class_[c * kChunk + i] =
            index[i] == kMaskedIndex ? 0 : repeat_class(task_.repeats, index[i]);
    }
    return any;
  }

  [[nodiscard]] TileChunk chunk(const TilePanel& panel, int c) const {
    const bool masked =
        panel.careful || chunk_max_[c] > panel.min_last || chunk_min_[c] <= panel.max_before;
    return {key_index_ + c * kChunk, key_class_ + c * kChunk, masked};
  }
  // Whether no row of the panel sees a key of the chunk.
  [[nodiscard]] bool hidden(const TilePanel& panel, int c) const {
    return chunk_min_[c] > panel.max_last || chunk_max_[c] <= panel.min_before;
  }

  // Adds all keys to all panels, or only to the panels that are computed again.
  void attend(Tiles& tiles) {
    for_each_round([&](const PackedBlocks& blocks, std::int64_t first, int count) HWY_ATTR {
      int items = 0;
      for (int p = 0; p < panel_count_; ++p) {
        TilePanel& panel = panels_[p];
        if (panel.done) continue;
        for (int b = 0; b < count; ++b) {
          for (int c = 0; c < kChunks; ++c) {
            if (hidden(panel, b * kChunks + c)) continue;
            // The chunks of an item are adjacent.
            TileItem* item = items > 0 ? items_ + items - 1 : nullptr;
            const std::byte* const k = blocks.keys(first + b);
            if (item == nullptr || item->panel != &panel || item->k != k ||
                item->first_chunk + item->chunks != c || item->chunks == item_chunks(dims_)) {
              item = items_ + items++;
              *item = {&panel, k, blocks.values(first + b), c, 0, {}};
            }
            item->chunk[item->chunks++] = chunk(panel, b * kChunks + c);
          }
        }
      }
      run_items(tiles, items);
    });
    for (int p = 0; p < panel_count_; ++p) panels_[p].done = true;
  }

  void run_items(Tiles& tiles, int items) {
    const auto open_panel = [this](TilePanel& panel) HWY_ATTR {
      if (last_round_ || !panel.opened) open(panel);
    };
    if (task_.repeats.empty()) {
      run_tile_pipeline<kSteps, false>(tiles, work_, items_, items, open_panel);
    } else {
      run_tile_pipeline<kSteps, true>(tiles, work_, items_, items, open_panel);
    }
  }

  // Whether a row's reference is unsuitable: too large a sum (or NaN), or too small a one (fresh
  // rows have none).
  [[nodiscard]] bool misfit(int row) const {
    const bool fresh = (panels_[row / kChunk].fresh >> (row % kChunk) & 1U) != 0;
    const float sum = total(row);
    return !(sum < kSumTooLarge) || (sum < kSumTooSmall && !fresh);
  }

  // Misfit rows get their maximum over all keys as reference, and their panels are reset. Returns
  // whether there are any. The other rows of these panels are computed again with the same bits.
  // See move_reference in forward-inl.h for rows that round.
  HWY_NOINLINE bool move_references(Tiles& tiles) {
    bool any = false;
    for (int row = 0; row < queries_; ++row) {
      if (!misfit(row)) continue;
      panels_[row / kChunk].moved |= std::uint32_t{1} << (row % kChunk);
      panels_[row / kChunk].done = false;
      any = true;
    }
    if (!any) return false;
    float* const highest = sum_;  // [row * kLanes]; the sums of these panels are no longer needed
    for (int row = 0; row < queries_; ++row)
      if (!panels_[row / kChunk].done) highest[row * kLanes] = -INFINITY;
    for_each_round([&](const PackedBlocks& blocks, std::int64_t first, int count) HWY_ATTR {
      for (int p = 0; p < panel_count_; ++p) {
        for (int c = 0; !panels_[p].done && c < count * kChunks; ++c) {
          if (hidden(panels_[p], c)) continue;
          score_chunk(tiles, work_, panels_[p].q,
                      blocks.keys(first + c / kChunks) + c % kChunks * query_bytes());
          TileChunk all = chunk(panels_[p], c);
          for (int i = 0; i < kChunk; ++i) {
            float& so_far = highest[(p * kChunk + i) * kLanes];
            const float found = highest_visible(panels_[p], all, work_.scores, i);
            if (found > so_far) so_far = found;  // NaN is not greater
          }
        }
      }
    });
    for (int row = 0; row < panel_count_ * kChunk; ++row) {
      TilePanel& panel = panels_[row / kChunk];
      if (panel.done) continue;
      const auto bit = std::uint32_t{1} << (row % kChunk);
      panel.careful = true;
      if (row < queries_ && (panel.moved & bit) != 0) {
        const float found = highest[row * kLanes];
        if (found > -INFINITY) {
          minus_reference_[row] = -(found * score_factor_);
          rounds_[row] = std::abs(minus_reference_[row]) >= 0x1p24F ? 1.0F : 0.0F;
          panel.fresh &= ~bit;
        } else {
          panel.moved &= ~bit;
        }
      }
    }
    for (int row = 0; row < panel_count_ * kChunk; ++row)
      if (!panels_[row / kChunk].done) start_row(row, row < queries_);
    return true;
  }

  // Adds the values of V that packing removed (Inf and NaN) to the rows that see them. Weights are
  // positive, so Inf stays Inf.
  HWY_NOINLINE void add_poison() {
    std::int64_t keys = 0;
    for (const RowRun& run : task_.keys) keys += run.count;
    RowStream stream(task_.keys, 0, keys);
    while (const int rows = stream.take(kPackBlock, key_refs_)) {
      for (int i = 0; i < rows * dims_; ++i) {
        const RowStream::Ref& key = key_refs_[i / dims_];
        const int d = i % dims_ * 32;
        const __m512i values = row_words(key, kValue, d, problem_.head_dim);
        const __mmask32 bad = not_finite(values);
        if (bad == 0) continue;
        const std::int32_t index = key.index();
        const __m512i poison = _mm512_maskz_mov_epi16(bad, values);
        const auto half = [&](int row, int at, __m256i words) HWY_ATTR {
          const __m512 terms =
              _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16));
          _mm512_store_ps(output(row, at), _mm512_add_ps(terms, _mm512_load_ps(output(row, at))));
        };
        for (int row = 0; row < queries_; ++row) {
          if (query_last_[row] < index || query_before_[row] >= index) continue;
          half(row, d, _mm512_castsi512_si256(poison));
          half(row, d + 16, _mm512_extracti64x4_epi64(poison, 1));
        }
      }
    }
  }

  void store_output() {
    for (int row = 0; row < queries_; ++row) {
      const float sum = total(row);
      // No key seen: 0, even if values are Inf.
      if (HWY_UNLIKELY(sum == 0.0F)) clear_output(row);
      const float log_sum = std::log2(sum) - minus_reference_[row];
      const WithSink end = with_sink(sum == 0.0F ? -INFINITY : log_sum * kLn2, task_.sink);
      *reinterpret_cast<float*>(query_refs_[row].at(kLse)) = end.lse;
      // Two factors: see store_output in forward-inl.h.
      const __m512 inverse = _mm512_set1_ps(sum == 0.0F ? 1.0F : 1.0F / rounded_sum_[row * kLanes]);
      const __m512 kept = _mm512_set1_ps(end.kept);
      if (task_.out_dtype == DType::bf16) {
        store_rounded(row, inverse, kept);
        continue;
      }
      for (int d = 0; d < dims_ * 32; d += kLanes)
        _mm512_store_ps(row_ + d, finished(row, d, inverse, kept));
      store_row(task_.out_dtype, row_, 1.0F, query_refs_[row].at(kOut), problem_.head_dim);
    }
  }

  HWY_INLINE __m512 finished(int row, int d, __m512 inverse, __m512 kept) const {
    return _mm512_mul_ps(kept, _mm512_mul_ps(inverse, _mm512_load_ps(output(row, d))));
  }

  HWY_INLINE void store_rounded(int row, __m512 inverse, __m512 kept) const {
    auto* const to = reinterpret_cast<std::uint16_t*>(query_refs_[row].at(kOut));
    for (int d = 0; d < problem_.head_dim; d += 32) {
      const __m512i words =
          to_bf16(finished(row, d, inverse, kept), finished(row, d + 16, inverse, kept));
      const int left = problem_.head_dim - d;
      const __mmask32 keep = left >= 32 ? ~__mmask32{0} : (__mmask32{1} << left) - 1;
      _mm512_mask_storeu_epi16(to + d, keep, words);
    }
  }

  const Problem& problem_;
  const ForwardTask& task_;
  int dims_;  // head dim / 32, rounded up
  int queries_;
  int panel_count_;
  float score_factor_;
  RowStream::Ref* query_refs_;
  TilePanel* panels_;
  std::byte* q_;
  std::byte* o_;            // not normalised
  float* sum_;              // [row][16], added up at the end
  float* rounded_sum_;      // [row][16], of which only the first is used
  float* minus_reference_;  // added to a score in log2 units
  float* rounds_;           // not 0: score x factor is rounded, as the reference is
  std::int32_t* query_before_;
  std::int32_t* query_last_;
  std::int32_t min_before_ = 0;
  std::int32_t max_last_ = 0;
  float* repeats_;  // [row][class of keys]
  RowStream::Ref* key_refs_;
  std::int32_t* key_index_;  // of a round; kMaskedIndex: excluded
  std::int32_t* key_class_;
  std::int32_t chunk_min_[kRoundBlocks * kChunks];
  std::int32_t chunk_max_[kRoundBlocks * kChunks];
  TileItem* items_;
  TileWork work_;
  float* row_;
  std::byte* packed_;
  bool last_round_ = false;
  bool poisoned_ = false;
};

inline void tile_forward(const Problem& problem, const ForwardTask& task,
                         std::span<std::byte> scratch) {
  if (problem.head_dim == 64) return TileForward<2>::run(problem, task, scratch);
  if (problem.head_dim == 128) return TileForward<4>::run(problem, task, scratch);
  return TileForward<0>::run(problem, task, scratch);
}

}  // namespace annulus::cpu::ANNULUS_ISA
