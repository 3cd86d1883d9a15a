#pragma once

#include <memory>

#include "core/device_sharing.h"

namespace annulus::cuda {

// CUDA IPC: memory of one process mapped by others, and words in host memory that streams wait for
// and write without a kernel.
[[nodiscard]] std::shared_ptr<DeviceSharing> make_sharing(int device);

}  // namespace annulus::cuda
