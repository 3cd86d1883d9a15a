#pragma once

#include <array>
#include <cstddef>
#include <span>

// Tile sizes of the portable fp32 kernels, by the shared memory that a block may have. No CUDA
// here: the choice is tested on the host.
namespace annulus::cuda {

// Of the GPUs from sm_80 on, sm_86 and sm_89 give a block the least. sm_80: 163 KiB, sm_90: 227.
inline constexpr std::size_t kLeastSharedBytes = 99 * 1024;

struct Fp32Tile {
  int own = 0;    // rows that a block owns
  int other = 0;  // rows of a tile of the other side

  friend bool operator==(const Fp32Tile&, const Fp32Tile&) = default;
};

// From the best to the smallest: the first that fits is used.
inline constexpr std::array kFp32ForwardTiles{Fp32Tile{64, 32}, Fp32Tile{32, 16}};
inline constexpr std::array kFp32GradientTiles{Fp32Tile{64, 32}, Fp32Tile{32, 32},
                                               Fp32Tile{16, 16}};
[[nodiscard]] constexpr std::span<const Fp32Tile> fp32_tiles(bool backward) {
  if (backward) return kFp32GradientTiles;
  return kFp32ForwardTiles;
}

// Wider heads have kernels without tiles.
inline constexpr int kMostTiledDim = 256;

// Heads are padded with zeros to one of three widths.
[[nodiscard]] constexpr int padded_dim(int head_dim) {
  return head_dim <= 64 ? 64 : head_dim <= 128 ? 128 : 256;
}

// Shared memory of a block: ForwardShared and GradientShared of fp32.cu.
[[nodiscard]] constexpr std::size_t fp32_shared_bytes(const Fp32Tile& tile, int head_dim,
                                                      bool backward) {
  const auto rows_of_tile = [](int rows, int channels) {  // TileRows
    return (static_cast<std::size_t>(rows) * (8 * static_cast<std::size_t>(channels) + 5) + 7) / 8 *
           8;
  };
  const auto own = static_cast<std::size_t>(tile.own);
  const auto other = static_cast<std::size_t>(tile.other);
  const std::size_t row = (static_cast<std::size_t>(padded_dim(head_dim)) + 4) * 4;
  const std::size_t weights = own * (other + 1) * 4;
  if (backward) {
    return (own + other) * 2 * row + 2 * weights + rows_of_tile(tile.own, 5) +
           rows_of_tile(tile.own, 4);
  }
  return (own + 2 * other) * row + weights + rows_of_tile(tile.own, 4) +
         rows_of_tile(tile.other, 2);
}

// The best that fits. The smallest fits kLeastSharedBytes for every head dim.
[[nodiscard]] Fp32Tile fp32_tile(int head_dim, bool backward, std::size_t shared_bytes);

// The limit of a block's shared memory that the environment variable ANNULUS_CUDA_SHARED_KB sets,
// to test the tiles of a smaller GPU on a larger one. Not set: no limit. ConfigError unless it is a
// number of at least 99.
[[nodiscard]] std::size_t allowed_shared_bytes();

}  // namespace annulus::cuda
