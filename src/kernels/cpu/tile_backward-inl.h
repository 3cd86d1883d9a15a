// Backward on tiles, keys in the rows: S^T = K Q^T and dP^T = V dO^T, P^T = 2^(S - L) and dS^T = P
// * (dP - delta), rounded to bf16, are directly the A sides of dV += P^T dO and dK += dS^T Q, and
// dS^T with its keys in pairs is the B side of dQ^T += K^T dS^T. Only dQ is transposed back.
// Included after tile_gradient_pack-inl.h and tile_products-inl.h.
//
// A block is kBlockChunks chunks of 32 keys x kBlockPanels panels of 32 queries: sums of dK and dV
// are loaded and stored once per chunk and block, those of dQ once per panel and block. All sums go
// through memory in steps of 32 rows, so that results do not depend on where blocks begin. Each
// task packs its own rows, because it has hundreds on both sides. Blocks of 2 to 8 chunks and 4 or
// 8 panels differ by at most 11 % in speed (Emerald Rapids, 16 threads).

namespace annulus::cpu::ANNULUS_ISA {

// kSteps: head dim / 32 where it is known at compile time, else 0.
template <int kSteps>
class TileBackward {
  static constexpr int kBlockChunks = 4;
  static constexpr int kBlockPanels = 4;
  static constexpr int kBlockQueries = kBlockPanels * kChunk;

  // Of 32 keys, and of 32 queries.
  struct KeySpan {
    std::int32_t first;
    std::int32_t last;
  };
  struct PanelLimits {
    std::int32_t min_before;
    std::int32_t max_before;
    std::int32_t min_last;
    std::int32_t max_last;
  };

 public:
  static void run(const Problem& problem, const BackwardTask& task,
                  std::span<std::byte> scratch_bytes) {
    TileBackward self(problem, task, scratch_bytes);
    RowStream keys(task.keys, task.key_begin, task.key_end,
                   {task.canonical_keys, task.key_gap, self.chunk_rows_});
    while (keys.remaining() > 0) {
      self.load_keys(keys);
      RowStream queries(task.queries, task.query_begin, task.query_end,
                        {task.canonical_queries, task.query_gap, kBlockQueries});
      while (queries.remaining() > 0) {
        if (!self.load_queries(queries)) continue;
        self.process();
        if (task.query_grad) self.add_query_gradients();
      }
      if (task.key_grad) self.add_key_gradients();
    }
  }

 private:
  TileBackward(const Problem& problem, const BackwardTask& task, std::span<std::byte> scratch_bytes)
      : problem_(problem),
        task_(task),
        dims_(kSteps != 0 ? kSteps : (problem.head_dim + 31) / 32),
        chunk_rows_(max_key_chunk(problem.head_dim, false)),
        score_factor_(problem.scale * kLog2E) {
    Scratch scratch(scratch_bytes);
    const auto keys = static_cast<std::size_t>(chunk_rows_);
    const auto key_bytes = keys / kChunk * static_cast<std::size_t>(side_bytes());
    const auto query_bytes = kBlockPanels * static_cast<std::size_t>(side_bytes());
    key_refs_ = scratch.take<RowStream::Ref>(keys);
    key_index_ = scratch.take<std::int32_t>(keys);
    key_class_ = scratch.take<std::int32_t>(keys);
    key_spans_ = scratch.take<KeySpan>(keys / kChunk);
    k_ = scratch.take<std::byte>(key_bytes);
    v_ = scratch.take<std::byte>(key_bytes);
    k_transposed_ = scratch.take<std::byte>(key_bytes);
    dk_ = scratch.take<std::byte>(2 * key_bytes);
    dv_ = scratch.take<std::byte>(2 * key_bytes);
    query_refs_ = scratch.take<RowStream::Ref>(kBlockQueries);
    query_before_ = scratch.take<std::int32_t>(kBlockQueries);
    query_last_ = scratch.take<std::int32_t>(kBlockQueries);
    minus_lse_ = scratch.take<float>(kBlockQueries);
    minus_delta_ = scratch.take<float>(kBlockQueries);
    large_lse_ = scratch.take<double>(kBlockQueries);
    repeats_ = scratch.take<float>(
        task.repeats.empty() ? 0 : std::size_t{kBlockQueries} << task.repeats.size());
    q_columns_ = scratch.take<std::byte>(query_bytes);
    do_columns_ = scratch.take<std::byte>(query_bytes);
    q_pairs_ = scratch.take<std::byte>(query_bytes);
    do_pairs_ = scratch.take<std::byte>(query_bytes);
    dq_ = scratch.take<std::byte>(2 * query_bytes);
    s_ = scratch.take<float>(kChunk * kChunk);
    dp_ = scratch.take<float>(kChunk * kChunk);
    p_ = scratch.take<std::byte>(kBlockChunks * kBlockPanels * kPairBytes);
    ds_ = scratch.take<std::byte>(kBlockChunks * kBlockPanels * kPairBytes);
    ds_pairs_ = scratch.take<std::byte>(kBlockChunks * kPairBytes);
    wide_rows_ = scratch.take<float>(std::size_t{kLanes} * kMaxHeadDim);
  }

