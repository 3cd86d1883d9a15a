#pragma once

namespace annulus {

// The largest head dim, on every device.
inline constexpr int kMaxHeadDim = 512;

}  // namespace annulus
