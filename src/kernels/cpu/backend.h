#pragma once

#include <memory>

#include "kernels/backend.h"

namespace annulus::cpu {

// The backend of the CPU, with a pool of `threads` threads (0: the shared pool).
[[nodiscard]] std::shared_ptr<Backend> make_backend(int threads);

}  // namespace annulus::cpu