  // Of 32 rows in bf16.
  [[nodiscard]] std::int64_t side_bytes() const { return std::int64_t{dims_} * kPairBytes; }

  void load_keys(RowStream& stream) {
    const int count = stream.take(chunk_rows_, key_refs_);
    key_count_ = count;
    chunks_ = (count + kChunk - 1) / kChunk;
    std::fill(key_refs_ + count, key_refs_ + chunks_ * kChunk, RowStream::Ref{nullptr, 0});
    keys_finite_ = true;
    first_key_ = kMaskedIndex;
    last_key_ = -1;
    for (int c = 0; c < chunks_; ++c) {
      const RowStream::Ref* const refs = key_refs_ + c * kChunk;
      keys_finite_ &= pack_rows(refs, kKey, dims_, problem_.head_dim, k_ + c * side_bytes());
      pack_rows(refs, kValue, dims_, problem_.head_dim, v_ + c * side_bytes());
      if (task_.query_grad) {
        pack_transposed(refs, kKey, dims_, problem_.head_dim, chunk_rows_ / kChunk * kPairBytes,
                        k_transposed_ + c * kPairBytes);
      }
      std::int32_t* const index = key_index_ + c * kChunk;
      for (int i = 0; i < kChunk; ++i) {
        const bool exists = refs[i].run != nullptr;
        index[i] = exists ? refs[i].index() : kMaskedIndex;
        if (exists) last_key_ = std::max(last_key_, index[i]);
        key_class_[c * kChunk + i] =
            exists ? repeat_class(task_.repeats, refs[i].index()) * kBlockQueries : 0;
      }
      key_spans_[c] = {*std::min_element(index, index + kChunk),
                       *std::max_element(index, index + kChunk)};
      first_key_ = std::min(first_key_, key_spans_[c].first);
    }
    if (!task_.key_grad) return;
    std::memset(dk_, 0, static_cast<std::size_t>(2 * chunks_ * side_bytes()));
    std::memset(dv_, 0, static_cast<std::size_t>(2 * chunks_ * side_bytes()));
  }

