#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <optional>
#include <string>

#include "annulus/device.h"
#include "core/memory.h"
#include "core/memory_state.h"

// The CUDA runtime as the rest of the backend wants it: errors are exceptions, streams are queues.
namespace annulus::cuda {

// DeviceError that names `what`. An error that a kernel left behind shows at whatever is asked for
// next: ANNULUS_CUDA_BLOCKING=1 waits after every launch, so that it names the right one.
void check(cudaError_t error, const std::string& what);
// After a launch.
void check_launch(cudaError_t error, const char* kernel, cudaStream_t stream);

// The calling thread uses this device until the end of the scope.
class DeviceScope {
 public:
  explicit DeviceScope(int device);
  ~DeviceScope();
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  int before_ = -1;  // < 0: it was this one
};

[[nodiscard]] std::shared_ptr<Queue> make_stream(int device);
// Somebody else's stream, which outlives the queue.
[[nodiscard]] std::shared_ptr<Queue> borrow_stream(int device, cudaStream_t stream);
[[nodiscard]] cudaStream_t stream_of(Queue& queue);

[[nodiscard]] Memory allocate_device(int device, std::int64_t bytes, const char* what);
// What the device has; nothing where it does not tell.
[[nodiscard]] std::optional<MemoryState> device_memory_state(const Device& device);
// CUDA's own, whatever allocator is in use.
[[nodiscard]] Memory allocate_plain(int device, std::int64_t bytes, const char* what);
// Host memory that the device copies from and to without stopping.
[[nodiscard]] Memory allocate_pinned(int device, std::int64_t bytes, const char* what);

// Copies tables: when it returns, they are there for every stream.
void copy_to_device(int device, std::byte* to, const void* from, std::int64_t bytes,
                    const char* what);

}  // namespace annulus::cuda
