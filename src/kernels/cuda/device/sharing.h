#pragma once

#include <memory>

#include "core/device_sharing.h"

namespace annulus::cuda {

// CUDA IPC: memory of one process that others map, and words in host memory that streams write and
// wait for without a kernel.
[[nodiscard]] std::shared_ptr<DeviceSharing> make_sharing(int device);

}  // namespace annulus::cuda