  // False: no query of the block sees any key.
  bool load_queries(RowStream& stream) {
    const int end = stream.take(kBlockQueries, query_refs_);
    panels_ = (end + kChunk - 1) / kChunk;
    std::fill(query_refs_ + end, query_refs_ + panels_ * kChunk, RowStream::Ref{nullptr, 0});
    bool any = false;
    for (int i = 0; i < panels_ * kChunk; ++i) {
      load_query(i);
      any = any || (query_last_[i] >= first_key_ && query_before_[i] < last_key_);
    }
    if (!any) return false;
    queries_finite_ = true;
    for (int p = 0; p < panels_; ++p) {
      const RowStream::Ref* const refs = query_refs_ + p * kChunk;
      pack_columns(refs, kQuery, dims_, problem_.head_dim, q_columns_ + p * side_bytes());
      pack_columns(refs, kOutGrad, dims_, problem_.head_dim, do_columns_ + p * side_bytes());
      if (task_.key_grad) {
        constexpr std::int64_t kStep = kBlockPanels * kPairBytes;
        std::byte* const q = q_pairs_ + p * kPairBytes;
        std::byte* const dout = do_pairs_ + p * kPairBytes;
        queries_finite_ &= pack_pairs(refs, kQuery, dims_, problem_.head_dim, kStep, q);
        queries_finite_ &= pack_pairs(refs, kOutGrad, dims_, problem_.head_dim, kStep, dout);
      }
      const std::int32_t* const before = query_before_ + p * kChunk;
      const std::int32_t* const last = query_last_ + p * kChunk;
      limits_[p] = {*std::min_element(before, before + kChunk),
                    *std::max_element(before, before + kChunk),
                    *std::min_element(last, last + kChunk), *std::max_element(last, last + kChunk)};
      const double* const large = large_lse_ + p * kChunk;
      large_[p] = std::any_of(large, large + kChunk, [](double lse) { return lse != 0; });
    }
    if (task_.query_grad) std::memset(dq_, 0, static_cast<std::size_t>(2 * panels_ * side_bytes()));
    return true;
  }

  void load_query(int i) {
    const RowStream::Ref& ref = query_refs_[i];
    query_before_[i] = kSeesNothing.before;
    query_last_[i] = kSeesNothing.last;
    minus_lse_[i] = -INFINITY;
    minus_delta_[i] = 0.0F;
    large_lse_[i] = 0;
    repeat_weights(task_.repeats, ref.run != nullptr ? ref.index() : 0, repeats_ + i,
                   kBlockQueries);
    if (ref.run == nullptr) return;
    const float lse = *reinterpret_cast<const float*>(ref.at(kLse));
    // All its scores are -inf, so it has no gradient.
    if (lse == -INFINITY) return;
    const KeyLimits keys = key_limits(task_.band, ref.index());
    query_before_[i] = keys.before;
    query_last_[i] = keys.last;
    minus_lse_[i] = -lse * kLog2E;
    if (std::abs(minus_lse_[i]) >= kLargeLse && std::isfinite(minus_lse_[i])) {
      large_lse_[i] = lse / double{kLn2};  // undoes forward's multiplication
      minus_lse_[i] = 0;                   // settle_scores subtracts it
    }
    minus_delta_[i] = -*reinterpret_cast<const float*>(ref.at(kDelta));
  }

  void process() {
    Tiles tiles;
    for (int block = 0; block < chunks_; block += kBlockChunks) {
      const int chunks = std::min(kBlockChunks, chunks_ - block);
      int panel_list[kBlockChunks][kBlockPanels];  // per chunk: panels that see any of its keys
      int panel_counts[kBlockChunks] = {};
      for (int p = 0; p < panels_; ++p) {
        int chunk_list[kBlockChunks];
        int chunk_count = 0;
        for (int c = 0; c < chunks; ++c) {
          if (key_spans_[block + c].first > limits_[p].max_last ||
              key_spans_[block + c].last <= limits_[p].min_before) {
            continue;
          }
          chunk_list[chunk_count++] = c;
          panel_list[c][panel_counts[c]++] = p;
          score_gradients(tiles, block + c, c, p);
        }
        if (task_.query_grad && chunk_count > 0)
          query_gradients(tiles, block, p, chunk_list, chunk_count);
      }
      if (!task_.key_grad) continue;
      for (int c = 0; c < chunks; ++c) {
        if (panel_counts[c] == 0) continue;
        key_gradients(tiles, block + c, c, panel_list[c], panel_counts[c], p_, do_pairs_, dv_);
        key_gradients(tiles, block + c, c, panel_list[c], panel_counts[c], ds_, q_pairs_, dk_);
      }
    }
  }

