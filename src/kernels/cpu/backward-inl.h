// Backward: queries in the SIMD lanes, as in forward-inl.h. Per block of 128 keys x 128 queries:
// S^T, P^T = 2^(S - L), dP^T (whose accumulator starts at -delta) and dS^T = P * dP, panel by
// panel; then dQ^T += K^T dS^T with queries in the lanes and dV += P^T dO, dK += dS^T Q with
// head_dim in the lanes. Only Q, dO and dQ are transposed. See simd-inl.h for how this file is
// included.

namespace annulus::cpu::ANNULUS_ISA {

// kModified: there may be a softcap, dropout or both.
template <class M, int kLd, int kFd, bool kModified>
class Backward {
  using Element = typename M::Element;
  static constexpr int kRowElements = kLd / M::kPack;
  static constexpr int kPanelElements = kPanel / M::kPack;
  static constexpr int kTiles = kGradBlock / kRows;
  static constexpr int kPanels = (kGradBlock + kPanel - 1) / kPanel;
  static constexpr int kChunk = max_key_chunk(kFd != 0 ? kFd : kLd - kRowPadding, kFd == 0);
  // K, V, dK and dV of a chunk, seven arrays of a block of queries, and half a MiB for the rest.
  static_assert((4 * kChunk + 7 * kGradBlock) * kLd * sizeof(float) + (std::size_t{512} << 10) <=
                ThreadPool::kScratchBytes);

 public:
  static void run(const Problem& problem, const BackwardTask& task,
                  std::span<std::byte> scratch_bytes) {
    Backward self(problem, task, scratch_bytes);
    RowStream keys(task.keys, task.key_begin, task.key_end,
                   {task.canonical_keys, task.key_gap, kChunk});
    while (keys.remaining() > 0) {
      self.load_keys(keys);
      RowStream queries(task.queries, task.query_begin, task.query_end,
                        {task.canonical_queries, task.query_gap, kGradBlock});
      while (queries.remaining() > 0) {
        if (!self.load_queries(queries)) continue;
        for (int block = 0; block < self.key_rows_; block += kGradBlock) self.process(block);
        if (task.query_grad) self.add_query_gradients();
      }
      if (task.key_grad) self.add_key_gradients();
    }
  }

 private:
  Backward(const Problem& problem, const BackwardTask& task, std::span<std::byte> scratch_bytes)
      : problem_(problem),
        task_(task),
        padded_dim_(padded_dim(head_dim())),
        softcap_(problem),
        dropout_(problem.dropout, task.dropout),
        query_factor_(M::kPack == 1 ? problem.scale * kLog2E : 1.0F),
        score_factor_(softcap_.score_factor(M::kPack == 1 ? 1.0F : problem.scale * kLog2E)) {
    Scratch scratch(scratch_bytes);
    const auto keys = static_cast<std::size_t>(kChunk);
    key_refs_ = scratch.take<RowStream::Ref>(keys);
    key_index_ = scratch.take<std::int32_t>(keys);
    key_repeats_ = scratch.take<std::int32_t>(keys);
    key_tiles_ = scratch.take<TileKeys>(keys / kRows);
    k_ = scratch.take<Element>(keys * kRowElements);
    v_ = scratch.take<Element>(keys * kRowElements);
    k_pairs_ = M::kPack == 1 ? k_ : scratch.take<Element>(keys / M::kPack * kLd);
    dk_ = scratch.take<float>(keys * kLd);
    dv_ = scratch.take<float>(keys * kLd);
    query_refs_ = scratch.take<RowStream::Ref>(kGradBlock);
    query_before_ = scratch.take<std::int32_t>(kPanels * kPanel);
    query_last_ = scratch.take<std::int32_t>(kPanels * kPanel);
    minus_lse_ = scratch.take<float>(kPanels * kPanel);
    minus_delta_ = scratch.take<float>(kPanels * kPanel);
    large_lse_ = scratch.take<double>(kPanels * kPanel);
    const auto lanes = static_cast<std::size_t>(kPanels * kPanel);
    repeats_ = scratch.take<float>(lanes << kMaxRepeats);
    if constexpr (kModified) {
      words_ = {scratch.take<std::uint32_t>(lanes), scratch.take<std::uint32_t>(lanes)};
      key_words_ = scratch.take<std::uint32_t>(keys);
      slopes_ = scratch.take<float>(kGradBlock * kPanel);
    }
    q_pairs_ = scratch.take<Element>(lanes * kLd / M::kPack);
    do_pairs_ = scratch.take<Element>(lanes * kLd / M::kPack);
    q_columns_ = scratch.take<Element>(lanes * kLd / M::kPack);
    do_columns_ = scratch.take<Element>(lanes * kLd / M::kPack);
    rows_ = scratch.take<Element>(lanes * kRowElements);
    dq_ = scratch.take<float>(lanes * kLd);
    wide_rows_ = scratch.take<float>(static_cast<std::size_t>(kPanel) * kLd);
    s_ = scratch.take<float>(kGradBlock * kPanel);
    p_ = scratch.take<Element>(kPanels * kGradBlock * kPanelElements);
    ds_ = scratch.take<Element>(kPanels * kGradBlock * kPanelElements);
    ds_pairs_ = M::kPack == 1 ? nullptr : scratch.take<Element>(kGradBlock / M::kPack * kPanel);
  }

