#pragma once

#include <memory>

#include "core/thread_pool.h"
#include "kernels/cached_rows.h"
#include "kernels/cpu/kernel.h"

namespace annulus::cpu {

[[nodiscard]] std::unique_ptr<CacheKernels> make_cache_kernels(const CacheShape& shape,
                                                               const Kernels& kernels,
                                                               std::shared_ptr<ThreadPool> pool);

}  // namespace annulus::cpu
