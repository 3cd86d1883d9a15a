// bf16 on the tiles of AMX (Sapphire Rapids and later). Tile instructions are inline asm and need
// no compiler flag. A pragma enables the other instructions, as in attend_avx512_bf16.cpp.

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstring>

#include "annulus/half.h"
#include "kernels/cpu/implementations.h"
#include "kernels/cpu/kernel.h"
#include "kernels/cpu/key_places.h"
#include "kernels/cpu/large_lse.h"
#include "kernels/cpu/row_stream.h"
#include "kernels/cpu/sink.h"

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
#define ANNULUS_TILE_TARGET HWY_TARGET_STR ",avx512bf16"
#include "kernels/cpu/tile_kernels-inl.h"

namespace annulus::cpu {
namespace {

// A process has to ask Linux once for the 8 KiB of tile state. Containers and hypervisors may
// reject the request.
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
  // Linux needs room for the tiles on all of them, otherwise it reports ENOSPC.
  const std::string reason = errno == ENOSPC
                                 ? "a thread has an alternate signal stack that is too small"
                                 : std::strerror(errno);
  return "this CPU has AMX tiles, but the system does not let this process use them (" + reason +
         ")";
}

}  // namespace

std::vector<Implementation> amx_bf16_implementations(const Kernels& others) {
  static const Kernels kernels = n_amx_bf16::tile_kernels("amx_bf16", others);
  return {{&kernels, tile_complaint(), &n_amx_bf16::tile_rate}};
}

}  // namespace annulus::cpu

#else

namespace annulus::cpu {
std::vector<Implementation> amx_bf16_implementations(const Kernels&) { return {}; }
}  // namespace annulus::cpu

#endif
