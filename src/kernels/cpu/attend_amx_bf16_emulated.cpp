// The kernels of attend_amx_bf16.cpp with tiles in plain AVX-512: the same source and, as far as
// the manual says what a tile product computes, the same bits. For tests on machines without tiles.

#include <algorithm>
#include <cmath>
#include <cstring>

#include "annulus/half.h"
#include "kernels/cpu/implementations.h"
#include "kernels/cpu/kernel.h"
#include "kernels/cpu/key_places.h"
#include "kernels/cpu/large_lse.h"
#include "kernels/cpu/row_stream.h"

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

HWY_PUSH_ATTRIBUTES(HWY_TARGET_STR)
#include "kernels/cpu/simd-inl.h"
#include "kernels/cpu/pack-inl.h"
#include "kernels/cpu/tiles-inl.h"
#include "kernels/cpu/tile_pack-inl.h"
#include "kernels/cpu/tile_pipeline-inl.h"
#include "kernels/cpu/tile_forward-inl.h"
#include "kernels/cpu/tile_gradient_pack-inl.h"
#include "kernels/cpu/tile_products-inl.h"
#include "kernels/cpu/tile_backward-inl.h"
HWY_POP_ATTRIBUTES

namespace annulus::cpu {
namespace {

const Kernels* g_others = nullptr;

void forward_by_dtype(const Problem& problem, const ForwardTask& task,
                      std::span<std::byte> scratch) {
  return problem.dtype == DType::bf16 ? n_amx_bf16_emulated::tile_forward(problem, task, scratch)
                                      : g_others->forward(problem, task, scratch);
}

void backward_by_dtype(const Problem& problem, const BackwardTask& task,
                       std::span<std::byte> scratch) {
  return problem.dtype == DType::bf16 ? n_amx_bf16_emulated::tile_backward(problem, task, scratch)
                                      : g_others->backward(problem, task, scratch);
}

std::int64_t packed_bytes(const Problem& problem, std::int64_t rows) {
  return problem.dtype == DType::bf16 ? n_amx_bf16_emulated::packed_bytes(problem, rows) : 0;
}

}  // namespace

std::vector<Implementation> amx_bf16_emulated_implementations(const Kernels& others) {
  g_others = &others;
  static Kernels kernels = others;
  kernels.name = "amx_bf16_emulated";
  kernels.native_bf16 = true;
  kernels.forward = &forward_by_dtype;
  kernels.backward = &backward_by_dtype;
  kernels.packed_bytes = &packed_bytes;
  kernels.pack_keys = &n_amx_bf16_emulated::pack_tiles;
  const bool usable = (hwy::SupportedTargets() & HWY_AVX3) != 0;
  return {{&kernels, usable ? "" : kNotThisCpu, &n_amx_bf16_emulated::tile_rate, true}};
}

}  // namespace annulus::cpu

#else

namespace annulus::cpu {
std::vector<Implementation> amx_bf16_emulated_implementations(const Kernels&) { return {}; }
}  // namespace annulus::cpu

#endif