  [[nodiscard]] HWY_INLINE int head_dim() const { return kFd != 0 ? kFd : problem_.head_dim; }
  [[nodiscard]] HWY_INLINE int score_dim() const { return score_dim_of(head_dim()); }

  void load_keys(RowStream& stream) {
    const int count = stream.take(kChunk, key_refs_);
    key_count_ = count;
    key_rows_ = (count + kKeyAlign - 1) / kKeyAlign * kKeyAlign;
    keys_finite_ = Packer<M, kLd>::pack(problem_.dtype, key_refs_, kKey, count, key_rows_, 1.0F,
                                        head_dim(), padded_dim_, k_, k_pairs_);
    keys_finite_ &= Packer<M, kLd>::pack(problem_.dtype, key_refs_, kValue, count, key_rows_, 1.0F,
                                         head_dim(), padded_dim_, v_, nullptr);
    first_key_ = kMaskedIndex;
    last_key_ = -1;
    for (int i = 0; i < key_rows_; ++i) {
      key_index_[i] = kMaskedIndex;
      key_repeats_[i] = 0;
      if (i >= count || key_refs_[i].run == nullptr) continue;
      key_index_[i] = key_refs_[i].index();
      key_repeats_[i] = repeat_class(task_.repeats, key_refs_[i].index()) * (kPanels * kPanel);
      if constexpr (kModified) key_words_[i] = dropout_.rows().key(key_refs_[i].index());
      first_key_ = std::min(first_key_, key_index_[i]);
      last_key_ = std::max(last_key_, key_index_[i]);
    }
    for (int t = 0; t * kRows < key_rows_; ++t) key_tiles_[t] = tile_keys(key_index_ + t * kRows);
    const std::size_t bytes = sizeof(float) * static_cast<std::size_t>(key_rows_) * kLd;
    std::memset(dk_, 0, bytes);
    std::memset(dv_, 0, bytes);
  }

