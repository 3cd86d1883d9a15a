// The same kernels with the bf16 dot product of AVX512_BF16, which the packaged Highway does not
// support. Other dtypes use the plain AVX-512 code. A pragma enables the instruction set for this
// code only: a compiler flag for the whole file would also apply to inline functions that other
// files share.

#include <algorithm>
#include <cmath>
#include <cstring>

#include "annulus/half.h"
#include "core/thread_pool.h"
#include "kernels/cpu/implementations.h"
#include "kernels/cpu/kernel.h"
#include "kernels/cpu/large_lse.h"
#include "kernels/cpu/row_stream.h"
#include "kernels/cpu/sink.h"

#if defined(__x86_64__) && defined(__GNUC__)

#define HWY_COMPILE_ALL_ATTAINABLE
#include <hwy/detect_targets.h>
#undef HWY_TARGET
#define HWY_TARGET HWY_AVX3
#include <hwy/highway.h>

#include <hwy/cache_control.h>

#define ANNULUS_ISA n_avx512_bf16
#define ANNULUS_BF16_DOT 1

HWY_PUSH_ATTRIBUTES(HWY_TARGET_STR ",avx512bf16")
#include "kernels/cpu/simd-inl.h"
#include "kernels/cpu/pack-inl.h"
#include "kernels/cpu/reach-inl.h"
#include "kernels/cpu/softcap-inl.h"
#include "kernels/cpu/dropout-inl.h"
#include "kernels/cpu/query_panels-inl.h"
#include "kernels/cpu/forward-inl.h"
#include "kernels/cpu/backward-inl.h"
#include "kernels/cpu/few_rows-inl.h"
#include "kernels/cpu/peak-inl.h"

namespace annulus::cpu::n_avx512_bf16 {
double dot_rate(std::int64_t rounds, float* sink) {
  return multiply_add_rounds<MultiplyBf16>(rounds, sink);
}
}  // namespace annulus::cpu::n_avx512_bf16
HWY_POP_ATTRIBUTES

namespace annulus::cpu {
namespace {

const Kernels* other_dtypes = nullptr;

void forward_by_dtype(const Problem& problem, const ForwardTask& task,
                      std::span<std::byte> scratch) {
  using namespace n_avx512_bf16;
  return problem.dtype == DType::bf16 ? forward<MultiplyBf16>(problem, task, scratch)
                                      : other_dtypes->forward(problem, task, scratch);
}

void backward_by_dtype(const Problem& problem, const BackwardTask& task,
                       std::span<std::byte> scratch) {
  using namespace n_avx512_bf16;
  return problem.dtype == DType::bf16 ? backward<MultiplyBf16>(problem, task, scratch)
                                      : other_dtypes->backward(problem, task, scratch);
}

}  // namespace

std::vector<Implementation> avx512_bf16_implementations(const Kernels& others) {
  other_dtypes = &others;
  static const Kernels kernels{"avx512_bf16",
                               true,
                               &forward_by_dtype,
                               &backward_by_dtype,
                               &n_avx512_bf16::dot_rows,
                               &n_avx512_bf16::store_row,
                               nullptr,
                               nullptr,
                               &n_avx512_bf16::few_rows,
                               &n_avx512_bf16::load_few_query};
  __builtin_cpu_init();
  const bool usable =
      (hwy::SupportedTargets() & HWY_AVX3) != 0 && __builtin_cpu_supports("avx512bf16");
  return {{&kernels, usable ? "" : kNotThisCpu, &n_avx512_bf16::dot_rate}};
}

}  // namespace annulus::cpu

#else

namespace annulus::cpu {
std::vector<Implementation> avx512_bf16_implementations(const Kernels&) { return {}; }
}  // namespace annulus::cpu

#endif
