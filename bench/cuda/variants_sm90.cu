// Variants of the Hopper forward kernels for variants_sm90.sh: bf16, no general weights. One file,
// compiled in parts: -DPART_DIM and -DPART_CAUSAL for kernels, neither for what chooses among them.
#include "kernels/cuda/forward_sm90_kernel.cuh"

namespace annulus::cuda::sm90 {

template <int kDim, bool kCausal>
ForwardKernel variant(PairWeights weights);

#ifdef PART_DIM
template <>
ForwardKernel variant<PART_DIM, PART_CAUSAL != 0>(PairWeights weights) {
  return weights == PairWeights::none
             ? attend_forward<__nv_bfloat16, PART_DIM, PART_CAUSAL != 0, PairWeights::none>
             : attend_forward<__nv_bfloat16, PART_DIM, PART_CAUSAL != 0, PairWeights::periodic>;
}
#else
template <>
ForwardKernel variant<64, false>(PairWeights weights);
template <>
ForwardKernel variant<64, true>(PairWeights weights);
template <>
ForwardKernel variant<128, false>(PairWeights weights);
template <>
ForwardKernel variant<128, true>(PairWeights weights);

ForwardKernel forward_bf16_d64(bool causal, PairWeights weights) {
  return causal ? variant<64, true>(weights) : variant<64, false>(weights);
}
ForwardKernel forward_bf16_d128(bool causal, PairWeights weights) {
  return causal ? variant<128, true>(weights) : variant<128, false>(weights);
}
ForwardKernel forward_f16_d64(bool, PairWeights) { return nullptr; }
ForwardKernel forward_f16_d128(bool, PairWeights) { return nullptr; }
#endif

}  // namespace annulus::cuda::sm90
