// The query rows of a forward task in scratch, as panels: Q^T, the running O^T, references and sums
// of weights. Loads them from the rows and stores the results. Included before forward-inl.h; see
// simd-inl.h for how.

namespace annulus::cpu::ANNULUS_ISA {

// One panel. Results of a row depend on its own lane only.
template <class M>
struct QueryPanel {
  const typename M::Element* q;  // [head_dim / kPack][kPanel]
  float* o;                      // [head_dim][kPanel], not normalised
  float* minus_reference;        // [kPanel]; added to a score in log2 units
  float* sum;                    // [kPanel], of weights; 0: no key seen yet
  float* rounded_sum;            // [kPanel], of weights as they are multiplied with V
  LaneLimits keys;               // [kPanel]: the keys that each query sees
  const float* repeats;          // [key class][kPanel]; see repeat_weights
  LaneWords words;               // [kPanel], of dropout
  PanelLimits limits;
};

// All panels of a task. kLd: elements of a packed row. kFd: head_dim where it is known at compile
// time, else 0. kModified: there may be a softcap, dropout or both.
template <class M, int kLd, int kFd, bool kModified>
class QueryPanels {
  using Element = typename M::Element;

 public:
  QueryPanels(const Problem& problem, const ForwardTask& task, const Dropout& dropout,
              Scratch& scratch)
      : problem_(problem),
        task_(task),
        dropout_(dropout),
        padded_dim_(padded_dim(head_dim())),
        queries_(static_cast<int>(task.query_end - task.query_begin)),
        count_((queries_ + kPanel - 1) / kPanel),
        classes_(task.repeats.empty() ? 0 : 1 << task.repeats.size()) {
    const auto lanes = static_cast<std::size_t>(count_ * kPanel);
    const auto dim = static_cast<std::size_t>(padded_dim_);
    refs_ = scratch.take<RowStream::Ref>(lanes);
    q_ = scratch.take<Element>(lanes * dim / M::kPack);
    o_ = scratch.take<float>(lanes * dim);
    minus_reference_ = scratch.take<float>(lanes);
    sum_ = scratch.take<float>(lanes);
    rounded_sum_ = M::kPack == 2 ? scratch.take<float>(lanes) : sum_;
    before_ = scratch.take<std::int32_t>(lanes);
    last_ = scratch.take<std::int32_t>(lanes);
    repeats_ = scratch.take<float>(lanes * static_cast<std::size_t>(classes_));
    if constexpr (kModified)
      words_ = {scratch.take<std::uint32_t>(lanes), scratch.take<std::uint32_t>(lanes)};
    rows_ = scratch.take<float>(static_cast<std::size_t>(kPanel) * kLd);
  }

  [[nodiscard]] int count() const { return count_; }
  // Number of key classes (see repeat_class); 0: every pair counts once.
  [[nodiscard]] int classes() const { return classes_; }

  [[nodiscard]] QueryPanel<M> panel(int p) const {
    const int first = p * kPanel;
    const LaneLimits keys{before_ + first, last_ + first};
    return {q_ + first * padded_dim_ / M::kPack,
            o_ + first * padded_dim_,
            minus_reference_ + first,
            sum_ + first,
            rounded_sum_ + first,
            keys,
            repeats_ + first * classes_,
            kModified ? words_ + first : LaneWords{},
            panel_limits(keys)};
  }

  // Packs Q, multiplied by `query_factor`, and loads the state.
  void load(float query_factor) {
    RowStream stream(task_.queries, task_.query_begin, task_.query_end);
    stream.take(queries_, refs_);
    const std::size_t row_bytes = static_cast<std::size_t>(head_dim()) * size_of(problem_.dtype);
    const std::size_t state_bytes = static_cast<std::size_t>(head_dim()) * sizeof(float);
    for (int p = 0; p < count_; ++p) {
      const int first = p * kPanel;
      const int count = std::min(kPanel, queries_ - first);
      auto* rows = reinterpret_cast<Element*>(rows_);
      for (int i = first + kPanel; i < std::min(queries_, first + 2 * kPanel); ++i) {
        prefetch_row(refs_[i].at(kQuery), row_bytes);
        if (task_.load_state) prefetch_row(refs_[i].at(kState), state_bytes);
      }
      Packer<M, kLd>::pack(problem_.dtype, refs_ + first, kQuery, count, kPanel, query_factor,
                           head_dim(), padded_dim_, rows, nullptr);
      rows_to_panel(rows, kLd / M::kPack, padded_dim_ / M::kPack,
                    q_ + first * padded_dim_ / M::kPack);
      for (int i = 0; i < kPanel; ++i) {
        // Lanes past the end repeat the last index, so they do not affect which tiles a panel
        // skips.
        const RowStream::Ref& ref = refs_[first + std::min(i, count - 1)];
        const KeyLimits keys = key_limits(task_.band, ref.index());
        before_[first + i] = keys.before;
        last_[first + i] = keys.last;
        minus_reference_[first + i] = 0.0F;
        sum_[first + i] = rounded_sum_[first + i] = 0.0F;
        repeat_weights(task_.repeats, ref.index(), repeats_ + first * classes_ + i, kPanel);
        if constexpr (kModified) words_.set(first + i, dropout_.rows().query(ref.index()));
      }
      if (task_.load_state) {
        load_state(first, count);
      } else {
        std::memset(o_ + first * padded_dim_, 0,
                    sizeof(float) * static_cast<std::size_t>(kPanel * padded_dim_));
      }
    }
  }

