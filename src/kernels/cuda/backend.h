#pragma once

#include <memory>

#include "kernels/backend.h"

namespace annulus::cuda {

// DeviceError where there is no such device, or this build knows of none.
[[nodiscard]] std::shared_ptr<Backend> make_backend(int device);

}  // namespace annulus::cuda