  // False: no query of the block sees any key of the chunk.
  bool load_queries(RowStream& stream) {
    queries_ = stream.take(kGradBlock, query_refs_);
    panels_ = (queries_ + kPanel - 1) / kPanel;
    const int lanes = panels_ * kPanel;
    bool any = false;
    for (int i = 0; i < lanes; ++i) {
      const bool exists = i < queries_ && query_refs_[i].run != nullptr;
      const KeyLimits keys = exists ? key_limits(task_.band, query_refs_[i].index()) : kSeesNothing;
      any = any || (keys.before < last_key_ && keys.last >= first_key_);
      query_before_[i] = keys.before;
      query_last_[i] = keys.last;
    }
    if (!any) return false;
    std::fill_n(large_, kPanels, false);
    pack_queries(kQuery, query_factor_, q_columns_, q_pairs_);
    queries_finite_ = pack_queries(kOutGrad, 1.0F, do_columns_, do_pairs_) && queries_finite_;
    for (int i = 0; i < lanes; ++i) {
      const bool exists = i < queries_ && query_refs_[i].run != nullptr;
      minus_lse_[i] = -INFINITY;  // padding sees no key; its weights are 2^-inf
      large_lse_[i] = 0;
      minus_delta_[i] = 0.0F;
      repeat_weights(task_.repeats, exists ? query_refs_[i].index() : 0, repeats_ + i,
                     kPanels * kPanel);
      if constexpr (kModified)
        words_.set(i, dropout_.rows().query(exists ? query_refs_[i].index() : 0));
      if (!exists) continue;
      const float lse = *reinterpret_cast<const float*>(query_refs_[i].at(kLse));
      if (lse == -INFINITY) {  // all its scores are -inf, so it has no gradient
        query_before_[i] = kSeesNothing.before;
        query_last_[i] = kSeesNothing.last;
        continue;
      }
      minus_lse_[i] = -lse * kLog2E;
      if (std::abs(minus_lse_[i]) >= kLargeLse && std::isfinite(minus_lse_[i])) {
        large_[i / kPanel] = true;
        large_lse_[i] = lse / double{kLn2};  // undoes forward's multiplication
        minus_lse_[i] = 0;                   // settle_scores subtracts it
      }
      minus_delta_[i] = -*reinterpret_cast<const float*>(query_refs_[i].at(kDelta));
    }
    for (int p = 0; p < panels_; ++p) limits_[p] = panel_limits(lanes_of(p));
    std::memset(dq_, 0, sizeof(float) * static_cast<std::size_t>(lanes * padded_dim_));
    return true;
  }

  bool pack_queries(int channel, float factor, Element* columns, Element* pairs) {
    // Row form and pair form are the same for fp32, so rows are written there directly.
    Element* rows = M::kPack == 1 ? pairs : rows_;
    const int lanes = panels_ * kPanel;
    const bool finite = Packer<M, kLd>::pack(problem_.dtype, query_refs_, channel, queries_, lanes,
                                             factor, head_dim(), padded_dim_, rows, pairs);
    for (int p = 0; p < panels_; ++p) {
      rows_to_panel(rows + p * kPanel * kRowElements, kRowElements, padded_dim_ / M::kPack,
                    columns + p * kPanel * padded_dim_ / M::kPack);
    }
    if (channel == kQuery) queries_finite_ = finite;
    return finite;
  }

  void process(int block) {
    const int tiles = std::min(kGradBlock, key_rows_ - block) / kRows;
    int begin = tiles;  // of the tiles that any panel needs
    int end = 0;
    for (int p = 0; p < panels_; ++p) {
      reach_[p] = reach(limits_[p], &tile(block, 0), tiles);
      masked_[p] = masked(block, p);
      if (reach_[p].empty()) continue;
      begin = std::min(begin, reach_[p].begin);
      end = std::max(end, reach_[p].end);
      if (task_.repeats.empty()) {
        score_gradients<false>(block, p);
      } else {
        score_gradients<true>(block, p);
      }
      if (task_.query_grad) query_gradients(block, p);
    }
    if (!task_.key_grad) return;
    for (int t = begin; t < end; ++t) {
      key_gradients(block, t, p_, do_pairs_, dv_);
      key_gradients(block, t, ds_, q_pairs_, dk_);
    }
  }

  [[nodiscard]] LaneLimits lanes_of(int p) const {
    return {query_before_ + p * kPanel, query_last_ + p * kPanel};
  }

  [[nodiscard]] const TileKeys& tile(int block, int t) const {
    return key_tiles_[block / kRows + t];
  }
  // Whether some of the computed pairs are not allowed.
  [[nodiscard]] bool masked(int block, int p) const {
    for (int t = reach_[p].begin; t < reach_[p].end; ++t)
      if (!limits_[p].see_all(tile(block, t))) return true;
    return false;
  }

