// Of builds without CUDA: says so.
#include "annulus/cuda.h"
#include "annulus/error.h"
#include "kernels/cuda/backend.h"

namespace annulus {
namespace {

[[noreturn]] void refuse() { throw DeviceError(cuda_complaint()); }

}  // namespace

bool cuda_built() { return false; }
std::string cuda_complaint() {
  return "this build has no CUDA: nvcc was not found when it was configured";
}
int cuda_device_count() { return 0; }
CudaDevice cuda_device(int) { refuse(); }
std::shared_ptr<Queue> cuda_queue(const Device&, void*) { refuse(); }
void use_cuda_allocator(CudaAllocator) { refuse(); }

std::shared_ptr<Backend> cuda::make_backend(int device) {
  throw DeviceError("device is cuda:" + std::to_string(device) + ": " + cuda_complaint());
}

}  // namespace annulus
