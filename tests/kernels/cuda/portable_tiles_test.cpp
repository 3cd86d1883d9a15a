// Which tiles the fp32 kernels get on which GPU. No GPU is needed.

#include "kernels/cuda/portable/tiles.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <limits>

#include "annulus/error.h"

namespace annulus::cuda {
namespace {

constexpr std::size_t kAda = 99 * 1024;  // sm_86 too
constexpr std::size_t kAmpere = 163 * 1024;
constexpr std::size_t kHopper = 227 * 1024;

TEST(PortableTiles, FitEveryGpuForEveryHeadDim) {
  for (const std::size_t shared : {kAda, kAmpere, kHopper}) {
    for (int head_dim = 1; head_dim <= kMostTiledDim; ++head_dim) {
      for (const bool backward : {false, true}) {
        const Fp32Tile tile = fp32_tile(head_dim, backward, shared);
        EXPECT_LE(fp32_shared_bytes(tile, head_dim, backward), shared)
            << head_dim << (backward ? " backward, " : " forward, ") << shared;
        // Items of 64 rows are cut into parts, and canonical tiles are cut at multiples of 64.
        EXPECT_EQ(64 % tile.own, 0);
        EXPECT_EQ(64 % tile.other, 0);
      }
    }
  }
}

TEST(PortableTiles, AreTheBestThatFit) {
  const Fp32Tile best{64, 32};
  for (const int head_dim : {8, 64, 72, 128, 136, 256}) {
    EXPECT_EQ(fp32_tile(head_dim, false, kHopper), best);
    EXPECT_EQ(fp32_tile(head_dim, true, kHopper), best);
    EXPECT_EQ(fp32_tile(head_dim, false, kAmpere), best);
  }
  EXPECT_EQ(fp32_tile(64, true, kAda), best);
  EXPECT_EQ(fp32_tile(128, false, kAda), best);
  EXPECT_EQ(fp32_tile(128, true, kAmpere), best);
  EXPECT_EQ(fp32_tile(128, true, kAda), (Fp32Tile{32, 32}));
  EXPECT_EQ(fp32_tile(256, true, kAmpere), (Fp32Tile{32, 32}));
  EXPECT_EQ(fp32_tile(256, false, kAda), (Fp32Tile{32, 16}));
  EXPECT_EQ(fp32_tile(256, true, kAda), (Fp32Tile{16, 16}));
}

TEST(PortableTiles, EnvironmentAllowsLess) {
  const auto with = [](const char* text) {
    setenv("ANNULUS_CUDA_SHARED_KB", text, 1);
    return allowed_shared_bytes();
  };
  EXPECT_EQ(with("99"), kAda);
  EXPECT_EQ(with("163"), kAmpere);
  EXPECT_EQ(with(""), std::numeric_limits<std::size_t>::max());
  for (const char* text : {"98", "-99", "99 KB", "much", "2048"})
    EXPECT_THROW(with(text), ConfigError);
  unsetenv("ANNULUS_CUDA_SHARED_KB");
  EXPECT_EQ(allowed_shared_bytes(), std::numeric_limits<std::size_t>::max());
}

}  // namespace
}  // namespace annulus::cuda
