#pragma once

namespace annulus {

// The largest head dim, on every device.
inline constexpr int kMaxHeadDim = 512;

// Rows of a cache are filled up to whole vectors and whole tiles.
[[nodiscard]] constexpr int padded_head_dim(int head_dim) { return (head_dim + 31) / 32 * 32; }

}  // namespace annulus