  // Lanes whose query sees the key of this index.
  static HWY_INLINE __mmask16 sees(const LaneLimits& queries, std::int32_t key_index) {
    const __m512i key = _mm512_set1_epi32(key_index);
    return _mm512_mask_cmplt_epi32_mask(
        _mm512_cmpge_epi32_mask(_mm512_load_si512(queries.last), key),
        _mm512_load_si512(queries.before), key);
  }

  [[nodiscard]] bool masked(int chunk, int p) const {
    return key_spans_[chunk].last > limits_[p].min_last ||
           key_spans_[chunk].first <= limits_[p].max_before;
  }

  // P^T and dS^T of chunk `c` of its block.
  HWY_NOINLINE void score_gradients(Tiles& tiles, int chunk, int c, int p) {
    const int dims = kSteps != 0 ? kSteps : dims_;
    multiply_tiles(tiles, FromZero{}, k_ + chunk * side_bytes(), q_columns_ + p * side_bytes(),
                   InOrder{}, dims, plain(s_));
    multiply_tiles(tiles, FromRow{minus_delta_ + p * kChunk}, v_ + chunk * side_bytes(),
                   do_columns_ + p * side_bytes(), InOrder{}, dims, plain(dp_));
    if (HWY_UNLIKELY(large_[p])) settle_scores(chunk, p);
    const bool hidden = masked(chunk, p);
    if (task_.repeats.empty()) {
      hidden ? weigh<true, false>(chunk, c, p) : weigh<false, false>(chunk, c, p);
    } else {
      hidden ? weigh<true, true>(chunk, c, p) : weigh<false, true>(chunk, c, p);
    }
  }

  HWY_NOINLINE void settle_scores(int chunk, int p) const {
    const double* const lse = large_lse_ + p * kChunk;
    for (int i = 0; i < kChunk; ++i) {
      const float* const repeats = repeats_ + key_class_[chunk * kChunk + i] + p * kChunk;
      for (int j = 0; j < kChunk; ++j) {
        if (lse[j] == 0) continue;
        float& s = s_[i * kChunk + j];
        s = static_cast<float>(settled_exponent(s * double{score_factor_}, lse[j],
                                                task_.repeats.empty() ? 1 : repeats[j],
                                                task_.only_branch) /
                               score_factor_);
      }
    }
  }

  template <bool kMasked, bool kRepeats>
  HWY_NOINLINE void weigh(int chunk, int c, int p) const {
    const Exp2Fraction fraction;
    const __m512 factor = pinned(score_factor_);
    const __m512 minus_lse[2] = {_mm512_load_ps(minus_lse_ + p * kChunk),
                                 _mm512_load_ps(minus_lse_ + p * kChunk + kLanes)};
    const LaneLimits lanes{query_before_ + p * kChunk, query_last_ + p * kChunk};
    const __m512i low = low_pairs();
    const __m512i high = high_pairs();
    std::byte* const weights = p_ + (c * kBlockPanels + p) * kPairBytes;
    std::byte* const gradients = ds_ + (c * kBlockPanels + p) * kPairBytes;
    std::byte* const pairs = ds_pairs_ + c * kPairBytes;
    const std::int32_t* const keys = key_index_ + chunk * kChunk;
    const std::int32_t* const classes = key_class_ + chunk * kChunk;
    ANNULUS_UNROLL(1)
    for (int i = 0; i < kChunk; i += 2) {
      __m512i rounded[2];
      ANNULUS_UNROLL(2)
      for (int r = 0; r < 2; ++r) {
        const int key = i + r;
        __m512 w[2];
        __m512 ds[2];
        ANNULUS_UNROLL(2)
        for (int j = 0; j < 2; ++j) {
          const int at = key * kChunk + j * kLanes;
          const __m512 x = _mm512_fmadd_ps(_mm512_load_ps(s_ + at), factor, minus_lse[j]);
          w[j] = _mm512_scalef_ps(fraction(x), x);
          if constexpr (kRepeats)
            w[j] = _mm512_mul_ps(w[j],
                                 _mm512_load_ps(repeats_ + classes[key] + p * kChunk + j * kLanes));
          if constexpr (kMasked) {
            const __mmask16 seen = sees(lanes + j * kLanes, keys[key]);
            w[j] = _mm512_maskz_mov_ps(seen, w[j]);
            // dP of a hidden pair may be Inf or NaN, and 0 times that is not 0.
            ds[j] = _mm512_maskz_mul_ps(seen, w[j], _mm512_load_ps(dp_ + at));
          } else {
            ds[j] = _mm512_mul_ps(w[j], _mm512_load_ps(dp_ + at));
          }
        }
        rounded[r] = to_bf16(ds[0], ds[1]);
        _mm512_store_si512(weights + key * kTileRowBytes, to_bf16(w[0], w[1]));
        _mm512_store_si512(gradients + key * kTileRowBytes, rounded[r]);
      }
      std::byte* const pair = pairs + i / 2 * kTileRowBytes;
      _mm512_store_si512(pair, _mm512_permutex2var_epi16(rounded[0], low, rounded[1]));
      _mm512_store_si512(pair + kTileBytes,
                         _mm512_permutex2var_epi16(rounded[0], high, rounded[1]));
    }
  }

