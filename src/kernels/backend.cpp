#include "kernels/backend.h"

#include <atomic>
#include <utility>

#include "annulus/error.h"
#include "kernels/cached_rows.h"
#include "kernels/cpu/backend.h"
#include "kernels/cuda/backend.h"

namespace annulus {
namespace {

std::atomic<WrapBackend> wrapper = nullptr;

}  // namespace

std::shared_ptr<Backend> backend_of(const Device& device, int threads) {
  std::shared_ptr<Backend> backend = device.kind == Device::Kind::cuda
                                         ? cuda::make_backend(device.index)
                                         : cpu::make_backend(threads);
  const WrapBackend wrap = wrapper.load();
  return wrap == nullptr ? backend : wrap(std::move(backend));
}

std::unique_ptr<CacheKernels> Backend::cache_kernels(const CacheShape&) {
  throw ConfigError("caches of keys and values are not available on " + name_of(device()) +
                    ": use the CPU");
}

WrapBackend wrap_backends(WrapBackend wrap) { return wrapper.exchange(wrap); }

}  // namespace annulus
