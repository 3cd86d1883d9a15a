#include "kernels/backend.h"

#include <atomic>
#include <utility>

#include "annulus/error.h"
#include "kernels/cpu/backend.h"

namespace annulus {
namespace {

std::atomic<WrapBackend> wrapper = nullptr;

}  // namespace

std::shared_ptr<Backend> backend_of(const Device& device, int threads) {
  if (device.kind != Device::Kind::cpu) {
    throw DeviceError("device is " + name_of(device) + ": this build has kernels for the CPU only");
  }
  std::shared_ptr<Backend> backend = cpu::make_backend(threads);
  const WrapBackend wrap = wrapper.load();
  return wrap == nullptr ? backend : wrap(std::move(backend));
}

void wrap_backends(WrapBackend wrap) { wrapper.store(wrap); }

}  // namespace annulus