  // dQ^T of a panel, for the listed chunks of a block.
  HWY_NOINLINE void query_gradients(Tiles& tiles, int block, int p, const int* list, int count) {
    bool careful = false;
    for (int i = 0; !keys_finite_ && i < count; ++i) careful |= masked(block + list[i], p);
    for (int d = 0; d < dims_; ++d) {
      const std::byte* const k = k_transposed_ + (d * (chunk_rows_ / kChunk) + block) * kPairBytes;
      const TileSum sum = listed(dq_ + 2 * p * side_bytes() + d * 2 * kPairBytes);
      if (HWY_UNLIKELY(careful)) {
        const struct {
          const std::int32_t* keys;
          LaneLimits queries;
          HWY_INLINE __mmask16 operator()(int c, int, int key, int half) const {
            return sees(queries + half * kLanes, keys[c * kChunk + key]);
          }
        } visible{key_index_ + block * kChunk,
                  {query_before_ + p * kChunk, query_last_ + p * kChunk}};
        multiply_visible(k, ds_pairs_, list, count, sum, visible);
      } else {
        multiply_tiles(tiles, FromSum{}, k, ds_pairs_, Listed{list}, count, sum);
      }
    }
  }

  // dV or dK of chunk `c` of its block, for the listed panels.
  HWY_NOINLINE void key_gradients(Tiles& tiles, int chunk, int c, const int* list, int count,
                                  const std::byte* weights, const std::byte* x,
                                  std::byte* gradient) {
    bool careful = false;
    for (int i = 0; !queries_finite_ && i < count; ++i) careful |= masked(chunk, list[i]);
    weights += c * kBlockPanels * kPairBytes;
    for (int d = 0; d < dims_; ++d) {
      const std::byte* const rows = x + d * kBlockPanels * kPairBytes;
      const TileSum sum = listed(gradient + 2 * chunk * side_bytes() + d * 2 * kPairBytes);
      if (HWY_UNLIKELY(careful)) {
        const struct {
          const std::int32_t* keys;
          LaneLimits queries;
          HWY_INLINE __mmask16 operator()(int p, int key, int query, int) const {
            const int at = p * kChunk + query;
            return queries.before[at] < keys[key] && keys[key] <= queries.last[at] ? 0xffff : 0;
          }
        } visible{key_index_ + chunk * kChunk, {query_before_, query_last_}};
        multiply_visible(weights, rows, list, count, sum, visible);
      } else {
        multiply_tiles(tiles, FromSum{}, weights, rows, Listed{list}, count, sum);
      }
    }
  }

  void add_query_gradients() {
    const int dim = dims_ * 32;
    for (int half = 0; half < 2 * panels_; ++half) {
      const RowStream::Ref* const refs = query_refs_ + half * kLanes;
      const std::byte* const tiles = dq_ + half / 2 * 2 * side_bytes() + half % 2 * kTileBytes;
      for (int d = 0; d < dim / kLanes; ++d) {
        transpose_block(reinterpret_cast<const float*>(tiles + d * kPairBytes), kLanes,
                        wide_rows_ + d * kLanes, dim);
      }
      for (int i = 0; i < kLanes; ++i) {
        if (refs[i].run == nullptr) continue;
        const float* const row = wide_rows_ + i * dim;
        for (int d = 0; d < problem_.head_dim; d += kLanes)
          add(_mm512_load_ps(row + d), problem_.scale, d, refs[i].at(kQueryGrad));
      }
    }
  }

