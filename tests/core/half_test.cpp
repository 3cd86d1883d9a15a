#include "annulus/half.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>

#include "annulus/error.h"

namespace annulus {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr std::uint32_t kF16Infinity = 0x7c00;
constexpr std::uint32_t kBf16Infinity = 0x7f80;

std::uint16_t u16(std::uint32_t bits) { return static_cast<std::uint16_t>(bits); }

// The definition of IEEE binary16, in another way than the implementation.
float f16_by_definition(std::uint32_t bits) {
  const int exponent = static_cast<int>((bits >> 10) & 0x1fU);
  const int mantissa = static_cast<int>(bits & 0x3ffU);
  const double magnitude =
      exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
  return static_cast<float>((bits & 0x8000U) != 0 ? -magnitude : magnitude);
}

TEST(Half, F16ToFloatFollowsTheDefinitionForEveryFiniteValue) {
  for (std::uint32_t bits = 0; bits <= 0xffffU; ++bits) {
    if ((bits & kF16Infinity) == kF16Infinity) continue;
    const float value = f16_to_float(u16(bits));
    ASSERT_EQ(value, f16_by_definition(bits)) << "bits " << bits;
    ASSERT_EQ(std::signbit(value), bits >= 0x8000U) << "bits " << bits;
  }
}

TEST(Half, F16RoundTripsEveryValue) {
  for (std::uint32_t bits = 0; bits <= 0xffffU; ++bits) {
    const float value = f16_to_float(u16(bits));
    if ((bits & 0x7fffU) > kF16Infinity) {
      ASSERT_TRUE(std::isnan(value)) << "bits " << bits;
      ASSERT_TRUE(std::isnan(f16_to_float(float_to_f16(value)))) << "bits " << bits;
    } else {
      ASSERT_EQ(float_to_f16(value), bits);
    }
  }
}

TEST(Half, Bf16RoundTripsEveryValue) {
  for (std::uint32_t bits = 0; bits <= 0xffffU; ++bits) {
    const float value = bf16_to_float(u16(bits));
    if ((bits & 0x7fffU) > kBf16Infinity) {
      ASSERT_TRUE(std::isnan(value)) << "bits " << bits;
      ASSERT_TRUE(std::isnan(bf16_to_float(float_to_bf16(value)))) << "bits " << bits;
    } else {
      ASSERT_EQ(float_to_bf16(value), bits);
    }
  }
}

// Rounding is monotonic, so checking the midpoint of every two neighbours and the fp32 numbers
// next to it covers all inputs. Neighbouring magnitudes have neighbouring bit patterns in both
// formats, so parity of the pattern is parity of the mantissa. `above_last` stands for the value
// that infinity takes the place of, one step beyond the largest finite one.
template <typename ToFloat, typename FromFloat>
void expect_nearest_even(std::uint32_t infinity, double above_last, ToFloat to_float,
                         FromFloat from_float) {
  for (std::uint32_t low = 0; low < infinity; ++low) {
    const std::uint32_t high = low + 1;
    const double low_value = to_float(u16(low));
    const double high_value = high == infinity ? above_last : to_float(u16(high));
    const auto midpoint = static_cast<float>((low_value + high_value) / 2.0);
    const std::uint32_t even = low % 2 == 0 ? low : high;
    for (const std::uint32_t sign : {0U, 0x8000U}) {
      const float direction = sign == 0 ? 1.0F : -1.0F;
      ASSERT_EQ(from_float(direction * midpoint), sign | even) << "between " << low << ", " << high;
      ASSERT_EQ(from_float(direction * std::nextafter(midpoint, 0.0F)), sign | low)
          << "low " << low;
      ASSERT_EQ(from_float(direction * std::nextafter(midpoint, kInf)), sign | high)
          << "high " << high;
    }
  }
}

TEST(Half, F16RoundsToNearestEvenBetweenAllNeighbours) {
  expect_nearest_even(kF16Infinity, 65536.0, f16_to_float, float_to_f16);
}

TEST(Half, Bf16RoundsToNearestEvenBetweenAllNeighbours) {
  expect_nearest_even(kBf16Infinity, std::ldexp(1.0, 128), bf16_to_float, float_to_bf16);
}

TEST(Half, KnownF16Values) {
  EXPECT_EQ(float_to_f16(1.0F), 0x3c00);
  EXPECT_EQ(float_to_f16(-2.0F), 0xc000);
  EXPECT_EQ(float_to_f16(65504.0F), 0x7bff);
  EXPECT_EQ(float_to_f16(65519.996F), 0x7bff);
  EXPECT_EQ(float_to_f16(65520.0F), 0x7c00);
  EXPECT_EQ(float_to_f16(0x1p-14F), 0x0400);  // smallest normal
  EXPECT_EQ(float_to_f16(0x1p-24F), 0x0001);  // smallest subnormal
  EXPECT_EQ(float_to_f16(0x1p-25F), 0x0000);  // tie: even
  EXPECT_EQ(float_to_f16(-0.0F), 0x8000);
  EXPECT_EQ(float_to_f16(std::numeric_limits<float>::denorm_min()), 0x0000);
}

TEST(Half, InfinityAndNaNSurvive) {
  EXPECT_EQ(float_to_f16(kInf), 0x7c00);
  EXPECT_EQ(float_to_f16(-kInf), 0xfc00);
  EXPECT_EQ(f16_to_float(0x7c00), kInf);
  EXPECT_EQ(f16_to_float(0xfc00), -kInf);
  EXPECT_EQ(float_to_bf16(-kInf), 0xff80);
  // A payload in the lowest bit alone would be cut off and leave an infinity.
  for (const float nan : {kNaN, -kNaN, std::bit_cast<float>(0x7f800001U)}) {
    EXPECT_TRUE(std::isnan(f16_to_float(float_to_f16(nan))));
    EXPECT_TRUE(std::isnan(bf16_to_float(float_to_bf16(nan))));
  }
}

TEST(Half, StoredElementsLoadBackInEveryDType) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    SCOPED_TRACE(name_of(dtype));
    std::array<float, 4> storage{};
    for (std::int64_t i = 0; i < 4; ++i) {
      store_element(storage.data(), dtype, i, static_cast<float>(i) - 1.5F);
    }
    for (std::int64_t i = 0; i < 4; ++i) {
      EXPECT_EQ(load_element(storage.data(), dtype, i), static_cast<float>(i) - 1.5F);
    }
  }
}

TEST(DType, NamesRoundTripAndLongNamesAreAccepted) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    EXPECT_EQ(dtype_from_name(name_of(dtype)), dtype);
  }
  EXPECT_EQ(dtype_from_name("float32"), DType::f32);
  EXPECT_EQ(dtype_from_name("bfloat16"), DType::bf16);
  EXPECT_EQ(dtype_from_name("float16"), DType::f16);
}

TEST(DType, UnknownNameIsRefusedAndQuoted) {
  try {
    static_cast<void>(dtype_from_name("int8"));
    FAIL() << "accepted";
  } catch (const ConfigError& error) {
    EXPECT_NE(std::string(error.what()).find("'int8'"), std::string::npos) << error.what();
  }
}

TEST(TensorView, ShapePrintsAsAList) {
  EXPECT_EQ(shape_string(ConstTensorView(nullptr, DType::f32, {1, 4096, 16, 128})),
            "[1, 4096, 16, 128]");
  EXPECT_EQ(shape_string(ConstTensorView(nullptr, DType::f32, {7})), "[7]");
  EXPECT_EQ(shape_string(ConstTensorView()), "[]");
}

}  // namespace
}  // namespace annulus
