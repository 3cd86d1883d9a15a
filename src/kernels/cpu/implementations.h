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
  double (*multiply_add)(std::int64_t rounds, float* sink);  // FLOPs done; see peak-inl.h
  bool only_by_name = false;                                 // for tests: never chosen otherwise

  [[nodiscard]] bool usable() const { return complaint.empty(); }
};
inline constexpr const char* kNotThisCpu = "this CPU does not have it";

// bf16 on tiles, real ones and such in plain AVX-512. `others` does what they do not do themselves:
// other dtypes, and what has no kernel on tiles yet. Empty where they cannot be compiled.
[[nodiscard]] std::vector<Implementation> amx_bf16_implementations(const Kernels& others);
[[nodiscard]] std::vector<Implementation> amx_bf16_emulated_implementations(const Kernels& others);

// Widest first.
[[nodiscard]] std::vector<Implementation>
avx512_bf16_implementations();  // empty where it cannot be compiled
[[nodiscard]] std::vector<Implementation> highway_implementations();

// For kernels; compiled once, for no instruction set in particular.
[[noreturn]] void throw_scratch_exhausted(std::size_t wanted_bytes, std::size_t left_bytes);

}  // namespace annulus::cpu
