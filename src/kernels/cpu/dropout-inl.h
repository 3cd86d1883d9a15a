// Dropout: which pairs of a block of keys and a panel of queries lose their probability. The words
// of rows and keys, and what becomes of them, are those of kernels/dropout.h. See simd-inl.h for
// how this is included.

namespace annulus::cpu::ANNULUS_ISA {

using DU = hn::RebindToUnsigned<DF>;
constexpr DU kU;

// dropout::Row of queries, lane by lane.
struct LaneWords {
  std::uint32_t* flip;
  std::uint32_t* factor;

  [[nodiscard]] LaneWords operator+(int lanes) const { return {flip + lanes, factor + lanes}; }
  void set(int lane, const dropout::Row& row) const {
    flip[lane] = row.flip;
    factor[lane] = row.factor;
  }
};

class Dropout {
 public:
  Dropout(const DropoutRate& rate, const dropout::Rows& rows) : rate_(rate), rows_(rows) {}

  [[nodiscard]] bool on() const { return rate_.drops(); }
  [[nodiscard]] float scale() const { return rate_.scale; }
  [[nodiscard]] const dropout::Rows& rows() const { return rows_; }

  // `x` in the lanes that keep the pair with the key, else 0.
  [[nodiscard]] HWY_INLINE VF keep(VF x, const LaneWords& lanes, std::uint32_t key) const {
    auto number =
        hn::Mul(hn::Xor(hn::Set(kU, key), hn::Load(kU, lanes.flip)), hn::Load(kU, lanes.factor));
    number =
        hn::Mul(hn::Xor(number, hn::ShiftRight<16>(number)), hn::Set(kU, dropout::kLastFactor));
    const auto drops = hn::Lt(hn::BitCast(kI, number), hn::Set(kI, rate_.threshold));
    return hn::IfThenZeroElse(hn::RebindMask(kF, drops), x);
  }

 private:
  DropoutRate rate_;
  dropout::Rows rows_;
};

}  // namespace annulus::cpu::ANNULUS_ISA
