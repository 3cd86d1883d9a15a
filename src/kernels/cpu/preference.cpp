#include "kernels/cpu/preference.h"

#include <algorithm>
#include <array>

#include <fmt/format.h>

namespace annulus::cpu {
namespace {

constexpr std::string_view kTiles = "amx_bf16";
constexpr std::string_view kNativeBf16 = "avx512_bf16";

// VDPBF16PS does 64 FLOPs on a 512-bit register, a multiply-add 32. Their throughput decides:
// - Zen 4 and 5 start as many of one as of the other: 233 against 118 GFLOP/s on one core of an
//   EPYC of family 25 ('annulus doctor').
// - Emerald Rapids (model 207) starts one VDPBF16PS in two cycles, but four multiply-adds: 84
//   against 166 GFLOP/s on one core. https://github.com/libxsmm/tpp-mlir/pull/1025 also has it at
//   half the rate of fp32, and Zen 5 as fast. Sapphire Rapids is the same core (Golden Cove) with
//   smaller caches.
// - Granite Rapids (173, 174) and Cooper Lake (85 from stepping 10 on) are not listed, because our
//   kernels were not measured on them. The first descends from Golden Cove. The second has two
//   512-bit multiply-add ports, so native bf16 would win only if both could start a VDPBF16PS in
//   every cycle.
struct Known {
  std::string_view vendor;
  int family;
  int model;  // kAnyModel: all with this instruction
  Bf16Dot bf16_dot;
};
constexpr int kAnyModel = -1;
constexpr std::array<Known, 4> kKnown = {{
    {"AuthenticAMD", 25, kAnyModel, Bf16Dot::fast},  // Zen 4; Zen 3 has no AVX-512
    {"AuthenticAMD", 26, kAnyModel, Bf16Dot::fast},  // Zen 5
    {"GenuineIntel", 6, 143, Bf16Dot::slow},         // Sapphire Rapids
    {"GenuineIntel", 6, 207, Bf16Dot::slow},         // Emerald Rapids
}};

}  // namespace

Bf16Dot bf16_dot_of(const CpuIdentity& cpu) {
  for (const Known& known : kKnown) {
    if (known.vendor == cpu.vendor && known.family == cpu.family &&
        (known.model == kAnyModel || known.model == cpu.model)) {
      return known.bf16_dot;
    }
  }
  return Bf16Dot::unknown;
}

IsaChoice choose_isa(const CpuIdentity& cpu, std::span<const std::string_view> usable) {
  // 1,024 FLOPs a cycle against 64 of fp32 (Emerald Rapids): no CPU with tiles is known to be
  // faster without them.
  if (usable.front() == kTiles) return {kTiles, "the best that runs here: this CPU has tiles"};
  const auto wide = std::find_if(usable.begin(), usable.end(),
                                 [](std::string_view name) { return name != kNativeBf16; });
  if (usable.front() != kNativeBf16 || wide == usable.end()) {
    return {usable.front(), "the best that runs here"};
  }
  const std::string which = fmt::format("{} family {} model {}", cpu.vendor, cpu.family, cpu.model);
  switch (bf16_dot_of(cpu)) {
    case Bf16Dot::fast:
      return {kNativeBf16,
              fmt::format("the best that runs here: {} multiplies bf16 faster than fp32", which)};
    case Bf16Dot::slow:
      return {*wide, fmt::format("{} multiplies bf16 more slowly than fp32", which)};
    case Bf16Dot::unknown:
      break;
  }
  return {*wide, fmt::format("{} is not known to multiply bf16 faster than fp32", which)};
}

}  // namespace annulus::cpu
