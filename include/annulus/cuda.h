#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "annulus/device.h"

// What is special about CUDA devices. Everything is there in builds without CUDA, too: they have no
// devices.
namespace annulus {

[[nodiscard]] bool cuda_built();
// Why there is no device to be used; empty: there is one.
[[nodiscard]] std::string cuda_complaint();
[[nodiscard]] int cuda_device_count();  // 0 where cuda_complaint() says why

// For people: name, capability, memory, driver, and the best kernels it may run. The environment
// variable ANNULUS_CUDA_KERNELS forces others.
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

// A stream of the caller's (a cudaStream_t) as a queue, for RingAttention::use_queue. The stream
// outlives the queue.
[[nodiscard]] std::shared_ptr<Queue> cuda_queue(const Device& device, void* stream);

// Whether a CUDA graph is being captured from a stream (a cudaStream_t). An executor whose passes
// are part of a graph outlives it: the graph uses its memory.
[[nodiscard]] bool cuda_capturing(void* stream);

// The stream of a queue of a CUDA device, for transports that enqueue there.
[[nodiscard]] void* cuda_stream(Queue& queue);

// From where executors that are made from now on take device memory: a framework's allocator, so
// that it is counted and used again there. allocate(device, bytes) returns null where there is no
// memory; spare(device), which may be empty, the bytes that it keeps from the device and could
// give: to it they are in use. Empty functions: CUDA's own again.
struct CudaAllocator {
  std::function<void*(int device, std::int64_t bytes)> allocate;
  std::function<void(int device, void* memory)> free;
  std::function<std::int64_t(int device)> spare = {};
};
void use_cuda_allocator(CudaAllocator allocator);

}  // namespace annulus
