#pragma once

#include <memory>

#include "kernels/backend.h"

namespace annulus::cuda {

// DeviceError if there is no such device, or if this build has no CUDA.
[[nodiscard]] std::shared_ptr<Backend> make_backend(int device);

}  // namespace annulus::cuda
