#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/cpu/kernel.h"

namespace annulus::cpu {

struct Implementation {
  const Kernels* kernels;
  std::string complaint;  // why it cannot run here; empty: it can
  double (*multiply_add)(std::int64_t rounds, float* sink);  // returns FLOPs; see peak-inl.h
  bool only_by_name = false;                                 // for tests: never chosen by default

  [[nodiscard]] bool usable() const { return complaint.empty(); }
};
inline constexpr const char* kNotThisCpu = "this CPU does not have it";

// bf16 on tiles, real and emulated ones. `others` are the kernels for everything else: other dtypes
// and calls without a tile kernel. Empty if they cannot be compiled.
[[nodiscard]] std::vector<Implementation> amx_bf16_implementations(const Kernels& others);
[[nodiscard]] std::vector<Implementation> amx_bf16_emulated_implementations(const Kernels& others);

// The bf16 dot product of AVX512_BF16; likewise.
[[nodiscard]] std::vector<Implementation> avx512_bf16_implementations(const Kernels& others);
// Widest first.
[[nodiscard]] std::vector<Implementation> highway_implementations();

// For kernels. Compiled once, for the baseline instruction set.
[[noreturn]] void throw_scratch_exhausted(std::size_t wanted_bytes, std::size_t left_bytes);

}  // namespace annulus::cpu
