// The kernels for every instruction set that Highway supports here: scalar, AVX2 and AVX-512 on
// x86, NEON on Arm. foreach_target.h compiles this file once per set.

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

// SSSE3 and SSE4 machines use the scalar code: they are too old for long sequences. SVE is left out
// because its vectors have no size at compile time.
#define HWY_COMPILE_ALL_ATTAINABLE
#define HWY_DISABLED_TARGETS \
  (HWY_SSSE3 | HWY_SSE4 | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/attend_highway.cpp"
#include <hwy/foreach_target.h>  // must come before highway.h
#include <hwy/highway.h>

#include <hwy/cache_control.h>

#undef ANNULUS_ISA
#undef ANNULUS_BF16_DOT
#define ANNULUS_ISA HWY_NAMESPACE
#define ANNULUS_BF16_DOT 0

HWY_BEFORE_NAMESPACE();
#undef ANNULUS_PRAGMA
#undef ANNULUS_UNROLL
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
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

namespace annulus::cpu {
namespace {

#define ANNULUS_IMPLEMENTATION(space, label)                                                 \
  {                                                                                          \
    label, false, &space::forward<space::MultiplyF32>, &space::backward<space::MultiplyF32>, \
        &space::dot_rows, &space::store_row, nullptr, nullptr, &space::few_rows,             \
        &space::load_few_query                                                               \
  }

std::string complaint(std::int64_t target) {
  return (hwy::SupportedTargets() & target) != 0 ? "" : kNotThisCpu;
}

}  // namespace

std::vector<Implementation> highway_implementations() {
  std::vector<Implementation> out;
#if HWY_TARGETS & HWY_AVX3
  static const Kernels avx512 = ANNULUS_IMPLEMENTATION(N_AVX3, "avx512");
  out.push_back({&avx512, complaint(HWY_AVX3), &N_AVX3::fma_rate});
#endif
#if HWY_TARGETS & HWY_AVX2
  static const Kernels avx2 = ANNULUS_IMPLEMENTATION(N_AVX2, "avx2");
  out.push_back({&avx2, complaint(HWY_AVX2), &N_AVX2::fma_rate});
#endif
#if HWY_TARGETS & HWY_NEON
  static const Kernels neon = ANNULUS_IMPLEMENTATION(N_NEON, "neon");
  out.push_back({&neon, complaint(HWY_NEON), &N_NEON::fma_rate});
#endif
#if HWY_TARGETS & HWY_SCALAR
  static const Kernels scalar = ANNULUS_IMPLEMENTATION(N_SCALAR, "scalar");
  out.push_back({&scalar, "", &N_SCALAR::fma_rate});
#elif HWY_TARGETS & HWY_EMU128
  static const Kernels scalar = ANNULUS_IMPLEMENTATION(N_EMU128, "scalar");
  out.push_back({&scalar, "", &N_EMU128::fma_rate});
#endif
  return out;
}

}  // namespace annulus::cpu
#endif  // HWY_ONCE