  [[nodiscard]] HWY_INLINE Element* panel_rows(Element* base, int p) const {
    return base + p * kGradBlock * kPanelElements;
  }

  // Computes P^T and dS^T of one panel. All of S first, because Q^T and dO^T together do not fit L1
  // at head_dim 128.
  template <bool kRepeats>
  void score_gradients(int block, int p) {
    const Reach& r = reach_[p];
    const Element* q = q_columns_ + p * kPanel * padded_dim_ / M::kPack;
    const Element* dout = do_columns_ + p * kPanel * padded_dim_ / M::kPack;
    for (int t = r.begin; t < r.end; ++t) {
      const Element* k = k_ + (block + t * kRows) * kRowElements;
      if (t < r.first_end) {
        score_tile<0>(k, q, s_ + t * kRows * kPanel);
      } else {
        score_tile<1>(k, q, s_ + t * kRows * kPanel);
      }
    }
    if (large_[p]) settle_scores<kRepeats>(block, p);
    for (int t = r.begin; t < r.end; ++t) {
      const std::int32_t* keys = key_index_ + block + t * kRows;
      const Element* v = v_ + (block + t * kRows) * kRowElements;
      if (t >= r.first_end) {
        gradient_tile<1, true, kRepeats>(p, t, v, dout, keys);
      } else if (!limits_[p].see_all(tile(block, t))) {
        gradient_tile<0, true, kRepeats>(p, t, v, dout, keys);
      } else {
        gradient_tile<0, false, kRepeats>(p, t, v, dout, keys);
      }
    }
  }

  // S - L of rows with a large L, one lane at a time.
  template <bool kRepeats>
  HWY_NOINLINE void settle_scores(int block, int p) const {
    const Reach& r = reach_[p];
    const double* lse = large_lse_ + p * kPanel;
    for (int i = r.begin * kRows; i < r.end * kRows; ++i) {
      float* s = s_ + i * kPanel;
      for (int j = i < r.first_end * kRows ? 0 : kLanes; j < kPanel; ++j) {
        if (lse[j] == 0) continue;
        const double repeats = kRepeats ? repeats_[key_repeats_[block + i] + p * kPanel + j] : 1.0F;
        s[j] = static_cast<float>(
            settled_exponent(s[j] * double{score_factor_}, lse[j], repeats, task_.only_branch) /
            score_factor_);
      }
    }
  }

  template <int kV0>
  HWY_NOINLINE void score_tile(const Element* k, const Element* q, float* s) const {
    VF acc[kRows][kVectors];
    fill_tile<kV0>(acc, nullptr);
    multiply<M, kV0, kRowElements, 1, kPanel>(acc, k, q, score_dim() / M::kPack);
    if constexpr (kModified) softcap_.template apply<kV0>(acc, slopes_ + (s - s_));
    store_tile<kV0, kPanel>(acc, s);
  }

