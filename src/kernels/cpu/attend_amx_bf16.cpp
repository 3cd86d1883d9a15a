// bf16 on the tiles of AMX (Sapphire Rapids and later). The tiles need no compiler flag, being asm;
// the rest is asked for by a pragma, as in attend_avx512_bf16.cpp.

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>

#include "annulus/half.h"
#include "kernels/cpu/implementations.h"
#include "kernels/cpu/kernel.h"
#include "kernels/cpu/key_places.h"
#include "kernels/cpu/large_lse.h"
#include "kernels/cpu/row_stream.h"

#if defined(__x86_64__) && defined(__GNUC__) && defined(__linux__)

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#define HWY_COMPILE_ALL_ATTAINABLE
#include <hwy/detect_targets.h>
#undef HWY_TARGET
#define HWY_TARGET HWY_AVX3
#include <hwy/highway.h>

#include <hwy/cache_control.h>

#define ANNULUS_ISA n_amx_bf16
#define ANNULUS_BF16_DOT 0
#define ANNULUS_AMX_TILES 1

HWY_PUSH_ATTRIBUTES(HWY_TARGET_STR ",avx512bf16")
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

// Linux hands out the 8 KiB of tile state on request, to the whole process and for good. Containers
// and hypervisors may refuse.
std::string tile_complaint() {
  constexpr unsigned kBf16 = 1U << 22;
  constexpr unsigned kTile = 1U << 24;
  unsigned a = 0;
  unsigned b = 0;
  unsigned c = 0;
  unsigned d = 0;
  __builtin_cpu_init();
  const bool vectors =
      (hwy::SupportedTargets() & HWY_AVX3) != 0 && __builtin_cpu_supports("avx512bf16");
  if (!vectors || __get_cpuid_count(7, 0, &a, &b, &c, &d) == 0 || (d & kBf16) == 0 ||
      (d & kTile) == 0) {
    return "this CPU has no AMX tiles for bf16";
  }
  constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr long kTileData = 18;
  if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0) return "";
  return std::string(
             "this CPU has AMX tiles, but the system does not let this process use them (") +
         std::strerror(errno) + ")";
}

const Kernels* g_others = nullptr;

void forward_by_dtype(const Problem& problem, const ForwardTask& task,
                      std::span<std::byte> scratch) {
  return problem.dtype == DType::bf16 ? n_amx_bf16::tile_forward(problem, task, scratch)
                                      : g_others->forward(problem, task, scratch);
}

void backward_by_dtype(const Problem& problem, const BackwardTask& task,
                       std::span<std::byte> scratch) {
  return problem.dtype == DType::bf16 ? n_amx_bf16::tile_backward(problem, task, scratch)
                                      : g_others->backward(problem, task, scratch);
}

std::int64_t packed_bytes(const Problem& problem, std::int64_t rows) {
  return problem.dtype == DType::bf16 ? n_amx_bf16::packed_bytes(problem, rows) : 0;
}

}  // namespace

std::vector<Implementation> amx_bf16_implementations(const Kernels& others) {
  g_others = &others;
  static Kernels kernels = others;
  kernels.name = "amx_bf16";
  kernels.native_bf16 = true;
  kernels.forward = &forward_by_dtype;
  kernels.backward = &backward_by_dtype;
  kernels.packed_bytes = &packed_bytes;
  kernels.pack_keys = &n_amx_bf16::pack_tiles;
  return {{&kernels, tile_complaint(), &n_amx_bf16::tile_rate}};
}

}  // namespace annulus::cpu

#else

namespace annulus::cpu {
std::vector<Implementation> amx_bf16_implementations(const Kernels&) { return {}; }
}  // namespace annulus::cpu

#endif
