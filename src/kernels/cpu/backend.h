#pragma once

#include <memory>

#include "kernels/backend.h"

namespace annulus::cpu {

// All CPU cores of this process, behind the pool of `threads` threads (0: the shared one).
[[nodiscard]] std::shared_ptr<Backend> make_backend(int threads);

}  // namespace annulus::cpu