  template <int kV0, bool kMasked, bool kRepeats>
  HWY_NOINLINE void gradient_tile(int p, int t, const Element* v, const Element* dout,
                                  const std::int32_t* keys) const {
    VF acc[kRows][kVectors];
    // Dropout comes between the product and delta.
    fill_tile<kV0>(acc, kModified ? nullptr : minus_delta_ + p * kPanel);
    float* s = s_ + t * kRows * kPanel;
    const LaneLimits lanes = lanes_of(p);
    const int steps = score_dim() / M::kPack / (kRows / 2);
    VF minus_lse[kVectors];
    for (int j = kV0; j < kVectors; ++j)
      minus_lse[j] = hn::Load(kF, minus_lse_ + p * kPanel + j * kLanes);
    // Exponentials of two score rows are interleaved with the products, as in forward.
    ANNULUS_UNROLL(1)
    for (int r = 0; r < kRows; r += 2) {
      ANNULUS_UNROLL(2)
      for (int i = r; i < r + 2; ++i) {
        ANNULUS_UNROLL(2)
        for (int j = kV0; j < kVectors; ++j) {
          float* at = s + i * kPanel + j * kLanes;
          const VF score = hn::Load(kF, at);
          VF w = exp2_vector<M::kExpDegree>(
              M::kPack == 1 ? hn::Add(score, minus_lse[j])
                            : hn::MulAdd(score, hn::Set(kF, score_factor_), minus_lse[j]));
          if constexpr (kRepeats) {
            // keys points into key_index_, which has the same numbering.
            const std::int32_t key_class = key_repeats_[keys - key_index_ + i];
            w = hn::Mul(w, hn::Load(kF, repeats_ + key_class + p * kPanel + j * kLanes));
          }
          if constexpr (kMasked) w = hn::IfThenElseZero(visible(lanes + j * kLanes, keys[i]), w);
          hn::Store(w, kF, at);
        }
        const int half_end = i == r ? steps / 2 : steps;
        ANNULUS_UNROLL(16)
        for (int u = i == r ? 0 : steps / 2; u < half_end; ++u) {
          multiply_step<M, kV0, kRowElements>(acc, v + u, dout + u * kPanel);
        }
      }
      v += steps;
      dout += steps * kPanel;
    }
    Element* p_row = panel_rows(p_, p) + t * kRows * kPanelElements;
    Element* ds_row = panel_rows(ds_, p) + t * kRows * kPanelElements;
    ANNULUS_UNROLL(8)
    for (int i = 0; i < kRows; ++i) {
      VF w[kVectors];
      for (int j = 0; j < kVectors; ++j) {
        if (j < kV0) {
          w[j] = hn::Zero(kF);
          acc[i][j] = hn::Zero(kF);
          continue;
        }
        w[j] = hn::Load(kF, s + i * kPanel + j * kLanes);
        if constexpr (kModified) {
          drop(p, keys + i, j * kLanes, w[j], acc[i][j]);
          if (softcap_.on())
            acc[i][j] =
                hn::Mul(acc[i][j], hn::Load(kF, slopes_ + (t * kRows + i) * kPanel + j * kLanes));
        } else {
          acc[i][j] = hn::Mul(acc[i][j], w[j]);
        }
        // dP of a hidden pair may be Inf or NaN, and 0 times that is not 0.
        if constexpr (kMasked)
          acc[i][j] = hn::IfThenElseZero(visible(lanes + j * kLanes, keys[i]), acc[i][j]);
      }
      M::store_panel_row(p_row + i * kPanelElements, w[0], w[1]);
      M::store_panel_row(ds_row + i * kPanelElements, acc[i][0], acc[i][1]);
    }
    if constexpr (M::kPack == 2) {
      ANNULUS_UNROLL(4)
      for (int i = 0; i < kRows; i += 2) {
        for (int j = 0; j < kVectors; ++j) {
          M::store_key_pair(ds_pairs_ + (t * kRows + i) / 2 * kPanel + j * kLanes, acc[i][j],
                            acc[i + 1][j]);
        }
      }
    }
  }

  // From P and dO.V of a pair: what dV multiplies with dO, but for the scale of dropout, and dS.
  // `key` points into key_index_, which has the numbering of key_words_.
  HWY_INLINE void drop(int p, const std::int32_t* key, int at, VF& weight, VF& product) const {
    const int lane = p * kPanel + at;
    const VF all = weight;
    if (dropout_.on()) {
      const std::uint32_t word = key_words_[key - key_index_];
      weight = dropout_.keep(weight, words_ + lane, word);
      product = dropout_.keep(hn::Mul(product, hn::Set(kF, dropout_.scale())), words_ + lane, word);
    }
    product = hn::Mul(hn::Add(product, hn::Load(kF, minus_delta_ + lane)), all);
  }

  void query_gradients(int block, int p) {
    const Reach& r = reach_[p];
    const Element* ds = M::kPack == 1 ? panel_rows(ds_, p) : ds_pairs_;
    const Element* k = k_pairs_ + block / M::kPack * kLd;
    float* dq = dq_ + p * kPanel * padded_dim_;
    if (masked_[p] && !keys_finite_) {
      add_visible_rows<M, kLd>(k, ds, key_index_ + block, r.begin * kRows, r.end * kRows,
                               lanes_of(p), head_dim(), dq);
      return;
    }
    constexpr int kSteps = kRows / M::kPack;  // of a tile
    for (int d = 0; d < head_dim(); d += kRows) {
      add_weighted_rows<M, kLd>(k + d, ds, r.begin * kSteps, r.first_end * kSteps, r.end * kSteps,
                                dq + d * kPanel);
    }
  }

