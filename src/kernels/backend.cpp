#include "kernels/backend.h"

#include <atomic>
#include <utility>

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

WrapBackend wrap_backends(WrapBackend wrap) { return wrapper.exchange(wrap); }

}  // namespace annulus