  void add_key_gradients() {
    for (int i = 0; i < key_count_; ++i) {
      if (key_refs_[i].run == nullptr) continue;
      const std::int64_t at =
          i / kChunk * 2 * side_bytes() + i % kChunk / 16 * kPairBytes + i % 16 * kTileRowBytes;
      for (int d = 0; d < problem_.head_dim; d += kLanes) {
        const std::int64_t of_dim = at + d / 32 * 2 * kPairBytes + d % 32 / 16 * kTileBytes;
        add(_mm512_load_ps(dk_ + of_dim), problem_.scale, d, key_refs_[i].at(kKeyGrad));
        add(_mm512_load_ps(dv_ + of_dim), 1.0F, d, key_refs_[i].at(kValueGrad));
      }
    }
  }

  // Dims [d, d + 16) of a row.
  HWY_INLINE void add(__m512 x, float factor, int d, std::byte* row) const {
    float* const to = reinterpret_cast<float*>(row) + d;
    const auto keep = static_cast<__mmask16>((1U << std::min(kLanes, problem_.head_dim - d)) - 1);
    _mm512_mask_storeu_ps(
        to, keep, _mm512_fmadd_ps(_mm512_set1_ps(factor), x, _mm512_maskz_loadu_ps(keep, to)));
  }

  const Problem& problem_;
  const BackwardTask& task_;
  int dims_;        // head dim / 32, rounded up
  int chunk_rows_;  // keys per chunk of the task
  float score_factor_;
  int key_count_ = 0;
  int chunks_ = 0;
  int panels_ = 0;
  std::int32_t first_key_ = 0;
  std::int32_t last_key_ = 0;
  bool keys_finite_ = true;
  bool queries_finite_ = true;
  bool large_[kBlockPanels] = {};
  PanelLimits limits_[kBlockPanels] = {};
  RowStream::Ref* key_refs_;  // null runs: padding
  std::int32_t* key_index_;
  std::int32_t* key_class_;  // offset of the key's class in repeats_
  KeySpan* key_spans_;       // per chunk
  std::byte* k_;             // [chunk][D / 32] pairs of tiles
  std::byte* v_;
  std::byte* k_transposed_;  // [D / 32][chunk]
  std::byte* dk_;            // [chunk][D / 32][2 x 16 keys] pairs of 16 dims
  std::byte* dv_;
  RowStream::Ref* query_refs_;
  std::int32_t* query_before_;
  std::int32_t* query_last_;
  float* minus_lse_;
  float* minus_delta_;
  double* large_lse_;     // 0: L is not large
  float* repeats_;        // [key class][query]; see repeat_weights
  std::byte* q_columns_;  // [panel][D / 32]
  std::byte* do_columns_;
  std::byte* q_pairs_;  // [D / 32][panel]
  std::byte* do_pairs_;
  std::byte* dq_;  // [panel][D / 32][2 x 16 dims] pairs of 16 queries
  float* s_;       // [32 keys][32 queries]
  float* dp_;
  std::byte* p_;  // [chunk of the block][panel]
  std::byte* ds_;
  std::byte* ds_pairs_;  // [chunk of the block], of one panel
  float* wide_rows_;
};

inline void tile_backward(const Problem& problem, const BackwardTask& task,
                          std::span<std::byte> scratch) {
  if (problem.head_dim == 64) return TileBackward<2>::run(problem, task, scratch);
  if (problem.head_dim == 128) return TileBackward<4>::run(problem, task, scratch);
  return TileBackward<0>::run(problem, task, scratch);
}

}  // namespace annulus::cpu::ANNULUS_ISA
