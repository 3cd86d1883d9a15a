#pragma once

namespace annulus {

// Head dims are 1 to this, on every device.
inline constexpr int kMaxHeadDim = 512;

}  // namespace annulus
