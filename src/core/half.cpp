#include "annulus/half.h"

namespace annulus {

// Both directions use integer arithmetic only: the result depends neither on the rounding mode nor
// on flush-to-zero, which an application may have switched on for the calling thread.

float f16_to_float(std::uint16_t bits) noexcept {
  const std::uint32_t sign = (bits & 0x8000U) << 16;
  const std::uint32_t exponent = (bits >> 10) & 0x1fU;
  const std::uint32_t mantissa = bits & 0x3ffU;
  if (exponent == 0x1fU) return std::bit_cast<float>(sign | 0x7f800000U | (mantissa << 13));
  // The exponent biases are 15 and 127.
  if (exponent != 0) {
    return std::bit_cast<float>(sign | ((exponent + 112U) << 23) | (mantissa << 13));
  }
  if (mantissa == 0) return std::bit_cast<float>(sign);
  // Subnormal: mantissa * 2^-24 is a normal fp32 number. Its leading bit k becomes the implicit
  // one of exponent k - 24.
  const auto leading = static_cast<std::uint32_t>(std::bit_width(mantissa)) - 1U;
  const std::uint32_t fraction = (mantissa << (23U - leading)) & 0x7fffffU;
  return std::bit_cast<float>(sign | ((leading + 103U) << 23) | fraction);
}

std::uint16_t float_to_f16(float value) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000U;
  const std::uint32_t magnitude = bits & 0x7fffffffU;
  // The quiet bit keeps a NaN whose payload lies in the dropped bits from turning into infinity.
  if (magnitude > 0x7f800000U) {
    return static_cast<std::uint16_t>(sign | 0x7e00U | ((magnitude >> 13) & 0x3ffU));
  }
  // 65520 lies halfway between the largest finite value, 65504, and 65536: the tie goes to the
  // even one, infinity.
  if (magnitude >= 0x477ff000U) return static_cast<std::uint16_t>(sign | 0x7c00U);
  if (magnitude >= 0x38800000U) {  // 2^-14, the smallest normal
    const std::uint32_t rebiased = magnitude - (112U << 23);
    // A carry out of the mantissa correctly increments the exponent.
    const std::uint32_t rounded = (rebiased + 0xfffU + ((rebiased >> 13) & 1U)) >> 13;
    return static_cast<std::uint16_t>(sign | rounded);
  }
  // Subnormal: count multiples of 2^-24. The value is mantissa * 2^(exponent - 150), hence
  // mantissa >> (126 - exponent) of them; from a shift of 25 on it is below one half.
  const std::uint32_t exponent = magnitude >> 23;
  if (exponent < 102U) return static_cast<std::uint16_t>(sign);
  const std::uint32_t mantissa = (magnitude & 0x7fffffU) | 0x800000U;
  const std::uint32_t shift = 126U - exponent;  // 14..24
  const std::uint32_t below_half = (1U << (shift - 1U)) - 1U;
  const std::uint32_t rounded = (mantissa + below_half + ((mantissa >> shift) & 1U)) >> shift;
  return static_cast<std::uint16_t>(sign | rounded);
}

float load_element(const void* data, DType dtype, std::int64_t index) noexcept {
  if (dtype == DType::f32) return static_cast<const float*>(data)[index];
  const std::uint16_t bits = static_cast<const std::uint16_t*>(data)[index];
  return dtype == DType::bf16 ? bf16_to_float(bits) : f16_to_float(bits);
}

void store_element(void* data, DType dtype, std::int64_t index, float value) noexcept {
  if (dtype == DType::f32) {
    static_cast<float*>(data)[index] = value;
    return;
  }
  static_cast<std::uint16_t*>(data)[index] =
      dtype == DType::bf16 ? float_to_bf16(value) : float_to_f16(value);
}

}  // namespace annulus
