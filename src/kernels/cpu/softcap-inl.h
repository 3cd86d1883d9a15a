// Softcap: scores in log2 units become c * log2(e) * tanh(s / c). See simd-inl.h for how this is
// included.

namespace annulus::cpu::ANNULUS_ISA {

struct Tanh {
  VF value;
  VF slope;  // 1 - value^2
};

// tanh(x), given y = 2 * log2(e) * x, and its derivative, both to 4e-7 relative, however small: a
// score is as good as without a cap. With e^(2x) = 2^n 2^f = t + 1 nothing cancels in
// t = 2^n (2^f - 1) + (2^n - 1); tanh(x) is t / (t + 2), its derivative 4 (t + 1) / (t + 2)^2.
HWY_INLINE Tanh tanh_vector(VF y) {
  // tanh is 1 in fp32 from y = 26 on. NaN stays NaN.
  const VF most = hn::Set(kF, 32.0F);
  y = hn::IfThenElse(hn::Gt(hn::Abs(y), most), hn::CopySign(most, y), y);
  const VF n = hn::Round(y);
  const VF f = hn::Sub(y, n);
  VF p = hn::MulAdd(f, hn::Set(kF, 0.00015403511F), hn::Set(kF, 0.0013390736F));
  p = hn::MulAdd(p, f, hn::Set(kF, 0.0096182376F));
  p = hn::MulAdd(p, f, hn::Set(kF, 0.055503573F));
  p = hn::MulAdd(p, f, hn::Set(kF, 0.24022649F));
  p = hn::MulAdd(p, f, hn::Set(kF, 0.69314718F));
  p = hn::Mul(p, f);
  const auto exponent = hn::Add(hn::ConvertTo(kI, n), hn::Set(kI, 127));
  const VF power = hn::BitCast(kF, hn::ShiftLeft<23>(exponent));
  const VF t = hn::MulAdd(power, p, hn::Sub(power, hn::Set(kF, 1.0F)));
  const VF inverse = hn::Div(hn::Set(kF, 1.0F), hn::Add(t, hn::Set(kF, 2.0F)));
  const VF twice = hn::Add(inverse, inverse);
  return {hn::Mul(t, inverse), hn::Mul(hn::MulAdd(power, p, power), hn::Mul(twice, twice))};
}

// What products of Q and K go through. M as in simd-inl.h: fp32 has scale * log2(e) in Q.
template <class M>
class Softcap {
 public:
  explicit Softcap(const Problem& problem)
      : on_(problem.softcap != 0),
        inner_(M::kPack == 1 ? 2.0F / problem.softcap
                             : 2.0F * kLog2E * problem.scale / problem.softcap),
        outer_(problem.softcap * kLog2E) {}

  [[nodiscard]] bool on() const { return on_; }
  // What remains to multiply with until a score is in log2 units.
  [[nodiscard]] float score_factor(float uncapped) const { return on_ ? 1.0F : uncapped; }

  // `slopes`: where the derivatives go, rows of kPanel; null: nowhere.
  template <int kV0>
  HWY_INLINE void apply(VF (&acc)[kRows][kVectors], float* slopes = nullptr) const {
    if (!on_) return;
    const VF inner = hn::Set(kF, inner_);
    const VF outer = hn::Set(kF, outer_);
    ANNULUS_UNROLL(8)
    for (int i = 0; i < kRows; ++i) {
      ANNULUS_UNROLL(2)
      for (int j = kV0; j < kVectors; ++j) {
        const Tanh tanh = tanh_vector(hn::Mul(acc[i][j], inner));
        acc[i][j] = hn::Mul(tanh.value, outer);
        if (slopes != nullptr) hn::Store(tanh.slope, kF, slopes + i * kPanel + j * kLanes);
      }
    }
  }

 private:
  bool on_;
  float inner_;
  float outer_;
};

}  // namespace annulus::cpu::ANNULUS_ISA
