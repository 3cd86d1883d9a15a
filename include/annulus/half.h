#pragma once

#include <bit>
#include <cstdint>

#include "annulus/tensor.h"

namespace annulus {

// Scalar conversions between fp32 and the two 16-bit formats, round to nearest even. NaN stays NaN.
[[nodiscard]] constexpr float bf16_to_float(std::uint16_t bits) noexcept {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

[[nodiscard]] constexpr std::uint16_t float_to_bf16(float value) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7fffffffU) > 0x7f800000U) return static_cast<std::uint16_t>((bits >> 16) | 0x40U);
  return static_cast<std::uint16_t>((bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16);
}

[[nodiscard]] float f16_to_float(std::uint16_t bits) noexcept;
[[nodiscard]] std::uint16_t float_to_f16(float value) noexcept;

// Element access by dtype, for everything that is not a kernel: reference, tests, files.
[[nodiscard]] float load_element(const void* data, DType dtype, std::int64_t index) noexcept;
void store_element(void* data, DType dtype, std::int64_t index, float value) noexcept;

}  // namespace annulus
