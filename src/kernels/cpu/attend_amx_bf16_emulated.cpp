// The kernels of attend_amx_bf16.cpp with tiles emulated in plain AVX-512: the same source and, as
// far as the manual specifies tile products, the same bits. For tests on machines without tiles.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "annulus/half.h"
#include "kernels/cpu/implementations.h"
#include "kernels/cpu/kernel.h"
#include "kernels/cpu/key_places.h"
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

#define ANNULUS_ISA n_amx_bf16_emulated
#define ANNULUS_BF16_DOT 0
#define ANNULUS_AMX_TILES 0
#define ANNULUS_TILE_TARGET HWY_TARGET_STR
#include "kernels/cpu/tile_kernels-inl.h"

namespace annulus::cpu {

std::vector<Implementation> amx_bf16_emulated_implementations(const Kernels& others) {
  static const Kernels kernels = n_amx_bf16_emulated::tile_kernels("amx_bf16_emulated", others);
  const bool usable = (hwy::SupportedTargets() & HWY_AVX3) != 0;
  return {{&kernels, usable ? "" : kNotThisCpu, &n_amx_bf16_emulated::tile_rate, true}};
}

}  // namespace annulus::cpu

#else

namespace annulus::cpu {
std::vector<Implementation> amx_bf16_emulated_implementations(const Kernels&) { return {}; }
}  // namespace annulus::cpu

#endif