  // Normalises O, merges sinks, and writes O and log-sum-exp to the rows.
  void store() {
    for (int p = 0; p < count_; ++p) {
      const int first = p * kPanel;
      const int count = std::min(kPanel, queries_ - first);
      const std::size_t out_bytes = static_cast<std::size_t>(head_dim()) * size_of(task_.out_dtype);
      for (int i = first; i < first + count; ++i)
        prefetch_row_to_write(refs_[i].at(kOut), out_bytes);
      float* o = o_ + first * padded_dim_;
      // Two separate products, because the engine does the second one if several tasks write a row.
      // Bits must not depend on that (see ForwardTask::sink).
      HWY_ALIGN float inverse[kPanel];
      HWY_ALIGN float kept[kPanel];
      for (int i = 0; i < kPanel; ++i) {
        const float sum = sum_[first + i];
        const float log_sum = std::log2(sum) - minus_reference_[first + i];
        const WithSink row = with_sink(sum == 0.0F ? -INFINITY : log_sum * kLn2, task_.sink);
        const float kept_weights = kModified ? dropout_.scale() : 1.0F;
        inverse[i] = sum == 0.0F ? 1.0F : kept_weights / rounded_sum_[first + i];
        kept[i] = row.kept;
        if (i >= count) continue;
        if (HWY_UNLIKELY(sum == 0.0F)) {  // no key seen: 0, even if values are Inf
          for (int d = 0; d < head_dim(); ++d) o[d * kPanel + i] = 0.0F;
        }
        *reinterpret_cast<float*>(refs_[first + i].at(kLse)) = row.lse;
      }
      for (int d = 0; d < head_dim(); ++d) {
        for (int j = 0; j < kPanel; j += kLanes) {
          float* at = o + d * kPanel + j;
          const VF one = hn::Mul(hn::Load(kF, at), hn::Load(kF, inverse + j));
          hn::Store(hn::Mul(one, hn::Load(kF, kept + j)), kF, at);
        }
      }
      panel_to_rows(o, padded_dim_, rows_, kLd);
      for (int i = 0; i < count; ++i) {
        store_row(task_.out_dtype, rows_ + i * kLd, 1.0F, refs_[first + i].at(kOut), head_dim());
      }
    }
  }

 private:
  [[nodiscard]] HWY_INLINE int head_dim() const { return kFd != 0 ? kFd : problem_.head_dim; }

  // The state is normalised: O as it would be stored now, and its log-sum-exp L. So reference = L
  // and sum = 1. With dropout, O is still to be multiplied by its scale: with L - log(scale)
  // as reference and sum = scale it stays as it is.
  void load_state(int first, int count) {
    for (int i = 0; i < kPanel; ++i) {
      float* row = rows_ + i * kLd;
      const float lse =
          i < count ? *reinterpret_cast<const float*>(refs_[first + i].at(kLse)) : -INFINITY;
      if (lse == -INFINITY) {  // no key seen yet, so the state is not initialised
        std::memset(row, 0, sizeof(float) * static_cast<std::size_t>(padded_dim_));
        continue;
      }
      const auto* state = reinterpret_cast<const float*>(refs_[first + i].at(kState));
      std::memcpy(row, state, sizeof(float) * static_cast<std::size_t>(head_dim()));
      std::memset(row + head_dim(), 0,
                  sizeof(float) * static_cast<std::size_t>(padded_dim_ - head_dim()));
      minus_reference_[first + i] = -lse * kLog2E;
      sum_[first + i] = rounded_sum_[first + i] = 1.0F;
      if constexpr (kModified) {
        minus_reference_[first + i] += std::log2(dropout_.scale());
        sum_[first + i] = rounded_sum_[first + i] = dropout_.scale();
      }
    }
    rows_to_panel(rows_, kLd, padded_dim_, o_ + first * padded_dim_);
  }

  const Problem& problem_;
  const ForwardTask& task_;
  const Dropout& dropout_;
  int padded_dim_;
  int queries_;
  int count_;
  int classes_;
  RowStream::Ref* refs_;
  Element* q_;
  float* o_;
  float* minus_reference_;
  float* sum_;
  float* rounded_sum_;
  std::int32_t* before_;
  std::int32_t* last_;
  float* repeats_;  // per panel [classes_][kPanel]
  LaneWords words_{};
  float* rows_;
};

}  // namespace annulus::cpu::ANNULUS_ISA
