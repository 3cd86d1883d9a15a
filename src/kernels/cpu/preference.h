#pragma once

#include <span>
#include <string>
#include <string_view>

#include "core/machine.h"

namespace annulus::cpu {

// How fast a CPU's native bf16 products (AVX512_BF16) are, compared with fp32 multiply-adds on
// vectors of the same width.
enum class Bf16Dot {
  fast,     // more FLOP/s than fp32
  slow,     // fewer
  unknown,  // no measurement known
};
[[nodiscard]] Bf16Dot bf16_dot_of(const CpuIdentity& cpu);

struct IsaChoice {
  std::string_view name;  // one of `usable`
  std::string reason;     // for messages
};

// The set that runs if none is forced: the first of `usable` (widest first, not empty), but
// "avx512_bf16" only on CPUs on which it is known to be fast (those with tiles use "amx_bf16"). A
// pure function, not a measurement, so that a CPU computes the same bits in every run.
[[nodiscard]] IsaChoice choose_isa(const CpuIdentity& cpu,
                                   std::span<const std::string_view> usable);

}  // namespace annulus::cpu
