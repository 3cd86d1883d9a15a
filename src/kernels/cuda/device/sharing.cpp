#include "kernels/cuda/device/sharing.h"

#include <cudaTypedefs.h>

#include <cstring>
#include <string>

#include <fmt/format.h>

#include "annulus/error.h"
#include "kernels/cuda/device/driver_function.h"
#include "kernels/cuda/device/runtime.h"

namespace annulus::cuda {
namespace {

struct Driver {
  PFN_cuStreamWaitValue32_v11070 wait =
      driver_function<PFN_cuStreamWaitValue32_v11070>("cuStreamWaitValue32", 11070);
  PFN_cuStreamWriteValue32_v11070 write =
      driver_function<PFN_cuStreamWriteValue32_v11070>("cuStreamWriteValue32", 11070);
  PFN_cuMemGetAddressRange_v3020 range =
      driver_function<PFN_cuMemGetAddressRange_v3020>("cuMemGetAddressRange", 3020);

  [[nodiscard]] bool complete() const {
    return wait != nullptr && write != nullptr && range != nullptr;
  }
};
const Driver& driver() {
  static const Driver found;
  return found;
}

void check(CUresult result, const char* what) {
  if (result != CUDA_SUCCESS)
    throw DeviceError(fmt::format("cuda: {}: driver error {}", what, static_cast<int>(result)));
}

class CudaWords final : public SharedWords {
 public:
  CudaWords(int device, std::span<std::byte> memory) : device_(device), memory_(memory) {
    const DeviceScope scope(device_);
    cuda::check(cudaHostRegister(memory_.data(), memory_.size(),
                                 cudaHostRegisterPortable | cudaHostRegisterMapped),
                "locking memory that processes share");
    void* mapped = nullptr;
    const cudaError_t error = cudaHostGetDevicePointer(&mapped, memory_.data(), 0);
    if (error != cudaSuccess) static_cast<void>(cudaHostUnregister(memory_.data()));
    cuda::check(error, "mapping memory that processes share");
    words_ = reinterpret_cast<CUdeviceptr>(mapped);
  }
  ~CudaWords() override {
    try {
      const DeviceScope scope(device_);  // otherwise another, unused device gets a context
      static_cast<void>(cudaHostUnregister(memory_.data()));
    } catch (const DeviceError&) {  // the device failed, which was reported
    }
  }
  CudaWords(const CudaWords&) = delete;
  CudaWords& operator=(const CudaWords&) = delete;

  void wait(Queue& queue, std::size_t word, std::uint32_t value) override {
    const DeviceScope scope(device_);
    check(driver().wait(stream_of(queue), words_ + 4 * word, value, CU_STREAM_WAIT_VALUE_GEQ),
          "ordering a stream after another process");
  }
  void write(Queue& queue, std::size_t word, std::uint32_t value) override {
    const DeviceScope scope(device_);
    check(driver().write(stream_of(queue), words_ + 4 * word, value, CU_STREAM_WRITE_VALUE_DEFAULT),
          "telling another process how far a stream is");
  }

 private:
  int device_;
  std::span<std::byte> memory_;
  CUdeviceptr words_ = 0;
};

class CudaSharing final : public DeviceSharing {
 public:
  explicit CudaSharing(int device) : device_(device) {}

  [[nodiscard]] std::string complaint() const override {
    if (!driver().complete()) return "the CUDA driver is too old for streams that wait for words";
    return "";
  }
  [[nodiscard]] std::shared_ptr<Queue> make_queue() override { return make_stream(device_); }

  // Memory comes from the framework's allocator if it can be exported. PyTorch's expandable
  // segments cannot.
  // Other processes keep memory mapped until the ring ends, so an executor that is made anew uses
  // its memory again.
  [[nodiscard]] Memory allocate(std::int64_t bytes, const char* what) override {
    if (bytes == 0) return allocate_device(device_, bytes, what);
    const auto exportable = [&](std::int64_t size) {
      Memory memory = allocate_device(device_, size, what);
      cudaIpcMemHandle_t handle;
      if (export_memory(memory.data(), handle) == cudaSuccess) return memory;
      memory = {};
      return allocate_plain(device_, size, what);
    };
    return SpareMemory::allocate(bytes, what, {Device::Kind::cuda, device_}, exportable);
  }

  [[nodiscard]] SharedHandle share(const std::byte* memory) override {
    SharedHandle shared;
    cudaIpcMemHandle_t handle;
    static_assert(sizeof(handle) == sizeof(shared.bytes));
    cuda::check(export_memory(memory, handle), "sharing memory with other processes");
    std::memcpy(shared.bytes.data(), &handle, sizeof(handle));
    shared.offset = memory - base_of(memory);
    return shared;
  }

  [[nodiscard]] std::shared_ptr<std::byte> open(const SharedHandle& shared) override {
    const DeviceScope scope(device_);
    cudaIpcMemHandle_t handle;
    std::memcpy(&handle, shared.bytes.data(), sizeof(handle));
    void* memory = nullptr;
    cuda::check(cudaIpcOpenMemHandle(&memory, handle, cudaIpcMemLazyEnablePeerAccess),
                "opening memory of another process");
    return {static_cast<std::byte*>(memory), [device = device_](std::byte* mapped) {
              try {
                const DeviceScope closing(device);
                static_cast<void>(cudaIpcCloseMemHandle(mapped));
              } catch (const DeviceError&) {  // the device failed, which was reported
              }
            }};
  }

  [[nodiscard]] std::unique_ptr<SharedWords> adopt(std::span<std::byte> memory) override {
    return std::make_unique<CudaWords>(device_, memory);
  }

 private:
  // A handle stands for a whole allocation.
  [[nodiscard]] const std::byte* base_of(const std::byte* memory) const {
    const DeviceScope scope(device_);
    CUdeviceptr base = 0;
    std::size_t size = 0;
    check(driver().range(&base, &size, reinterpret_cast<CUdeviceptr>(memory)),
          "asking for the allocation of some memory");
    return reinterpret_cast<const std::byte*>(base);
  }
  [[nodiscard]] cudaError_t export_memory(const std::byte* memory,
                                          cudaIpcMemHandle_t& handle) const {
    const DeviceScope scope(device_);
    const cudaError_t error = cudaIpcGetMemHandle(&handle, const_cast<std::byte*>(base_of(memory)));
    if (error != cudaSuccess) static_cast<void>(cudaGetLastError());
    return error;
  }

  int device_;
};

}  // namespace

std::shared_ptr<DeviceSharing> make_sharing(int device) {
  return std::make_shared<CudaSharing>(device);
}

}  // namespace annulus::cuda
