#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <optional>
#include <string>

#include "annulus/device.h"
#include "core/memory.h"
#include "core/memory_state.h"

// A wrapper of the CUDA runtime: errors become exceptions, streams become queues.
namespace annulus::cuda {

// Throws a DeviceError that names `what`. An error of a kernel is reported by a later call. With
// ANNULUS_CUDA_BLOCKING=1 every launch is waited for, so that the error names the right one.
void check(cudaError_t error, const std::string& what);
// After a launch.
void check_launch(cudaError_t error, const char* kernel, cudaStream_t stream);

// Makes this the current device of the calling thread until the end of the scope.
class DeviceScope {
 public:
  explicit DeviceScope(int device);
  ~DeviceScope();
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  int before_ = -1;  // < 0: it was already current
};

[[nodiscard]] std::shared_ptr<Queue> make_stream(int device);
// A queue for the caller's stream, which must outlive it.
[[nodiscard]] std::shared_ptr<Queue> borrow_stream(int device, cudaStream_t stream);
[[nodiscard]] cudaStream_t stream_of(Queue& queue);

[[nodiscard]] Memory allocate_device(int device, std::int64_t bytes, const char* what);
// The same, or spare memory of the executor that is being made anew (SpareMemory). Earlier work of
// its queue may still use it.
[[nodiscard]] Memory allocate_reusable(int device, std::int64_t bytes, const char* what);
// Free and total memory of the device; nothing if it is not known.
[[nodiscard]] std::optional<MemoryState> device_memory_state(const Device& device);
// Memory from CUDA's own allocator, even if another one is set.
[[nodiscard]] Memory allocate_plain(int device, std::int64_t bytes, const char* what);
// Pinned host memory, and the same or spare memory.
[[nodiscard]] Memory allocate_pinned(int device, std::int64_t bytes, const char* what);
[[nodiscard]] Memory allocate_reusable_pinned(int device, std::int64_t bytes, const char* what);

// Whether waiting for an event of a CUDA queue would return at once.
[[nodiscard]] bool has_happened(const Event& event);

}  // namespace annulus::cuda
