#pragma once

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

}  // namespace annulus::cpu
