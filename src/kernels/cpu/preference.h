#pragma once

#include <span>
#include <string>
#include <string_view>

#include "core/machine.h"

namespace annulus::cpu {

// How fast a CPU multiplies pairs of bf16 natively (AVX512_BF16), beside fp32 multiply-add of as
// wide vectors.
enum class Bf16Dot {
  fast,     // known: more FLOP/s than fp32
  slow,     // known: fewer
  unknown,  // not measured, by us or anybody whom we could cite
};
[[nodiscard]] Bf16Dot bf16_dot_of(const CpuIdentity& cpu);

struct IsaChoice {
  std::string_view name;  // one of `usable`
  std::string reason;     // for people
};

// The set that runs when none is forced: the first of `usable` (widest first, not empty), but
// "avx512_bf16" only where it is known to be fast (CPUs with tiles, "amx_bf16", use these). A pure
// function: the same CPU computes the same bits in every run, which a choice by timing would not.
[[nodiscard]] IsaChoice choose_isa(const CpuIdentity& cpu,
                                   std::span<const std::string_view> usable);

}  // namespace annulus::cpu