  // The sum over the panels of weights[key][query] x x[query][column], for the keys of one tile.
  HWY_INLINE void key_gradients(int block, int t, Element* weights, const Element* x,
                                float* gradient) {
    bool careful = false;
    if (!queries_finite_) {
      for (int p = 0; p < panels_; ++p)
        careful |= masked_[p] && t >= reach_[p].begin && t < reach_[p].end;
    }
    float* out = gradient + (block + t * kRows) * kLd;
    if (careful) {
      key_gradients_visible(block, t, weights, x, out);
      return;
    }
    for (int d = 0; d < padded_dim_; d += kPanel) key_gradient_tile(t, weights, x + d, out + d);
  }

  HWY_NOINLINE void key_gradient_tile(int t, const Element* weights, const Element* x,
                                      float* out) const {
    VF acc[kRows][kVectors];
    fill_tile<0>(acc, nullptr);
    for (int p = 0; p < panels_; ++p) {
      const Reach& r = reach_[p];
      if (t < r.begin || t >= r.end) continue;
      const int skip = t >= r.first_end ? kLanes / M::kPack : 0;
      multiply<M, 0, kPanelElements, 1, kLd>(
          acc, weights + (p * kGradBlock + t * kRows) * kPanelElements + skip,
          x + (p * kPanelElements + skip) * kLd, kPanelElements - skip);
    }
    add_tile<kLd>(acc, out);
  }

  // The same for queries with Inf or NaN: uses allowed pairs only. Slow; keeps the order of the
  // fast path.
  HWY_NOINLINE void key_gradients_visible(int block, int t, const Element* weights,
                                          const Element* x, float* out) const {
    for (int i = 0; i < kRows; ++i) {
      const std::int32_t key = key_index_[block + t * kRows + i];
      for (int d = 0; d < padded_dim_; d += kLanes) {
        VF acc = hn::Zero(kF);
        for (int p = 0; p < panels_; ++p) {
          if (t < reach_[p].begin || t >= reach_[p].end) continue;
          const Element* row = weights + (p * kGradBlock + t * kRows + i) * kPanelElements;
          for (int q = t >= reach_[p].first_end ? kLanes : 0; q < kPanel; q += M::kPack) {
            Element w = row[q / M::kPack];
            const auto sees = [&](int lane) {
              return query_before_[lane] < key && key <= query_last_[lane];
            };
            const bool first = sees(p * kPanel + q);
            const bool last = sees(p * kPanel + q + M::kPack - 1);
            if (!first && !last) continue;
            HWY_ALIGN Element column[kLanes];
            for (int c = 0; c < kLanes; ++c) {
              column[c] = x[(p * kPanel + q) / M::kPack * kLd + d + c];
              if constexpr (M::kPack == 2)
                column[c] &= (first ? 0xffffU : 0U) | (last ? 0xffff0000U : 0U);
            }
            acc = M::broadcast_multiply_add(&w, M::load(column), acc);
          }
        }
        float* at = out + i * kLd + d;
        hn::Store(hn::Add(acc, hn::Load(kF, at)), kF, at);
      }
    }
  }

  void add_query_gradients() {
    for (int p = 0; p < panels_; ++p) {
      panel_to_rows(dq_ + p * kPanel * padded_dim_, padded_dim_, wide_rows_, kLd);
      for (int i = 0; i < kPanel; ++i) {
        const int row = p * kPanel + i;
        if (row >= queries_) break;
        if (query_refs_[row].run == nullptr) continue;
        add_row(wide_rows_ + i * kLd, problem_.scale, query_refs_[row].at(kQueryGrad));
      }
    }
  }

