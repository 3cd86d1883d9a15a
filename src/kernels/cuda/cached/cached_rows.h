#pragma once

#include <memory>

#include "kernels/cached_rows.h"

namespace annulus::cuda {

[[nodiscard]] std::unique_ptr<CacheKernels> make_cache_kernels(const CacheShape& shape, int device);

}  // namespace annulus::cuda
