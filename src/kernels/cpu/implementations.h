#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/cpu/kernel.h"

namespace annulus::cpu {

struct Implementation {
  const Kernels* kernels;
  bool usable;                                               // on this CPU
  double (*multiply_add)(std::int64_t rounds, float* sink);  // FLOPs done; see peak-inl.h
};

// Widest first.
[[nodiscard]] std::vector<Implementation>
avx512_bf16_implementations();  // empty where it cannot be compiled
[[nodiscard]] std::vector<Implementation> highway_implementations();

// For kernels; compiled once, for no instruction set in particular.
[[noreturn]] void throw_scratch_exhausted(std::size_t wanted_bytes, std::size_t left_bytes);

}  // namespace annulus::cpu