  void add_key_gradients() {
    // The packed Q of fp32 carries scale * log2(e).
    const float factor = M::kPack == 1 ? kLn2 : problem_.scale;
    for (int i = 0; i < key_count_; ++i) {
      if (key_refs_[i].run == nullptr) continue;
      add_row(dk_ + i * kLd, factor, key_refs_[i].at(kKeyGrad));
      add_row(dv_ + i * kLd, kModified ? dropout_.scale() : 1.0F, key_refs_[i].at(kValueGrad));
    }
  }

  HWY_INLINE void add_row(const float* row, float factor, std::byte* out) const {
    auto* to = reinterpret_cast<float*>(out);
    int d = 0;
    for (; d + kLanes <= head_dim(); d += kLanes) {
      hn::StoreU(hn::MulAdd(hn::Set(kF, factor), hn::Load(kF, row + d), hn::LoadU(kF, to + d)), kF,
                 to + d);
    }
    for (; d < head_dim(); ++d) to[d] = std::fma(factor, row[d], to[d]);
  }

  const Problem& problem_;
  const BackwardTask& task_;
  int padded_dim_;
  Softcap<M> softcap_;
  Dropout dropout_;
  float query_factor_;
  float score_factor_;
  int key_count_ = 0;
  int key_rows_ = 0;  // padded
  std::int32_t first_key_ = 0;
  std::int32_t last_key_ = 0;
  int queries_ = 0;
  int panels_ = 0;
  bool keys_finite_ = true;
  bool queries_finite_ = true;
  Reach reach_[kPanels];
  bool masked_[kPanels] = {};
  PanelLimits limits_[kPanels] = {};
  RowStream::Ref* key_refs_;
  std::int32_t* key_index_;
  std::int32_t* key_repeats_;  // offset of the key's class in repeats_
  TileKeys* key_tiles_;
  Element* k_;        // row form
  Element* v_;        // row form
  Element* k_pairs_;  // pair form
  float* dk_;         // [chunk][kLd]
  float* dv_;
  RowStream::Ref* query_refs_;
  std::int32_t* query_before_;
  std::int32_t* query_last_;
  float* minus_lse_;
  float* minus_delta_;
  double* large_lse_;  // 0: L is not large
  bool large_[kPanels] = {};
  float* repeats_;  // [key class][lanes]; see repeat_weights
  LaneWords words_{};
  std::uint32_t* key_words_ = nullptr;
  float* slopes_ = nullptr;  // of the softcap, as s_
  Element* q_pairs_;         // pair form, [kGradBlock / kPack][kLd]
  Element* do_pairs_;
  Element* q_columns_;  // per panel [head_dim / kPack][kPanel]
  Element* do_columns_;
  Element* rows_;
  float* dq_;  // per panel [head_dim][kPanel]
  float* wide_rows_;
  float* s_;    // [kGradBlock][kPanel]
  Element* p_;  // per panel [kGradBlock][kPanel / kPack]
  Element* ds_;
  Element* ds_pairs_;  // [kGradBlock / kPack][kPanel], of one panel
};

template <class M, bool kModified>
void backward_as(const Problem& problem, const BackwardTask& task, std::span<std::byte> scratch) {
  if constexpr (!kModified) {
    if (problem.head_dim == 64) return Backward<M, 64, 64, false>::run(problem, task, scratch);
    if (problem.head_dim == 128) return Backward<M, 128, 128, false>::run(problem, task, scratch);
  }
  if (problem.head_dim <= kMediumHeadDim)
    return Backward<M, packed_dim(kMediumHeadDim), 0, kModified>::run(problem, task, scratch);
  return Backward<M, packed_dim(kMaxHeadDim), 0, kModified>::run(problem, task, scratch);
}

template <class M>
void backward(const Problem& problem, const BackwardTask& task, std::span<std::byte> scratch) {
  if constexpr (!kOnlyGeneral) {
    if (!problem.caps_or_drops()) return backward_as<M, false>(problem, task, scratch);
  }
  return backward_as<M, true>(problem, task, scratch);
}

}  // namespace annulus::cpu::ANNULUS_ISA
