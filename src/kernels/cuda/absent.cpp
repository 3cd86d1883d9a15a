// For builds without CUDA: reports that it is missing.
#include <fmt/format.h>

#include "annulus/cuda.h"
#include "annulus/error.h"
#include "kernels/cuda/backend.h"

namespace annulus {
namespace {

[[noreturn]] void refuse(int device) {
  throw DeviceError(fmt::format("device is cuda:{}: {}", device, cuda_complaint()));
}

}  // namespace

bool cuda_built() { return false; }
std::string cuda_complaint() {
  return "this build has no CUDA: nvcc was not found when it was configured, or ANNULUS_CUDA was "
         "OFF";
}
int cuda_device_count() { return 0; }
CudaDevice cuda_device(int index) { refuse(index); }
std::shared_ptr<Queue> cuda_queue(const Device& device, void*) { refuse(device.index); }
bool cuda_capturing(void*) { return false; }
void* cuda_stream(Queue& queue) { refuse(queue.device().index); }
// NOLINTNEXTLINE(performance-unnecessary-value-param): cuda/device stores it
void use_cuda_allocator(CudaAllocator) { throw DeviceError(cuda_complaint()); }

std::shared_ptr<Backend> cuda::make_backend(int device) { refuse(device); }

}  // namespace annulus
