// Measures the machine's multiply-add rate, the upper bound in benchmarks and documents. See
// simd-inl.h for how this is included.

namespace annulus::cpu::ANNULUS_ISA {

// Runs `rounds` x kRows x kVectors dependent chains through the same multiply-add as the kernels;
// returns the FLOPs done. The sum is written to `sink`, so that the compiler cannot remove the
// chains.
template <class M>
HWY_NOINLINE double multiply_add_rounds(std::int64_t rounds, float* sink) {
  VF acc[kRows][kVectors];
  fill_tile<0>(acc, nullptr);
  const typename M::Element one{};
  const VF b = hn::Set(kF, 0.5F);
  ANNULUS_UNROLL(1)
  for (std::int64_t r = 0; r < rounds; ++r) {
    ANNULUS_UNROLL(8)
    for (int i = 0; i < kRows; ++i) {
      ANNULUS_UNROLL(2)
      for (int j = 0; j < kVectors; ++j) {
        acc[i][j] = pin(M::broadcast_multiply_add(&one, b, acc[i][j]));
      }
    }
  }
  VF sum = hn::Zero(kF);
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < kVectors; ++j) sum = hn::Add(sum, acc[i][j]);
  }
  *sink += hn::GetLane(sum);
  return static_cast<double>(rounds) * kRows * kVectors * kLanes * 2 * M::kPack;
}

inline double fma_rate(std::int64_t rounds, float* sink) {
  return multiply_add_rounds<MultiplyF32>(rounds, sink);
}

}  // namespace annulus::cpu::ANNULUS_ISA
