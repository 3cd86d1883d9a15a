#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <utility>

#include "annulus/device.h"
#include "annulus/error.h"

namespace annulus {

// Counts what Memory holds, all threads together.
void count_memory(std::int64_t bytes) noexcept;
// For tests that nothing is left behind.
[[nodiscard]] std::int64_t memory_in_use() noexcept;

// Memory of a device, whose size is known once.
class Memory {
 public:
  using Free = std::function<void(std::byte*)>;  // empty: somebody else's

  Memory() = default;
  Memory(std::byte* data, std::int64_t bytes, Device device, Free free)
      : data_(data, Deleter(std::move(free), bytes)), bytes_(bytes), device_(device) {
    if (data_.get_deleter().free && data != nullptr) count_memory(bytes);
  }

  [[nodiscard]] std::byte* data() const { return data_.get(); }
  [[nodiscard]] float* floats() const { return reinterpret_cast<float*>(data_.get()); }
  [[nodiscard]] std::int64_t bytes() const { return bytes_; }
  [[nodiscard]] std::span<std::byte> span() const {
    return {data_.get(), static_cast<std::size_t>(bytes_)};
  }
  [[nodiscard]] const Device& device() const { return device_; }

 private:
  struct Deleter {
    Deleter() : bytes(0) {}
    Deleter(Free f, std::int64_t size) : free(std::move(f)), bytes(size) {}
    Free free;
    std::int64_t bytes;
    void operator()(std::byte* data) const {
      if (!free) return;
      free(data);
      count_memory(-bytes);
    }
  };
  std::unique_ptr<std::byte, Deleter> data_;
  std::int64_t bytes_ = 0;
  Device device_;
};

// Asked before any block is allocated, of whatever device, and before plans are made (0 bytes):
// OutOfMemory where a test says so. This is the one place through which all memory comes.
void admit(std::int64_t bytes, const char* what, const Device& device = {});
// For tests: false means that there is no memory. Null ends that; returns what was asked before.
using AllocationHook = bool (*)(std::int64_t bytes, const char* what);
AllocationHook set_allocation_hook(AllocationHook hook);

// The error of an allocation that failed, with what the device says it has.
[[nodiscard]] OutOfMemory out_of_memory(std::int64_t bytes, const char* what, const Device& device);

// Aligned host memory, not initialised. OutOfMemory also where the system would promise more than
// it has, and end the process when it is used.
[[nodiscard]] Memory allocate_host(std::int64_t bytes, const char* what);

}  // namespace annulus
