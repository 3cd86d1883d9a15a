#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "annulus/device.h"

// Functions for CUDA devices. Builds without CUDA have them, too, and report no devices.
namespace annulus {

[[nodiscard]] bool cuda_built();
// Why no device can be used; empty if one can.
[[nodiscard]] std::string cuda_complaint();
[[nodiscard]] int cuda_device_count();  // 0 if cuda_complaint() gives a reason

// Facts about a device: name, capability, memory, driver, and the best kernels that it can run. The
// environment variable ANNULUS_CUDA_KERNELS forces others.
struct CudaDevice {
  std::string name;
  int major = 0;
  int minor = 0;
  int multiprocessors = 0;
  std::int64_t memory_bytes = 0;
  std::int64_t free_bytes = 0;
  std::string driver;   // "580.65.06, CUDA 13.0"
  std::string kernels;  // "sm90" or "portable"
};
[[nodiscard]] CudaDevice cuda_device(int index);  // DeviceError, ConfigError: no such index

// Wraps a caller's stream (a cudaStream_t) as a queue, for RingAttention::use_queue. The stream
// must outlive the queue.
[[nodiscard]] std::shared_ptr<Queue> cuda_queue(const Device& device, void* stream);

// Whether a CUDA graph is being captured from a stream (a cudaStream_t). An executor whose passes
// are part of a graph must outlive the graph, which uses its memory.
[[nodiscard]] bool cuda_capturing(void* stream);

// The stream of a queue of a CUDA device, for transports that enqueue there.
[[nodiscard]] void* cuda_stream(Queue& queue);

// Sets where executors made from now on get device memory from: the allocator of a framework, so
// that it counts and reuses the memory. allocate(device, bytes) returns null if there is none.
// spare(device), which may be empty, returns the bytes that the allocator holds and could free; for
// the device they are in use. Empty functions restore CUDA's own allocator.
struct CudaAllocator {
  std::function<void*(int device, std::int64_t bytes)> allocate;
  std::function<void(int device, void* memory)> free;
  std::function<std::int64_t(int device)> spare = {};
};
void use_cuda_allocator(CudaAllocator allocator);

}  // namespace annulus
